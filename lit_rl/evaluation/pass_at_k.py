"""How likely it is that one of k responses is correct."""

import torch
from jaxtyping import Float, Num
from torch import Tensor

from lit_rl.evaluation.statistics import widest_float


def pass_at_k(
    num_correct: Num[Tensor, " prompts"], num_samples: int, k: int
) -> Float[Tensor, " prompts"]:
    """pass@k = 1 - C(num_samples - num_correct, k) / C(num_samples, k).

    The unbiased estimate of Chen et al., arXiv:2107.03374, equation 1: the share of the subsets of
    k responses, out of all drawn ones, that hold a correct one. Written as a product of k factors
    between 0 and 1, so no binomial coefficient overflows. No correct response gives exactly 0,
    fewer than k wrong ones give exactly 1.

    Args:
        num_correct: correct responses of each prompt.
        num_samples: responses drawn for each prompt.
        k: responses that one attempt may try, at most `num_samples`.

    Returns:
        Probabilities, in float64; their mean over the prompts is the pass@k of the task.

    Raises:
        ValueError: if k is not between 1 and `num_samples`, or a count is not between 0 and it.

    Example:
        One of 4 is correct. Two tries find it in 3 of the 6 pairs.

        >>> pass_at_k(torch.tensor([0, 1, 4]), num_samples=4, k=2)
        tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"k is {k} but {num_samples} responses were drawn: k must be between 1 and "
            f"{num_samples}; draw more responses for a larger k"
        )
    outside = (num_correct < 0) | (num_correct > num_samples)
    if outside.any():
        raise ValueError(
            f"num_correct {num_correct[outside].tolist()} is not between 0 and num_samples "
            f"{num_samples}"
        )
    num_wrong = num_samples - num_correct.to(widest_float(num_correct.device))
    tries = torch.arange(k, device=num_correct.device)
    all_wrong = (num_wrong[:, None] - tries).clamp(min=0) / (num_samples - tries)
    return 1 - all_wrong.prod(dim=1)
