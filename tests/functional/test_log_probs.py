import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lit_rl.functional import response_hidden, token_log_probs, token_log_probs_and_entropy

ROLLOUTS, TOKENS, HIDDEN, VOCAB = 4, 6, 3, 40


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of every tensor that any operation makes, and of logits."""

    def __init__(self):
        super().__init__()
        self.elements = 0
        self.vocabulary_rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
                if tensor.shape[-1:] == (VOCAB,) and tensor.shape != (HIDDEN, VOCAB):
                    self.vocabulary_rows = max(self.vocabulary_rows, tensor.numel() // VOCAB)
        return result


class CountingHead(nn.Module):
    """A linear head that notes how many rows each call had."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.rows = []

    def forward(self, hidden):
        self.rows.append(hidden.shape[0])
        return self.linear(hidden)


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROLLOUTS, TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCAB, (ROLLOUTS, TOKENS), generator=generator)
    lengths = torch.tensor([6, 0, 2, 5])
    head = nn.Linear(HIDDEN, VOCAB, dtype=torch.float64)
    return hidden, targets, torch.arange(TOKENS) < lengths[:, None], head


def naive(hidden, head, targets, mask, temperature):
    log_probs = (head(hidden) / temperature).log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[..., None])[..., 0] * mask, entropy * mask


def gradients(outputs, hidden, head):
    """Of a sum that weighs every output differently."""
    weights = torch.linspace(0.5, 2.0, ROLLOUTS * TOKENS, dtype=torch.float64)
    log_probs, entropy = (output.flatten() @ weights for output in outputs)
    return torch.autograd.grad(log_probs - 0.7 * entropy, [hidden, *head.parameters()])


@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_the_full_computation(problem, chunk_tokens, temperature):
    hidden, targets, mask, head = problem
    hidden.requires_grad_()
    outputs = token_log_probs_and_entropy(
        hidden,
        head,
        targets,
        mask=mask,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
    )
    expected = naive(hidden, head, targets, mask, temperature)

    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(gradients(outputs, hidden, head), gradients(expected, hidden, head))


def test_the_logits_of_all_tokens_never_exist(problem):
    hidden, targets, mask, head = problem
    head = CountingHead(head)
    hidden.requires_grad_()
    chunk_tokens = 4
    with LargestTensor() as largest:
        outputs = token_log_probs_and_entropy(
            hidden, head, targets, mask=mask, temperature=1.0, chunk_tokens=chunk_tokens
        )
        gradients(outputs, hidden, head)

    assert largest.vocabulary_rows == chunk_tokens
    assert largest.elements == chunk_tokens * VOCAB < ROLLOUTS * TOKENS * VOCAB
    # 13 valid tokens: 4, 4, 4, 1 forward, and 4, 4, 4 again in backward.
    assert head.rows == [4, 4, 4, 1, 4, 4, 4]


def test_of_the_logits_only_the_last_chunk_is_kept_for_backward(problem):
    hidden, targets, mask, head = problem
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(tuple(t.shape)) or t, lambda t: t
    ):
        token_log_probs_and_entropy(
            hidden.requires_grad_(),
            head,
            targets,
            mask=mask,
            temperature=1.0,
            chunk_tokens=4,
        )
    # 13 valid tokens in chunks of 4: the last chunk has one.
    assert {shape for shape in kept if shape[-1:] == (VOCAB,)} - {(HIDDEN, VOCAB)} == {(1, VOCAB)}


def test_without_gradient_the_head_runs_once_per_chunk(problem):
    hidden, targets, mask, head = problem
    head = CountingHead(head)
    with torch.no_grad():
        log_probs, entropy = token_log_probs_and_entropy(
            hidden, head, targets, mask=mask, temperature=1.0, chunk_tokens=5
        )
    assert head.rows == [5, 5, 3]
    torch.testing.assert_close((log_probs, entropy), naive(hidden, head.linear, targets, mask, 1.0))


def test_masked_positions_change_nothing_and_get_no_gradient(problem):
    hidden, targets, mask, head = problem
    dirty_hidden = torch.where(mask[..., None], hidden, torch.nan).requires_grad_()
    dirty_targets = torch.where(mask, targets, -100)
    hidden.requires_grad_()
    outputs, dirty_outputs = (
        token_log_probs_and_entropy(states, head, ids, mask=mask, temperature=1.0)
        for states, ids in ((hidden, targets), (dirty_hidden, dirty_targets))
    )
    for output, dirty in zip(outputs, dirty_outputs, strict=True):
        assert torch.equal(output, dirty)
        assert (dirty[~mask] == 0).all()
    clean_gradients = gradients(outputs, hidden, head)
    dirty_gradients = gradients(dirty_outputs, dirty_hidden, head)
    for clean, dirty in zip(clean_gradients, dirty_gradients, strict=True):
        assert torch.equal(clean, dirty)
    assert (dirty_gradients[0][~mask] == 0).all()


def test_a_batch_in_which_nothing_counts_has_zeros_and_a_zero_gradient(problem):
    hidden, targets, mask, head = problem
    nothing = torch.zeros_like(mask)
    log_probs, entropy = token_log_probs_and_entropy(
        hidden.requires_grad_(), head, targets, mask=nothing, temperature=1.0
    )
    assert log_probs.eq(0).all()
    assert entropy.eq(0).all()
    # Every rank takes part in the reduction of gradients, one without tokens too.
    (log_probs + entropy).sum().backward()
    assert head.weight.grad.eq(0).all()


def test_temperature_divides_the_logits():
    # softmax([2, 0])[0] = 0.880797, log -0.126928; without the temperature it would be -0.313262.
    log_probs, entropy = token_log_probs_and_entropy(
        torch.tensor([[[1.0, 0.0]]]),
        nn.Identity(),
        torch.tensor([[0]]),
        mask=torch.tensor([[True]]),
        temperature=0.5,
    )
    torch.testing.assert_close(log_probs, torch.tensor([[-0.126928]]))
    # 0.880797 * 0.126928 + 0.119203 * 2.126928
    torch.testing.assert_close(entropy, torch.tensor([[0.365334]]))


@pytest.mark.parametrize("function", [token_log_probs, token_log_probs_and_entropy])
@pytest.mark.parametrize("temperature", [0.0, -1.0, torch.nan])
def test_a_temperature_that_is_not_above_zero_is_refused(function, temperature):
    with pytest.raises(ValueError, match="temperature must be above 0"):
        function(
            torch.zeros(1, 1, 2),
            nn.Identity(),
            torch.tensor([[0]]),
            mask=torch.tensor([[True]]),
            temperature=temperature,
        )


def test_a_uniform_distribution_has_the_entropy_log_vocabulary():
    log_probs, entropy = token_log_probs_and_entropy(
        torch.zeros(1, 1, 50),
        nn.Identity(),
        torch.tensor([[7]]),
        mask=torch.tensor([[True]]),
        temperature=1.3,
    )
    torch.testing.assert_close(entropy, torch.tensor([[50.0]]).log())
    torch.testing.assert_close(log_probs, -entropy)


def test_a_bfloat16_model_has_its_softmax_in_float32():
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(1, 3, 50_000, generator=generator).bfloat16()
    targets = torch.tensor([[0, 1, 2]])
    mask = torch.tensor([[True, True, True]])
    log_probs, entropy = token_log_probs_and_entropy(
        logits, nn.Identity(), targets, mask=mask, temperature=1.0
    )
    assert log_probs.dtype == entropy.dtype == torch.float32
    exact = naive(logits.double(), nn.Identity(), targets, mask, 1.0)
    torch.testing.assert_close(log_probs, exact[0].float(), rtol=0, atol=1e-4)
    torch.testing.assert_close(entropy, exact[1].float(), rtol=0, atol=1e-4)
    # What a softmax in bfloat16 says instead.
    rounded = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert (rounded.float() - exact[0]).abs().max() > 1e-2


@pytest.mark.parametrize("chunk_tokens", [2, 100])
def test_an_entropy_without_gradient_changes_nothing_else(chunk_tokens):
    """Law: the same values; of the gradient of a sum of both what the log-probs give."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    head = nn.Linear(8, 50, dtype=torch.float64)
    targets = torch.tensor([[0, 1, 2], [3, 4, 5]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    settings = {"mask": mask, "temperature": 0.7, "chunk_tokens": chunk_tokens}
    log_probs, entropy = token_log_probs_and_entropy(hidden, head, targets, **settings)
    expected = torch.autograd.grad(log_probs.sum(), [hidden, head.weight])
    alone = token_log_probs_and_entropy(hidden, head, targets, entropy_gradient=False, **settings)
    found = torch.autograd.grad((alone[0] + alone[1]).sum(), [hidden, head.weight])
    torch.testing.assert_close(alone, (log_probs, entropy))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_backward_keeps_one_table_of_the_vocabulary(entropy_gradient):
    """By hand: probabilities, and with them every derivative, follow from the log-probs."""
    hidden = torch.randn(1, 4, 8, requires_grad=True)
    tables = {}

    def keep(tensor):
        if tensor.numel() == 4 * 1000:
            tables[tensor.data_ptr()] = tensor
        return tensor

    mask = torch.ones(1, 4, dtype=torch.bool)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_log_probs_and_entropy(
            hidden,
            nn.Linear(8, 1000),
            mask.long(),
            mask=mask,
            temperature=1.0,
            entropy_gradient=entropy_gradient,
        )
    assert len(tables) == 1


def test_a_second_backward_pass_gives_the_same_gradient(problem):
    """Law: backward changes nothing of what it keeps."""
    hidden, targets, mask, head = problem
    outputs = token_log_probs_and_entropy(
        hidden.requires_grad_(), head, targets, mask=mask, temperature=0.8
    )
    total = outputs[0].sum() + 0.3 * outputs[1].sum()
    first, second = (torch.autograd.grad(total, hidden, retain_graph=True) for _ in range(2))
    assert torch.equal(*first, *second)
    assert first[0].abs().max() > 0.01


def test_without_gradient_of_the_entropy_a_second_backward_pass_is_refused(problem):
    """The first turns the probabilities that it keeps into the gradient: no wrong one follows."""
    hidden, targets, mask, head = problem
    log_probs, _ = token_log_probs_and_entropy(
        hidden.requires_grad_(), head, targets, mask=mask, temperature=0.8, entropy_gradient=False
    )
    torch.autograd.grad(log_probs.sum(), hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(log_probs.sum(), hidden)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_alone_are_those_beside_the_entropy(problem, chunk_tokens, temperature):
    hidden, targets, mask, head = problem
    head = CountingHead(head)
    settings = {"mask": mask, "temperature": temperature, "chunk_tokens": chunk_tokens}
    log_probs = token_log_probs(hidden.requires_grad_(), head, targets, **settings)
    assert not log_probs.requires_grad
    assert len(head.rows) == -(-13 // chunk_tokens)  # 6 + 0 + 2 + 5 tokens count
    both, _ = token_log_probs_and_entropy(hidden, head.linear, targets, **settings)
    assert torch.equal(log_probs, both)


def test_the_response_is_predicted_from_one_position_before_it():
    # Prompt [a, b], response [c, d, e]: b predicts c, c predicts d, d predicts e.
    hidden = torch.tensor([[[10.0], [11.0], [12.0], [13.0], [14.0]]])
    assert response_hidden(hidden, num_tokens=3).flatten().tolist() == [11.0, 12.0, 13.0]


def test_every_response_token_has_a_log_prob_the_last_one_included():
    # A head that predicts, from the position of a token, the one after it, with certainty.
    ids = torch.tensor([[4, 2, 3, 0]])
    next_ids = ids.roll(-1, dims=1)
    hidden = 50.0 * nn.functional.one_hot(next_ids, 5).float()
    log_probs, _ = token_log_probs_and_entropy(
        response_hidden(hidden, num_tokens=2),
        nn.Identity(),
        ids[:, 2:],
        mask=torch.tensor([[True, True]]),
        temperature=1.0,
    )
    torch.testing.assert_close(log_probs, torch.zeros(1, 2))


@pytest.mark.parametrize("num_tokens", [5, 6, -1])
def test_a_response_without_a_prompt_position_is_refused(num_tokens):
    with pytest.raises(ValueError, match="last prompt position"):
        response_hidden(torch.zeros(1, 5, 2), num_tokens=num_tokens)
