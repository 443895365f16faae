"""How far the updates of an iteration move the policy, and how far sampler and trainer disagree."""

import math
from dataclasses import replace
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lit_rl.algorithms.hooks import RLCallback
from lit_rl.evaluation import Statistics, widest_float
from lit_rl.functional import kl_k1, kl_k3
from lit_rl.sampler_corrections import effective_sample_size
from lit_rl.types import Experience, PolicyOutput, ScoredRollout, Update

CLIPS = {
    "low": "clip_low",
    "high": "clip_high",
    "dual": "dual_clip",
    "off_policy": "off_policy",
}
WEIGHTS = ("weight", "squared_weight", "without_weight")
NAMES = (*CLIPS, "k1", "k3", "ratio", "difference", *WEIGHTS)


class RatioMetrics(RLCallback):
    """Logs how far the policy moved from the one that sampled: clip fractions, KL and ratios.

    All of them count every response token of every optimizer step of the iteration, on all ranks.
    The difference between the log-probs of sampler and trainer counts the tokens of the first
    optimizer step only, where both still speak of the same weights.

    Where the algorithm has a sampler correction, its weights are logged too, over the tokens of
    every optimizer step. They are the same in every epoch, so more epochs change nothing.
    """

    def __init__(self) -> None:
        self._statistics: Statistics

    def on_rollout(
        self, trainer: Trainer, module: Any, scored: ScoredRollout, experience: Experience
    ) -> None:
        """Begin the statistics of an iteration."""
        self._statistics = Statistics(NAMES, experience.mask.device)

    def on_minibatch(self, trainer: Trainer, module: Any, update: Update) -> None:
        """Take in the tokens of one optimizer step."""
        for experience, output in update.micro_batches:
            self._update_ratios(module, experience, output)
            if update.index == 0:
                difference = experience.sampler_log_probs - output.log_probs
                self._statistics.update("difference", difference[experience.mask].abs())

    def _update_ratios(self, module: Any, experience: Experience, output: PolicyOutput) -> None:
        mask, new = experience.mask, output.log_probs
        old = new if experience.old_log_probs is None else experience.old_log_probs
        experience = replace(experience, old_log_probs=old)
        if module.sampler_correction is not None:
            self._update_weights(module.sampler_correction.weights(experience)[mask])
        clipped = module.policy_loss.clipped(new, experience)
        for name in CLIPS:
            binds = clipped[name] if name in clipped else mask.new_zeros(mask.shape)
            self._statistics.update(name, binds[mask])
        precise = widest_float(mask.device)
        old, new = old[mask].to(precise), new[mask].to(precise)
        self._statistics.update("k1", kl_k1(old, new))
        self._statistics.update("k3", kl_k3(old, new))
        self._statistics.update("ratio", (new - old).exp())

    def _update_weights(self, weights: Tensor) -> None:
        weights = weights.to(widest_float(weights.device))
        self._statistics.update("weight", weights)
        self._statistics.update("squared_weight", weights.square())
        self._statistics.update("without_weight", weights == 0)

    def on_iteration_end(self, trainer: Trainer, module: Any) -> None:
        """Reduce over the ranks and log."""
        of = self._statistics.compute()
        values = {f"ratio/{metric}_fraction": of[name].mean for name, metric in CLIPS.items()}
        values["ratio/approx_kl_k1"] = of["k1"].mean
        values["ratio/approx_kl_k3"] = of["k3"].mean
        values["ratio/mean"] = of["ratio"].mean
        values["ratio/min"] = of["ratio"].minimum
        values["ratio/max"] = of["ratio"].maximum
        values["sampler/abs_difference_mean"] = of["difference"].mean
        values["sampler/abs_difference_max"] = of["difference"].maximum
        if module.sampler_correction is not None:
            num_tokens = of["weight"].num_values
            size = effective_sample_size(of["weight"].total, of["squared_weight"].total)
            values["sampler/effective_sample_size"] = size / num_tokens if num_tokens else math.nan
            values["sampler/weight_mean"] = of["weight"].mean
            values["sampler/masked_fraction"] = of["without_weight"].mean
        module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)
