"""An end to the updates of an iteration once the policy has moved far enough."""

from typing import Any, Literal

import torch
from lightning.pytorch import Trainer

from lit_rl.algorithms import TRPO
from lit_rl.algorithms.hooks import RLCallback
from lit_rl.evaluation import widest_float
from lit_rl.functional import kl_k1, kl_k3, sum_over_ranks
from lit_rl.types import Experience, ScoredRollout, Update

ESTIMATORS = {"k1": kl_k1, "k3": kl_k3}


class StopOnKL(RLCallback):
    """Ends the updates of an iteration when the policy is too far from the one that sampled.

    The distance is the approximate KL(old, policy) of one minibatch, a mean over its tokens on all
    ranks, so that all of them stop together. It is measured on the log-probs of the update itself,
    from before its step: the minibatch that shows a distance above the limit has still been
    trained on, and the updates after it are left out. The next iteration begins anew.

    Args:
        limit: the largest distance, in nats per token, above 0.
        estimator: k3 is never negative; k1 may be by chance, and is the noisier of the two.
    """

    def __init__(self, limit: float, estimator: Literal["k1", "k3"] = "k3") -> None:
        if not limit > 0:
            raise ValueError(f"limit of StopOnKL is {limit}, must be above 0, for example 0.02")
        if estimator not in ESTIMATORS:
            raise ValueError(f"estimator {estimator!r} of StopOnKL is unknown; choose k1 or k3")
        self.limit = limit
        self.estimator = estimator
        self._stopped_early = False

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Refuse a run in which no update could be left out.

        Raises:
            ValueError: if an iteration has one update, or one that moves the policy.
        """
        if stage == "fit" and isinstance(pl_module, TRPO) and pl_module.num_minibatches == 1:
            raise ValueError(
                "StopOnKL leaves out updates after the first one, but TRPO moves the policy in the "
                "first one alone, by at most max_kl: leave StopOnKL out, or set num_minibatches "
                "above 1"
            )
        if stage == "fit" and pl_module.steps_per_iteration == 1:
            raise ValueError(
                "StopOnKL leaves out updates after the first one, but an iteration has only one: "
                "set update_epochs or num_minibatches above 1, or leave StopOnKL out"
            )

    def on_rollout(
        self, trainer: Trainer, module: Any, scored: ScoredRollout, experience: Experience
    ) -> None:
        """Begin an iteration."""
        self._stopped_early = False

    def on_minibatch(self, trainer: Trainer, module: Any, update: Update) -> None:
        """Stop if this minibatch is beyond the limit."""
        estimate, precise = ESTIMATORS[self.estimator], widest_float(module.device)
        sums = torch.zeros(2, dtype=precise, device=module.device)
        for experience, output in update.micro_batches:
            mask, new = experience.mask, output.log_probs
            old = new if experience.old_log_probs is None else experience.old_log_probs
            kl = estimate(old[mask].to(precise), new[mask].to(precise))
            sums += torch.stack([kl.sum(), mask.sum()])
        total, num_tokens = sum_over_ranks(sums).tolist()
        if total > self.limit * num_tokens:
            module.stop_updates = True
            self._stopped_early = update.index + 1 < module.steps_per_iteration

    def on_iteration_end(self, trainer: Trainer, module: Any) -> None:
        """Log whether updates were left out."""
        values = {"update/stopped_early": float(self._stopped_early)}
        module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)
