"""Estimators of KL(policy || reference) from the tokens that the policy sampled.

Each estimates, per token, KL = E_policy[log_probs - ref_log_probs] in nats, and is exactly 0 where
the two policies agree. With r = log_probs - ref_log_probs:

| estimator | value            | mean under the policy | always >= 0 | gradient in log_probs |
|-----------|------------------|-----------------------|-------------|-----------------------|
| `kl_k1`   | r                | KL                    | no          | 1                     |
| `kl_k2`   | r^2 / 2          | close to KL           | yes         | r                     |
| `kl_k3`   | exp(-r) - 1 + r  | KL                    | yes         | 1 - exp(-r)           |
| `kl_abs`  | abs(r)           | larger than KL        | yes         | sign(r)               |

Schulman, "Approximating KL Divergence", 2020 (joschu.net/blog/kl-approx.html).
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

Estimator = Callable[[Tensor, Tensor], Tensor]

K3_TANGENT_FROM = 20.0
"""Log-ratio ref_log_probs - log_probs, in nats, beyond which `kl_k3` goes on as a straight line."""


def kl_k1(
    log_probs: Float[Tensor, "*shape"], ref_log_probs: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """log_probs - ref_log_probs.

    Unbiased and noisy. Its gradient is 1 whatever the reference says, so it belongs into a reward;
    as a loss it needs `unbiased_gradient`.

    Args:
        log_probs: under the policy that sampled the tokens, in nats.
        ref_log_probs: under the reference, in nats.

    Returns:
        Nats per token, of either sign.

    Example:
        >>> kl_k1(torch.tensor([-1.0]), torch.tensor([-2.0]))
        tensor([1.])
    """
    return log_probs - ref_log_probs


def kl_k2(
    log_probs: Float[Tensor, "*shape"], ref_log_probs: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """0.5 * (log_probs - ref_log_probs)^2.

    The value is biased, the gradient is not: its mean under the policy is the gradient of the KL.

    Args:
        log_probs: under the policy that sampled the tokens, in nats.
        ref_log_probs: under the reference, in nats.

    Returns:
        Nats per token, at least 0.

    Example:
        >>> kl_k2(torch.tensor([-1.0]), torch.tensor([-2.0]))
        tensor([0.5000])
    """
    return 0.5 * (log_probs - ref_log_probs).square()


def kl_k3(
    log_probs: Float[Tensor, "*shape"], ref_log_probs: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """exp(d) - d - 1, with d = ref_log_probs - log_probs.

    GRPO, arXiv:2402.03300, equation 4. Where d is above `K3_TANGENT_FROM` the exponential continues
    by its tangent there: value and gradient stay finite, the function stays convex, and the
    gradient keeps pointing to the reference. (verl clamps d to 20 and the result to 10, which stops
    the gradient.)

    Args:
        log_probs: under the policy that sampled the tokens, in nats.
        ref_log_probs: under the reference, in nats.

    Returns:
        Nats per token, at least 0.

    Example:
        >>> kl_k3(torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -120.0]))
        tensor([  0.3679, 118.0000])
    """
    difference = ref_log_probs - log_probs
    bounded = difference.clamp(max=K3_TANGENT_FROM)
    beyond = (difference - K3_TANGENT_FROM).relu()
    return torch.expm1(bounded) + math.exp(K3_TANGENT_FROM) * beyond - difference


def kl_abs(
    log_probs: Float[Tensor, "*shape"], ref_log_probs: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """abs(log_probs - ref_log_probs).

    A distance rather than an estimate of the KL: every token pulls with the same force. Where the
    two are equal the gradient is 0.

    Args:
        log_probs: under the policy that sampled the tokens, in nats.
        ref_log_probs: under the reference, in nats.

    Returns:
        Nats per token, at least 0.

    Example:
        >>> kl_abs(torch.tensor([-2.0]), torch.tensor([-1.0]))
        tensor([1.])
    """
    return (log_probs - ref_log_probs).abs()


def unbiased_gradient(estimator: Estimator) -> Estimator:
    """The value of `estimator` with the gradient of `kl_k2`.

    Only the gradient of k2 has, under the policy, the gradient of the KL as its mean; Tang and
    Munos, arXiv:2506.09477. (verl writes this as k1+ and k3+.)

    Args:
        estimator: one of the estimators of this module.

    Returns:
        An estimator.

    Example:
        >>> log_probs = torch.tensor([-1.0], requires_grad=True)
        >>> kl = unbiased_gradient(kl_k1)(log_probs, torch.tensor([-3.0]))
        >>> kl.sum().backward()
        >>> kl.item(), log_probs.grad.item()
        (2.0, 2.0)
    """

    def estimate(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        value = estimator(log_probs, ref_log_probs).detach()
        surrogate = kl_k2(log_probs, ref_log_probs)
        return value + (surrogate - surrogate.detach())

    return estimate
