"""Tensor maths that several ideas share: masking, log-probs, ratios, KL."""

from lit_rl.functional.fingerprint import fingerprint
from lit_rl.functional.kl import kl_abs, kl_k1, kl_k2, kl_k3, unbiased_gradient
from lit_rl.functional.log_probs import (
    response_hidden,
    token_log_probs,
    token_log_probs_and_entropy,
)
from lit_rl.functional.masking import (
    masked_centered,
    masked_mean,
    masked_sum,
    masked_variance,
    masked_whiten,
    top_fraction,
)
from lit_rl.functional.ranks import (
    gather_over_ranks,
    maximum_over_ranks,
    minimum_over_ranks,
    sum_over_ranks,
)
from lit_rl.functional.ratios import bounded_exp, log_ratio, probability_ratio
from lit_rl.functional.rows import distinct_rows

__all__ = [
    "bounded_exp",
    "distinct_rows",
    "fingerprint",
    "gather_over_ranks",
    "kl_abs",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "log_ratio",
    "masked_centered",
    "masked_mean",
    "masked_sum",
    "masked_variance",
    "masked_whiten",
    "maximum_over_ranks",
    "minimum_over_ranks",
    "probability_ratio",
    "response_hidden",
    "sum_over_ranks",
    "token_log_probs",
    "token_log_probs_and_entropy",
    "top_fraction",
    "unbiased_gradient",
]
