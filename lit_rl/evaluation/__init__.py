"""What is measured, and how sure we are of it."""

from lit_rl.evaluation.held_out import Evaluation, HeldOutMetrics
from lit_rl.evaluation.pass_at_k import pass_at_k
from lit_rl.evaluation.samples import sample_rows
from lit_rl.evaluation.statistics import Statistics, Summary, widest_float

__all__ = [
    "Evaluation",
    "HeldOutMetrics",
    "Statistics",
    "Summary",
    "pass_at_k",
    "sample_rows",
    "widest_float",
]
