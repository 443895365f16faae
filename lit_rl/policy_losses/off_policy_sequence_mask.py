"""A policy loss without the bad responses that the policy has moved away from."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.functional import log_ratio, masked_mean
from lit_rl.policy_losses.base import PolicyLoss, ratio_arguments
from lit_rl.types import Experience


def off_policy_negatives(
    log_probs: Float[Tensor, "rollouts tokens"],
    old_log_probs: Float[Tensor, "rollouts tokens"],
    advantages: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    *,
    max_kl: float,
) -> Bool[Tensor, "rollouts tokens"]:
    """off_policy_negatives = A < 0 and mean(old_log_probs - log_probs) > max_kl.

    The mean is over the tokens of the sequence. DeepSeek-V3.2, arXiv:2512.02556, section 3.1
    (off-policy sequence masking): a mistake teaches something while the policy would still make
    it; long after, pushing it further down only disturbs. The paper's old log-probs are those
    of the inference engine, so its KL contains the difference between sampler and trainer; here
    they are the old ones of the experience, which are the sampler's under `SamplerLogProbs`.

    Args:
        log_probs: under the current policy, in nats.
        old_log_probs: under the policy before the update, in nats.
        advantages: of each token, in any unit.
        mask: True where a token counts.
        max_kl: largest mean log-ratio of a sequence with negative advantages that is trained, in
            nats per token.

    Returns:
        True where a token is left out; False where the mask is False.

    Example:
        >>> off_policy_negatives(
        ...     torch.tensor([[-3.0, -1.0], [-3.0, -1.0]]), torch.full((2, 2), -1.0),
        ...     advantages=torch.tensor([[-1.0, -1.0], [1.0, 1.0]]),
        ...     mask=torch.ones(2, 2, dtype=torch.bool), max_kl=0.5,
        ... )
        tensor([[ True,  True],
                [False, False]])
    """
    old_to_new = log_ratio(old_log_probs, log_probs, mask)
    is_far = masked_mean(old_to_new, mask, dim=1, keepdim=True) > max_kl
    return mask & (advantages < 0) & is_far


@dataclass(frozen=True)
class OffPolicySequenceMask(PolicyLoss):
    """Another loss, with 0 at `off_policy_negatives`.

    A token that is left out has no gradient but counts in every denominator, as in the paper. With
    one update per rollout nothing is left out, unless the old log-probs are the sampler's; such a
    loop refuses to start.

    Args:
        loss: the loss of the other tokens.
        max_kl: largest mean over a sequence of old_log_probs - log_probs, in nats per token, above
            0, at which its tokens with negative advantages are trained.
    """

    loss: PolicyLoss
    max_kl: float

    def __post_init__(self) -> None:
        if not self.max_kl > 0:
            raise ValueError(f"max_kl must be above 0, for example 0.1 nats, not {self.max_kl}")

    # A constant of every other loss, but here that of the loss within.
    @property
    def single_update(self) -> bool:  # type: ignore[override]
        """Whether the other loss is right for one update per rollout only."""
        return self.loss.single_update

    def __call__(
        self, log_probs: Float[Tensor, "rollouts tokens"], experience: Experience
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return the other loss where it is trained, else 0."""
        left_out = self._left_out(log_probs, experience)
        return torch.where(left_out, 0.0, self.loss(log_probs, experience))

    def clipped(
        self, log_probs: Float[Tensor, "rollouts tokens"], experience: Experience
    ) -> dict[str, Bool[Tensor, "rollouts tokens"]]:
        """Return the clips of the other loss where it is trained, and `off_policy`."""
        left_out = self._left_out(log_probs, experience)
        clips = self.loss.clipped(log_probs, experience)
        return {
            **{name: binds & ~left_out for name, binds in clips.items()},
            "off_policy": left_out,
        }

    def _left_out(self, log_probs: Tensor, experience: Experience) -> Tensor:
        return off_policy_negatives(
            *ratio_arguments(log_probs.detach(), experience),
            max_kl=self.max_kl,
        )
