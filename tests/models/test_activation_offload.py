import pytest
import torch

from lit_rl.models import Policy
from lit_rl.models.activation_offload import offloaded_activations
from lit_rl.types import Sequences

IDS = torch.tensor([[1, 7, 11, 5], [1, 13, 4, 4]])
BATCH = Sequences(
    prompt_ids=IDS[:, :2],
    prompt_mask=torch.ones(2, 2, dtype=torch.bool),
    response_ids=IDS[:, 2:],
    mask=torch.ones(2, 2, dtype=torch.bool),
)


def gradients(policy):
    policy(BATCH, temperature=1.0).log_probs.sum().backward()
    return [parameter.grad for parameter in policy.parameters()]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_the_same_bit_for_bit(tiny_source, layout, checkpointing):
    results = []
    for offloads in (False, True):
        policy = Policy(tiny_source("llama").model(0))
        if checkpointing:
            policy.enable_gradient_checkpointing()
        policy.layout, policy.offloads = layout, offloads
        results.append(gradients(policy))
    for plain, offloaded in zip(*results, strict=True):
        assert torch.equal(plain, offloaded)
    assert results[0][0].abs().max() > 0


def test_activations_leave_their_place_and_weights_do_not():
    """By hand: x W^T keeps x, which is copied, and W, which is not; tanh keeps its result."""
    layer = torch.nn.Linear(3, 2, bias=False)
    inputs = torch.ones(4, 3, requires_grad=True)
    with offloaded_activations(layer):
        linear = layer(inputs)
        result = linear.tanh()
    node = linear.grad_fn
    saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    places = {
        tensor.untyped_storage().data_ptr() for tensor in saved if isinstance(tensor, torch.Tensor)
    }
    assert layer.weight.untyped_storage().data_ptr() in places
    assert inputs.untyped_storage().data_ptr() not in places
    assert torch.equal(result.grad_fn._saved_result, result)
    assert result.grad_fn._saved_result.data_ptr() != result.data_ptr()


def test_a_pass_without_gradient_copies_nothing(tiny_source, monkeypatch):
    def refuse(model):
        raise AssertionError

    monkeypatch.setattr("lit_rl.models.response_states.offloaded_activations", refuse)
    policy = Policy(tiny_source("llama").model(0))
    policy.offloads = True
    with torch.no_grad():
        policy(BATCH, temperature=1.0)
    with pytest.raises(AssertionError):
        policy(BATCH, temperature=1.0)
