"""Where the KL to the reference enters: as a loss per token, or as a deduction from the reward.

A penalty holds no coefficient: the algorithm multiplies it by its own and adds it to the loss, or
subtracts it from the reward. KL is KL(policy || reference), in nats.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.functional import kl_abs, kl_k1, kl_k2, kl_k3, unbiased_gradient
from lit_rl.functional.kl import Estimator

EstimatorName = Literal["k1", "k2", "k3", "abs"]

_ESTIMATORS: dict[str, Estimator] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3, "abs": kl_abs}


@dataclass(frozen=True)
class KLPenalty(ABC):
    """An estimator of the KL and the place where it acts; the other place gets zeros.

    Args:
        estimator: see `lit_rl.functional.kl`.

    Attributes:
        in_reward: whether the KL is deducted from the reward.
    """

    estimator: EstimatorName
    in_reward: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.estimator not in _ESTIMATORS:
            raise ValueError(
                f"estimator {self.estimator!r} is unknown; choose one of {', '.join(_ESTIMATORS)}"
            )

    def per_token(
        self,
        log_probs: Float[Tensor, "rollouts tokens"],
        ref_log_probs: Float[Tensor, "rollouts tokens"],
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return the estimate at each position, in nats per token.

        Args:
            log_probs: under the current policy, in nats.
            ref_log_probs: under the frozen reference, in nats.
        """
        return _ESTIMATORS[self.estimator](log_probs, ref_log_probs)

    @abstractmethod
    def loss(
        self,
        log_probs: Float[Tensor, "rollouts tokens"],
        ref_log_probs: Float[Tensor, "rollouts tokens"],
        mask: Bool[Tensor, "rollouts tokens"],
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return what is added to the loss, in nats per token; 0 where the mask is False.

        Args:
            log_probs: under the current policy, in nats.
            ref_log_probs: under the frozen reference, in nats.
            mask: True where a token counts.
        """

    @abstractmethod
    def reward(
        self,
        log_probs: Float[Tensor, "rollouts tokens"],
        ref_log_probs: Float[Tensor, "rollouts tokens"],
        mask: Bool[Tensor, "rollouts tokens"],
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return what is subtracted from each token's reward, in nats, without gradient.

        Zero where the mask is False.

        Args:
            log_probs: under the policy that sampled the responses, in nats.
            ref_log_probs: under the frozen reference, in nats.
            mask: True where a token counts.
        """

    def _masked_per_token(
        self,
        log_probs: Float[Tensor, "rollouts tokens"],
        ref_log_probs: Float[Tensor, "rollouts tokens"],
        mask: Bool[Tensor, "rollouts tokens"],
    ) -> Float[Tensor, "rollouts tokens"]:
        # Two equal numbers where the mask is False: the KL and its gradient are 0 there.
        return self.per_token(
            torch.where(mask, log_probs, 0.0), torch.where(mask, ref_log_probs, 0.0)
        )


@dataclass(frozen=True)
class KLInLoss(KLPenalty):
    """The KL of each token is part of the loss, and its gradient pulls towards the reference.

    GRPO, arXiv:2402.03300, equation 4, with k3. The value of k3 is an estimate of
    KL(policy || reference); its own gradient is, in expectation, that of KL(reference || policy).
    k2, and any estimator with `unbiased_gradient`, has the gradient of KL(policy || reference) at
    each token, the state before it taken as given.

    Args:
        estimator: k1 only together with `unbiased_gradient`: its own gradient is the same for any
            reference and pulls nowhere.
        unbiased_gradient: take the value of `estimator` and the gradient of k2.

    Example:
        >>> log_probs, ref_log_probs = torch.tensor([[-1.0, 9.0]]), torch.tensor([[-2.0, 9.0]])
        >>> KLInLoss().loss(log_probs, ref_log_probs, mask=torch.tensor([[True, False]]))
        tensor([[0.3679, 0.0000]])
    """

    estimator: EstimatorName = "k3"
    unbiased_gradient: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.estimator == "k1" and not self.unbiased_gradient:
            raise ValueError(
                "estimator k1 has gradient 1 whatever the reference says, so as a loss it pulls "
                "nowhere; use k2 or k3, or k1 with unbiased_gradient: true"
            )

    def per_token(
        self,
        log_probs: Float[Tensor, "rollouts tokens"],
        ref_log_probs: Float[Tensor, "rollouts tokens"],
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return the estimate at each position, with the chosen gradient, in nats per token."""
        estimator = _ESTIMATORS[self.estimator]
        if self.unbiased_gradient:
            estimator = unbiased_gradient(estimator)
        return estimator(log_probs, ref_log_probs)

    def loss(
        self,
        log_probs: Float[Tensor, "rollouts tokens"],
        ref_log_probs: Float[Tensor, "rollouts tokens"],
        mask: Bool[Tensor, "rollouts tokens"],
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return the KL of each token that counts, with its gradient, in nats."""
        return self._masked_per_token(log_probs, ref_log_probs, mask)

    def reward(
        self,
        log_probs: Float[Tensor, "rollouts tokens"],
        ref_log_probs: Float[Tensor, "rollouts tokens"],
        mask: Bool[Tensor, "rollouts tokens"],
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return zeros: the reward stays as it is."""
        return torch.zeros_like(log_probs)


@dataclass(frozen=True)
class KLInReward(KLPenalty):
    """The KL of each token is deducted from its reward, as a number without gradient.

    With k1, as in arXiv:2203.02155, equation 2, the expected sum over a response is its KL, and
    the policy gradient of the deduction is the exact gradient of that KL. k2 and k3 hardly pull
    near the reference: their expected policy gradient vanishes there to first order.

    Args:
        estimator: of the KL of one token.

    Example:
        >>> log_probs, ref_log_probs = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2.0, -1.5]])
        >>> KLInReward().reward(log_probs, ref_log_probs, mask=torch.tensor([[True, True]]))
        tensor([[1.0000, 0.5000]])
    """

    estimator: EstimatorName = "k1"
    in_reward: ClassVar[bool] = True

    def loss(
        self,
        log_probs: Float[Tensor, "rollouts tokens"],
        ref_log_probs: Float[Tensor, "rollouts tokens"],
        mask: Bool[Tensor, "rollouts tokens"],
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return zeros: the loss stays as it is."""
        return torch.zeros_like(log_probs)

    def reward(
        self,
        log_probs: Float[Tensor, "rollouts tokens"],
        ref_log_probs: Float[Tensor, "rollouts tokens"],
        mask: Bool[Tensor, "rollouts tokens"],
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return the KL of each token that counts, in nats."""
        return self._masked_per_token(log_probs, ref_log_probs, mask).detach()
