"""What a step asks the policy, and a policy that comes back from every step it does not take."""

import pytest
import torch

from lit_rl.aggregations import TokenMean, Totals
from lit_rl.algorithms.trust_region import TrustRegion
from lit_rl.functional.trust_region import LineSearchStep
from lit_rl.models import Policy, frozen_copy
from lit_rl.models.fisher import assign, flat, plain_attention
from lit_rl.policy_losses import Surrogate
from lit_rl.types import Experience, Sequences

MASK = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
TOTALS = Totals.of(MASK)


def experience(policy):
    """Three responses to one prompt, with the policy's own log-probs as the old ones."""
    tensors = {
        "prompt_ids": torch.tensor([[5, 6, 13]]).expand(3, -1),
        "prompt_mask": torch.ones(3, 3, dtype=torch.bool),
        "response_ids": torch.tensor([[7, 4, 2], [2, 0, 0], [9, 2, 0]]),
        "mask": MASK,
    }
    old = policy(Sequences(**tensors), temperature=0.7).log_probs.detach()
    return Experience(
        **tensors,
        sampler_log_probs=old,
        advantages=torch.where(MASK, torch.tensor([[1.0], [-2.0], [0.5]]), 0.0),
        old_log_probs=old,
        ref_log_probs=None,
    )


def mean_surrogate(output, part, totals):
    return TokenMean()(Surrogate()(output.log_probs, part), part.mask, totals)


@pytest.fixture
def policy(source):
    return Policy(source().model(0))


@pytest.fixture
def region(policy):
    rows = experience(policy)
    pieces = [rows.select(torch.tensor([row])).trimmed() for row in range(3)]
    with plain_attention():
        yield TrustRegion(
            policy=policy,
            micro_batches=pieces,
            totals=TOTALS,
            fisher_micro_batches=pieces,
            temperature=0.7,
            loss=mean_surrogate,
        )


SEARCH = {
    "expected_improvement": 1.0,
    "accept_ratio": 0.0,
    "backtrack_coef": 0.5,
    "max_steps": 3,
}


def test_loss_and_gradient_are_those_of_all_rows(region, policy):
    """The loss at the old policy is minus the mean advantage: -(3 - 2 + 2 * 0.5) / 6."""
    loss, gradient = region.loss_and_gradient()
    assert loss == pytest.approx(-(3 * 1.0 - 2.0 + 2 * 0.5) / 6, rel=1e-5)
    rows = experience(policy)
    output = policy(rows, temperature=0.7)
    expected = torch.autograd.grad(mean_surrogate(output, rows, TOTALS), list(policy.parameters()))
    torch.testing.assert_close(gradient, flat(expected), rtol=1e-4, atol=1e-6)


def test_a_policy_has_no_kl_from_itself_and_the_loss_of_its_gradient(region, policy):
    loss, kl = region.loss_and_kl(frozen_copy(policy))
    assert kl == 0.0
    assert loss == pytest.approx(region.loss_and_gradient()[0], rel=1e-6)


def test_an_accepted_fraction_is_where_the_policy_stands(region, policy):
    """Downhill the surrogate improves; the second fraction tried fits the limit by its KL."""
    before = flat(policy.parameters()).detach().clone()
    loss, gradient = region.loss_and_gradient()
    step = -0.5 * gradient
    kls = []
    for fraction in (1.0, 0.5):
        moved = region.search(step * fraction, loss=loss, max_kl=1e9, **SEARCH)
        kls.append(moved.kl)
        assign(list(policy.parameters()), before)
    assert kls[0] > kls[1] > 0
    accepted = region.search(step, loss=loss, max_kl=sum(kls) / 2, **SEARCH)
    assert accepted.fraction == 0.5
    assert accepted.kl == kls[1]
    torch.testing.assert_close(flat(policy.parameters()), before + 0.5 * step)


@pytest.mark.parametrize("length", [-1.0, torch.inf, torch.nan])
def test_a_step_that_does_not_improve_is_taken_back_bit_for_bit(region, policy, length):
    before = flat(policy.parameters()).detach().clone()
    loss, gradient = region.loss_and_gradient()
    step = torch.where(gradient == 0, 0.0, -length * gradient)
    assert region.search(step, loss=loss, max_kl=1e9, **SEARCH) == LineSearchStep(0.0, 0.0, 0.0)
    assert torch.equal(flat(policy.parameters()), before)


def test_weights_keep_their_own_storage(region, policy):
    """Parameters that were views of one vector could not be exported."""
    loss, gradient = region.loss_and_gradient()
    region.search(-0.1 * gradient, loss=loss, max_kl=1e9, **SEARCH)
    for parameter in policy.parameters():
        assert parameter.untyped_storage().size() == parameter.numel() * 4


def test_a_rank_without_rows_has_nothing_to_add(policy):
    region = TrustRegion(
        policy=policy,
        micro_batches=[],
        totals=TOTALS,
        fisher_micro_batches=[],
        temperature=0.7,
        loss=mean_surrogate,
    )
    loss, gradient = region.loss_and_gradient()
    assert loss == 0.0
    assert gradient.eq(0).all()
    assert region.fisher_product(torch.ones_like(gradient)).eq(0).all()
    assert region.loss_and_kl(frozen_copy(policy)) == (0.0, 0.0)
