"""How long an iteration takes and how much of everything a run has used up."""

from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Trainer

from lit_rl.algorithms.hooks import RLCallback
from lit_rl.functional import sum_over_ranks
from lit_rl.types import Experience, ScoredRollout


class Throughput(RLCallback):
    """Logs seconds per iteration, tokens per second, and totals that go on after a resume.

    Seconds are those of rank 0; ranks wait for each other in every optimizer step. Validation and
    writing checkpoints count in none of them.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._responses = 0
        self._seconds = 0.0
        self._sampled = [0, 0]
        self._start = 0.0
        self._rollout_end = 0.0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock of an iteration."""
        self._start = perf_counter()
        self._sampled = [0, 0]

    def on_scored(self, trainer: Trainer, module: Any, scored: ScoredRollout) -> None:
        """Count the tokens and the responses of one round of sampling."""
        self._sampled[0] += int(scored.mask.sum())
        self._sampled[1] += len(scored)

    def on_rollout(
        self, trainer: Trainer, module: Any, scored: ScoredRollout, experience: Experience
    ) -> None:
        """Note the end of the rollout, which is over when the slowest rank has its own."""
        trainer.strategy.barrier()
        self._rollout_end = perf_counter()

    def on_iteration_end(self, trainer: Trainer, module: Any) -> None:
        """Log the times of this iteration and the totals."""
        sampled = sum_over_ranks(torch.tensor(self._sampled, device=module.device))
        tokens, responses = sampled.tolist()
        end = perf_counter()
        seconds = end - self._start
        self._tokens += tokens
        self._responses += responses
        self._seconds += seconds
        values = {
            "time/iteration_seconds": seconds,
            "time/rollout_seconds": self._rollout_end - self._start,
            "time/update_seconds": end - self._rollout_end,
            "throughput/tokens_per_second": tokens / seconds,
            "total/tokens": float(self._tokens),
            "total/responses": float(self._responses),
            "total/optimizer_steps": float(trainer.global_step),
            "total/seconds": self._seconds,
        }
        module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """Return the totals."""
        return {
            "tokens": self._tokens,
            "responses": self._responses,
            "seconds": self._seconds,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the totals of a checkpoint."""
        self._tokens = state_dict["tokens"]
        self._responses = state_dict["responses"]
        self._seconds = state_dict["seconds"]
