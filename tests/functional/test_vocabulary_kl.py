"""The exact KL between two policies, against its definition and its derivatives."""

import pytest
import torch

from lit_rl.functional.vocabulary_kl import vocabulary_kl

MASK = torch.tensor([[True, True, False], [True, False, False]])


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kl(old, new, *, mask=MASK, temperature=1.0, **settings):
    """The KL of two policies that are given by their logits."""
    identity = torch.nn.Identity()
    return vocabulary_kl(
        old, identity, new, identity, mask=mask, temperature=temperature, **settings
    )


def test_it_is_the_kl_of_torch_at_the_sampling_temperature():
    old, new = normal(2, 3, 5, seed=0), normal(2, 3, 5, seed=1)
    first, second = (torch.distributions.Categorical(logits=logits / 0.7) for logits in (old, new))
    expected = torch.where(MASK, torch.distributions.kl_divergence(first, second), 0.0)
    torch.testing.assert_close(kl(old, new, temperature=0.7), expected)


def test_equal_policies_have_none():
    logits = normal(2, 3, 5, seed=0)
    assert kl(logits, logits).eq(0).all()


def test_the_size_of_the_chunks_changes_nothing():
    old, new = normal(2, 3, 5, seed=0), normal(2, 3, 5, seed=1)
    assert torch.equal(kl(old, new, chunk_tokens=1), kl(old, new))


def test_the_two_heads_are_those_of_their_own_policy():
    """Heads 2 h and 3 h on states a and b: logits 2 a and 3 b."""
    old, new = normal(2, 3, 5, seed=0), normal(2, 3, 5, seed=1)
    value = vocabulary_kl(old, lambda h: 2 * h, new, lambda h: 3 * h, mask=MASK, temperature=1.0)
    torch.testing.assert_close(value, kl(2 * old, 3 * new))


def test_first_and_second_derivative_at_equal_policies():
    """In the logits over T: p - p_old = 0, and diag(p) - p p^T."""
    logits = normal(1, 1, 4, seed=0)
    one = torch.tensor([[True]])

    def of_new(new):
        return kl(logits, new.view(1, 1, 4), mask=one, temperature=0.5).sum()

    flat = logits.flatten()
    gradient = torch.autograd.functional.jacobian(of_new, flat)
    torch.testing.assert_close(gradient, torch.zeros(4, dtype=torch.float64))
    p = (flat / 0.5).softmax(-1)
    hessian = torch.autograd.functional.hessian(of_new, flat)
    torch.testing.assert_close(hessian, (torch.diag(p) - torch.outer(p, p)) / 0.5**2)


def test_the_old_policy_is_a_constant_and_masked_tokens_have_no_gradient():
    old = normal(2, 3, 5, seed=0).requires_grad_()
    new = normal(2, 3, 5, seed=1).requires_grad_()
    kl(old, new).sum().backward()
    assert old.grad is None
    assert torch.equal(new.grad.ne(0).any(-1), MASK)


@pytest.mark.parametrize("anything", [torch.nan, torch.inf])
def test_what_does_not_count_changes_nothing(anything):
    old, new = normal(2, 3, 5, seed=0), normal(2, 3, 5, seed=1)
    dirty_old, dirty = (torch.where(MASK[..., None], x, anything) for x in (old, new))
    dirty.requires_grad_()
    value = kl(dirty_old, dirty)
    assert torch.equal(value, kl(old, new))
    (gradient,) = torch.autograd.grad(value.sum(), dirty)
    assert gradient[~MASK].eq(0).all()
    assert gradient.isfinite().all()


def test_no_token_that_counts_gives_zeros():
    logits = normal(2, 3, 5, seed=0)
    assert kl(logits, 2 * logits, mask=torch.zeros_like(MASK)).eq(0).all()


def test_a_greedy_temperature_is_refused():
    with pytest.raises(ValueError, match="temperature must be above 0"):
        kl(normal(2, 3, 5, seed=0), normal(2, 3, 5, seed=1), temperature=0.0)
