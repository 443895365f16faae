"""Whitening of advantages: the constants that several estimators share."""

from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.functional import masked_whiten

EPSILON = 1e-8
"""Added to the variance, in the squared unit of the rewards."""


def whitened(
    advantages: Float[Tensor, "rollouts tokens"], mask: Bool[Tensor, "rollouts tokens"]
) -> Float[Tensor, "rollouts tokens"]:
    """(A_t - mean(A)) / sqrt(variance(A) + EPSILON), over all tokens that count, on all ranks.

    `masked_whiten` with the sample variance. A token counts as often as any other, so a long
    response weighs more than a short one. Equal advantages give exactly 0, and so does a single
    one.

    Args:
        advantages: in any unit.
        mask: True where a token counts.

    Returns:
        Advantages without a unit, with mean 0 over the tokens of all ranks; 0 where the mask is
        False.

    Example:
        >>> import torch
        >>> advantages = torch.tensor([[1.0, 2.0], [3.0, 9.0]])
        >>> whitened(advantages, torch.tensor([[True, True], [True, False]]))
        tensor([[-1.,  0.],
                [ 1.,  0.]])
    """
    return masked_whiten(advantages, mask, unbiased=True, epsilon=EPSILON, epsilon_inside_sqrt=True)
