import pytest
import torch

from lit_rl.aggregations import TokenMean, Totals
from lit_rl.kl_penalties import KLInLoss, KLInReward

NAN = torch.nan
# Log-ratios 1 and -0.5; the last position does not count.
LOG_PROBS = torch.tensor([[-1.0, -1.0, NAN]])
REF_LOG_PROBS = torch.tensor([[-2.0, -0.5, torch.inf]])
MASK = torch.tensor([[True, True, False]])
# exp(-1) + 1 - 1 = 0.367879 and exp(0.5) - 0.5 - 1 = 0.148721.
K3 = torch.tensor([[0.367879, 0.148721, 0.0]])


def test_in_the_loss_the_default_is_k3_of_each_token():
    loss = KLInLoss().loss(LOG_PROBS, REF_LOG_PROBS, MASK)
    torch.testing.assert_close(loss, K3)
    assert KLInLoss().reward(LOG_PROBS, REF_LOG_PROBS, MASK).tolist() == [[0.0, 0.0, 0.0]]


def test_in_the_reward_the_default_is_k1_of_each_token():
    log_probs = LOG_PROBS.clone().requires_grad_()
    reward = KLInReward().reward(log_probs, REF_LOG_PROBS, MASK)
    # 1 and -0.5: positive where the policy is more certain than the reference.
    assert reward.tolist() == [[1.0, -0.5, 0.0]]
    assert not reward.requires_grad
    assert KLInReward().loss(LOG_PROBS, REF_LOG_PROBS, MASK).tolist() == [[0.0, 0.0, 0.0]]


def test_a_response_that_the_reference_finds_likelier_is_paid_for():
    # -1 - (-0.5) and -1 - (-0.75): the estimate of a response may be negative, its mean may not.
    ref_log_probs = torch.tensor([[-0.5, -0.75, 0.0]])
    assert KLInReward().reward(LOG_PROBS, ref_log_probs, MASK).tolist() == [[-0.5, -0.25, 0.0]]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [1.0, -0.5, 0.0]),
        ("k2", [0.5, 0.125, 0.0]),
        ("k3", K3.tolist()[0]),
        ("abs", [1.0, 0.5, 0.0]),
    ],
)
def test_each_estimator_by_name(estimator, expected):
    reward = KLInReward(estimator=estimator).reward(LOG_PROBS, REF_LOG_PROBS, MASK)
    torch.testing.assert_close(reward, torch.tensor([expected]))


def test_the_penalty_is_added_to_the_loss_and_pulls_to_the_reference():
    log_prob = torch.tensor([[-1.0]], requires_grad=True)
    mask = torch.tensor([[True]])
    loss = 0.1 * KLInLoss().loss(log_prob, torch.tensor([[-2.0]]), mask)
    assert loss.item() == pytest.approx(0.036788, abs=1e-6)
    loss.sum().backward()
    # A step of gradient descent lowers the log-prob, towards -2.
    assert (log_prob - log_prob.grad).item() < -1.0


def test_the_mean_over_tokens_leaves_padding_out():
    mask = torch.tensor([[True, False]])
    log_probs, ref_log_probs = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2.0, -10.0]])
    kl = KLInLoss(estimator="abs").loss(log_probs, ref_log_probs, mask)
    # abs(r) is 1 and 9; the second does not count.
    assert TokenMean()(kl, mask, Totals.of(mask)).item() == 1.0


def test_a_masked_position_with_an_enormous_log_ratio_contributes_nothing():
    log_probs = torch.tensor([[-1000.0, -1.0]], requires_grad=True)
    kl = KLInLoss().loss(log_probs, torch.tensor([[0.0, -1.5]]), torch.tensor([[False, True]]))
    kl.sum().backward()
    assert kl[0, 0].item() == 0
    assert log_probs.grad[0, 0].item() == 0


@pytest.mark.parametrize("log_ratio", [120.0, -120.0])
def test_a_step_with_an_enormous_log_ratio_leaves_a_finite_log_prob(log_ratio):
    log_probs = torch.tensor([[log_ratio]], requires_grad=True)
    KLInLoss().loss(log_probs, torch.zeros(1, 1), torch.tensor([[True]])).sum().backward()
    assert (log_probs - 1e-3 * log_probs.grad).isfinite().all()


def test_the_unbiased_gradient_is_that_of_k2():
    log_probs = torch.where(MASK, LOG_PROBS, 0.0).requires_grad_()
    loss = KLInLoss(unbiased_gradient=True).loss(log_probs, REF_LOG_PROBS, MASK)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), K3)
    assert log_probs.grad.tolist() == [[1.0, -0.5, 0.0]]


def test_k1_in_the_loss_is_refused_without_the_unbiased_gradient():
    with pytest.raises(ValueError, match="k1 has gradient 1 whatever the reference says"):
        KLInLoss(estimator="k1")
    kl = KLInLoss(estimator="k1", unbiased_gradient=True)
    assert kl.loss(LOG_PROBS, REF_LOG_PROBS, MASK).tolist() == [[1.0, -0.5, 0.0]]


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("penalty", [KLInLoss, KLInReward])
def test_an_unknown_estimator_is_refused_with_the_known_ones(penalty):
    with pytest.raises(ValueError, match="'k4' is unknown; choose one of k1, k2, k3, abs"):
        penalty(estimator="k4")
