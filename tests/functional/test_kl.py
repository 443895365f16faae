import math

import pytest
import torch

from lit_rl.functional import kl_abs, kl_k1, kl_k2, kl_k3, unbiased_gradient
from lit_rl.functional.kl import K3_TANGENT_FROM

ESTIMATORS = [kl_k1, kl_k2, kl_k3, kl_abs]
ALL = ESTIMATORS + [unbiased_gradient(estimator) for estimator in ESTIMATORS]


def value_and_gradient(estimator, log_prob, ref_log_prob, dtype=torch.float64):
    log_probs = torch.tensor([log_prob], dtype=dtype, requires_grad=True)
    value = estimator(log_probs, torch.tensor([ref_log_prob], dtype=dtype))
    value.sum().backward()
    return value.item(), log_probs.grad.item()


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    # r = log_prob - ref_log_prob = -1 - (-2) = 1; exp(-1) = 0.36788.
    [
        (kl_k1, 1.0, 1.0),
        (kl_k2, 0.5, 1.0),
        (kl_k3, 0.36787944117144233, 0.6321205588285577),
        (kl_abs, 1.0, 1.0),
    ],
)
def test_values_and_gradients_by_hand(estimator, value, gradient):
    assert value_and_gradient(estimator, -1.0, -2.0) == pytest.approx((value, gradient), abs=1e-12)


@pytest.mark.parametrize("estimator", ALL)
def test_equal_policies_have_no_kl(estimator):
    assert value_and_gradient(estimator, -1.5, -1.5)[0] == 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("ref_log_prob", [-4.0, -1.1, -0.2])
def test_the_unbiased_gradient_keeps_the_value_and_takes_the_gradient_of_k2(
    estimator, ref_log_prob
):
    value, gradient = value_and_gradient(unbiased_gradient(estimator), -1.0, ref_log_prob)
    assert value == value_and_gradient(estimator, -1.0, ref_log_prob)[0]
    assert gradient == value_and_gradient(kl_k2, -1.0, ref_log_prob)[1]


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize(("log_prob", "ref_log_prob"), [(-120.0, -1.0), (-1.0, -120.0)])
def test_large_log_ratios_are_finite_in_float32(estimator, log_prob, ref_log_prob):
    value, gradient = value_and_gradient(estimator, log_prob, ref_log_prob, torch.float32)
    assert abs(value) < 1e12
    assert abs(gradient) < 1e12


def test_k3_of_a_token_that_the_reference_hardly_knows_is_the_log_ratio_minus_one():
    # d = -120 - (-1) = -119: exp(d) is 0, so k3 = 0 + 119 - 1 and its gradient 1 - 0.
    assert value_and_gradient(kl_k3, -1.0, -120.0, torch.float32) == (118.0, 1.0)


@pytest.mark.parametrize(
    ("difference", "value"),
    # exp(10) - 10 - 1 and exp(20) - 20 - 1; behind 20 the slope of exp(20) - 1 goes on for 99 nats.
    [(10.0, 22015.46579), (20.0, 485165174.41), (119.0, 485165174.41 + 99 * 485165194.41)],
)
def test_k3_of_a_token_that_the_policy_hardly_knows(difference, value):
    result = value_and_gradient(kl_k3, -1.0 - difference, -1.0)[0]
    assert result == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("difference", [-119.0, -5.0, -1.0, 1.0, 5.0, 19.0])
def test_the_gradient_of_k3_is_exact_in_float32(difference):
    gradient = value_and_gradient(kl_k3, 0.0, difference, torch.float32)[1]
    assert gradient == pytest.approx(-math.expm1(difference), rel=1e-6)


def test_k3_continues_as_a_tangent_and_still_pulls_to_the_reference():
    def slope(difference):
        return -value_and_gradient(kl_k3, -difference, 0.0)[1]

    # The derivative in d is exp(d) - 1 up to the tangent point, and stays there.
    at_tangent = torch.tensor(K3_TANGENT_FROM, dtype=torch.float64).expm1().item()
    assert slope(K3_TANGENT_FROM) == pytest.approx(at_tangent)
    assert slope(K3_TANGENT_FROM + 100) == pytest.approx(at_tangent)
    step = value_and_gradient(kl_k3, -K3_TANGENT_FROM - 1, 0.0)[0]
    step -= value_and_gradient(kl_k3, -K3_TANGENT_FROM, 0.0)[0]
    assert step == pytest.approx(at_tangent)


def test_k3_is_never_negative_and_accurate_near_zero():
    difference = torch.logspace(-6, 0, 200)
    for sign in (-1, 1):
        value = kl_k3(torch.zeros(200), sign * difference)
        assert (value >= 0).all()
    # Series: d^2 / 2 + d^3 / 6 = 5.0167e-5 at d = 0.01; float32 exp(d) - d - 1 is off by 1e-7.
    value = kl_k3(torch.tensor([0.0]), torch.tensor([0.01]))
    torch.testing.assert_close(value, torch.tensor([5.0167e-5]), rtol=1e-4, atol=0)


def test_k1_and_k3_average_to_the_kl_of_two_distributions():
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    kl = torch.nn.functional.kl_div(reference.log(), policy, reduction="sum")
    for estimator in (kl_k1, kl_k3):
        mean = (policy * estimator(policy.log(), reference.log())).sum()
        torch.testing.assert_close(mean, kl)


def test_the_mean_gradient_of_k2_is_the_gradient_of_the_kl():
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    ref_log_probs = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    log_probs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad(
        (log_probs.exp() * (log_probs - ref_log_probs)).sum(), logits, retain_graph=True
    )
    # Sampling weighs each token with the policy's probability, which has no gradient itself.
    for estimator in (kl_k2, unbiased_gradient(kl_k1), unbiased_gradient(kl_k3)):
        sampled = (log_probs.exp().detach() * estimator(log_probs, ref_log_probs)).sum()
        (gradient,) = torch.autograd.grad(sampled, logits, retain_graph=True)
        torch.testing.assert_close(gradient, exact)


@pytest.mark.parametrize("estimator", ALL)
def test_nan_is_not_hidden(estimator):
    assert torch.isnan(estimator(torch.tensor([torch.nan]), torch.tensor([-1.0]))).all()
