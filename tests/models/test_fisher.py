"""Products with the Fisher information, against the matrix itself."""

import pytest
import torch
from torch.func import functional_call

from lit_rl.models import Policy
from lit_rl.models.fisher import fisher_product, plain_attention, trained_parameters
from lit_rl.types import Sequences

# Two prompts, the second left-padded by two; responses of 4 and 2 tokens, and one row that does
# not count.
BATCH = Sequences(
    prompt_ids=torch.tensor([[1, 7, 11, 13], [0, 0, 1, 13], [1, 5, 6, 13]]),
    prompt_mask=torch.tensor([[True] * 4, [False, False, True, True], [True] * 4]),
    response_ids=torch.tensor([[5, 6, 9, 2], [8, 2, 0, 0], [4, 4, 4, 4]]),
    mask=torch.tensor([[True] * 4, [True, True, False, False], [False] * 4]),
)
NUM_TOKENS = 6
TEMPERATURE = 0.7


def tiny(tiny_source, model_type, **options):
    """A policy of some hundred weights, in float64."""
    small = {
        "llama": {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "num_key_value_heads": 1},
        "gpt2": {"n_embd": 4, "n_layer": 1, "n_head": 2, "n_positions": 16},
    }  # fmt: skip
    return Policy(tiny_source(model_type, config=small[model_type], **options).model(0)).double()


def vectors(policy, number=3):
    size = sum(parameter.numel() for parameter in trained_parameters(policy))
    generator = torch.Generator().manual_seed(0)
    return torch.randn(number, size, generator=generator, dtype=torch.float64)


def product(policy, vector, micro_batches=(BATCH,)):
    with plain_attention():
        return fisher_product(policy, micro_batches, vector, temperature=TEMPERATURE)


def dense_fisher(policy):
    """mean over tokens of J^T (diag(p) - p p^T) J, with J the Jacobian of the scaled logits."""
    names = [name for name, _ in policy.named_parameters()]
    model = torch.nn.Module()
    model.policy = policy
    model.forward = lambda: policy.head(policy.states(BATCH))

    def logits(*parameters):
        values = {f"policy.{n}": p for n, p in zip(names, parameters, strict=True)}
        return functional_call(model, values, ())[BATCH.mask] / TEMPERATURE

    parameters = tuple(policy.parameters())
    with plain_attention():
        blocks = torch.autograd.functional.jacobian(logits, parameters)
        p = logits(*parameters).softmax(-1).detach()
    jacobian = torch.cat([block.flatten(2) for block in blocks], dim=2)
    middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return torch.einsum("tvi,tvw,twj->ij", jacobian, middle, jacobian) / NUM_TOKENS


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_product_is_that_of_the_matrix(tiny_source, model_type):
    policy = tiny(tiny_source, model_type)
    matrix = dense_fisher(policy)
    assert matrix.abs().max() > 0.01
    tolerance = 1e-6 if model_type == "llama" else 1e-12  # the norms of a llama are in float32
    for vector in vectors(policy):
        torch.testing.assert_close(
            product(policy, vector), matrix @ vector, rtol=tolerance, atol=tolerance
        )


def test_it_is_the_hessian_of_the_mean_kl(tiny_source):
    """v^T F v is the second difference of the mean KL: KL(theta, theta + h v) = h^2 v^T F v / 2."""
    policy, old = (tiny(tiny_source, "gpt2") for _ in range(2))
    vector, h = vectors(policy, 1)[0], 1e-4
    expected = float(vector @ product(policy, vector))
    values = []
    for sign in (1, -1):  # the cubic term of the KL cancels
        with torch.no_grad():
            pieces = (sign * h * vector).split([p.numel() for p in policy.parameters()])
            for parameter, before, piece in zip(
                policy.parameters(), old.parameters(), pieces, strict=True
            ):
                parameter.copy_(before + piece.view_as(before))
            states, old_states = (p.states(BATCH) for p in (policy, old))
            kl = policy.kl_from(old, old_states, states, BATCH.mask, temperature=TEMPERATURE)
        values.append(float(kl.sum() / NUM_TOKENS))
    assert sum(values) / h**2 == pytest.approx(expected, rel=1e-4)


def test_micro_batches_add_up(tiny_source):
    policy = tiny(tiny_source, "gpt2")
    (vector,) = vectors(policy, 1)
    rows = [BATCH.select(torch.tensor([row])).trimmed() for row in (2, 0, 1)]
    torch.testing.assert_close(product(policy, vector, rows), product(policy, vector))


def test_a_row_that_does_not_count_and_no_row_at_all_add_nothing(tiny_source):
    policy = tiny(tiny_source, "gpt2")
    (vector,) = vectors(policy, 1)
    uncounted = BATCH.select(torch.tensor([2])).trimmed()
    assert product(policy, vector, [uncounted]).eq(0).all()
    assert product(policy, vector, []).eq(0).all()


def test_it_writes_no_gradient(tiny_source):
    policy = tiny(tiny_source, "gpt2")
    product(policy, vectors(policy, 1)[0])
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_a_frozen_parameter_is_none_of_the_unknowns(tiny_source):
    """With the embeddings frozen the matrix is the block of the other parameters."""
    policy = tiny(tiny_source, "gpt2")
    matrix = dense_fisher(policy)
    sizes = [parameter.numel() for parameter in policy.parameters()]
    policy.model.get_input_embeddings().requires_grad_(False)
    assert not next(policy.parameters()).requires_grad
    (vector,) = vectors(policy, 1)
    block = matrix[sizes[0] :, sizes[0] :]
    torch.testing.assert_close(product(policy, vector), block @ vector)


def test_gradient_checkpointing_changes_no_product(tiny_source):
    plain, recomputing = (tiny(tiny_source, "gpt2") for _ in range(2))
    recomputing.enable_gradient_checkpointing()
    (vector,) = vectors(plain, 1)
    assert torch.equal(product(recomputing, vector), product(plain, vector))


def test_fused_attention_has_no_second_derivative(tiny_source):
    """Why `plain_attention` is needed: if this fails, it no longer is."""
    policy = tiny(tiny_source, "llama", attn_implementation="sdpa").float()
    (vector,) = vectors(policy, 1).float()
    with pytest.raises(RuntimeError, match="derivative"):
        fisher_product(policy, [BATCH], vector, temperature=TEMPERATURE)
