import pytest
import torch

from lit_rl.types import CriticExperience
from lit_rl.value_losses import ClippedSquaredError, clipped_value_loss, value_clip_binds

OLD, CLIP = 1.0, 0.2
# value, target, loss, gradient, whether the clip binds; the old value is 1, the clip 0.2.
CASES = [
    # Within the clip: half of 0.9^2.
    (1.1, 2.0, 0.405, -0.9, False),
    # Further than the clip towards the target: half of (1.2 - 2)^2, and it stops.
    (1.5, 2.0, 0.32, 0.0, True),
    # Further than the clip, away from the target: half of 1.5^2, and it comes back.
    (1.5, 0.0, 1.125, 1.5, False),
    # The same below the old value: half of (0.8 - 0)^2, and of (0.5 - 2)^2.
    (0.5, 0.0, 0.32, 0.0, True),
    (0.5, 2.0, 1.125, -1.5, False),
    # Past its target by more than the clipped value is short of it: half of (1.8 - 1.4)^2.
    (1.8, 1.4, 0.08, 0.4, False),
    # At the edge of the clip nothing is cut off: half of 0.8^2.
    (1.2, 2.0, 0.32, -0.8, False),
]


def losses(clip=CLIP):
    values, returns = torch.tensor([[case[:2] for case in CASES]], dtype=torch.float64).unbind(-1)
    values.requires_grad_()
    rows = (values, torch.full_like(returns, OLD), returns, torch.ones_like(returns).bool())
    loss = clipped_value_loss(*rows, clip=clip)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    return loss.detach()[0], gradient[0], value_clip_binds(*rows, clip=clip)[0]


def test_the_larger_of_both_errors_counts():
    loss, gradient, binds = losses()
    expected = torch.tensor(CASES, dtype=torch.float64)
    torch.testing.assert_close(loss, expected[:, 2])
    torch.testing.assert_close(gradient, expected[:, 3])
    assert binds.tolist() == [case[4] for case in CASES]


def test_without_a_clip_it_is_half_of_the_squared_error():
    loss, gradient, binds = losses(clip=None)
    errors = torch.tensor([value - target for value, target, *_ in CASES], dtype=torch.float64)
    torch.testing.assert_close(loss, 0.5 * errors.square())
    torch.testing.assert_close(gradient, errors)
    assert not binds.any()


def test_between_two_equal_errors_the_gradient_is_that_of_the_value():
    # 1.5 is 0.25 above its target of 1.25, the clipped value 1.0 as much below.
    value = torch.tensor([[1.5]], requires_grad=True)
    rows = (value, torch.tensor([[0.5]]), torch.tensor([[1.25]]), torch.tensor([[True]]))
    loss = clipped_value_loss(*rows, clip=0.5)
    loss.sum().backward()
    assert loss.item() == 0.5 * 0.25**2
    assert value.grad.item() == 0.25
    assert not value_clip_binds(*rows, clip=0.5).any()


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("anything", [torch.nan, torch.inf, 1e30])
def test_a_token_that_does_not_count_has_no_loss_and_no_gradient(clip, anything):
    value = torch.tensor([[2.0, anything]], requires_grad=True)
    dirty = torch.tensor([[2.0, anything]])
    mask = torch.tensor([[True, False]])
    loss = clipped_value_loss(value, dirty, torch.tensor([[1.0, anything]]), mask, clip=clip)
    loss.sum().backward()
    assert loss.tolist() == [[0.5, 0.0]]
    assert value.grad.tolist() == [[1.0, 0.0]]


def test_the_class_reads_old_values_and_targets_from_the_experience():
    tokens = torch.zeros(1, 2)
    experience = CriticExperience(
        prompt_ids=torch.ones(1, 1, dtype=torch.long),
        prompt_mask=torch.ones(1, 1, dtype=torch.bool),
        response_ids=torch.zeros(1, 2, dtype=torch.long),
        mask=torch.ones(1, 2, dtype=torch.bool),
        sampler_log_probs=tokens,
        advantages=tokens,
        old_log_probs=tokens,
        ref_log_probs=None,
        old_values=torch.tensor([[1.0, 1.0]]),
        returns=torch.tensor([[2.0, 0.0]]),
    )
    values = torch.tensor([[1.5, 1.5]])
    loss = ClippedSquaredError(clip=0.2)
    torch.testing.assert_close(loss(values, experience), torch.tensor([[0.32, 1.125]]))
    assert loss.clipped(values, experience).tolist() == [[True, False]]
    assert not ClippedSquaredError(clip=None).clipped(values, experience).any()


@pytest.mark.parametrize("clip", [0.0, -0.2, torch.nan])
def test_a_clip_that_is_not_above_zero_is_refused(clip):
    with pytest.raises(ValueError, match=r"clip must be above 0, for example 0.2"):
        ClippedSquaredError(clip=clip)
