"""What the responses of an iteration earned, how long they were, and what the policy is like."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_rl.advantages.groups import zero_std_groups
from lit_rl.algorithms.hooks import RLCallback
from lit_rl.evaluation import Statistics, Summary
from lit_rl.functional import kl_k1, kl_k3
from lit_rl.types import Experience, ScoredRollout, Update

NAMES = (
    "reward",
    "missing",
    "failed",
    "zero_std_group",
    "length",
    "truncated",
    "entropy",
    "k1",
    "k3",
)
OWN_NAMES = {"mean", "std", "errors", "missing_fraction", "zero_std_group_fraction"}
NEGATIVE_KL = -0.05
"""Mean KL to the reference, in nats per token, that no sampling error explains."""


class RewardMetrics(RLCallback):
    """Logs rewards, response lengths, entropy and the KL to the reference, over all ranks.

    Rewards and lengths are those of every response that was sampled, in each round of sampling;
    entropy and KL are those of the responses that are trained on.

    It warns once if the KL to the reference is clearly negative, which no KL is. What else may go
    wrong with these numbers is watched by `HealthMonitor`.
    """

    def __init__(self) -> None:
        self._statistics: Statistics
        self._begun = False
        self._parts: tuple[str, ...] = ()
        self._warned = False

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Forget the responses of the iteration before."""
        self._begun = False

    def on_scored(self, trainer: Trainer, module: Any, scored: ScoredRollout) -> None:
        """Take in the responses of one round of sampling."""
        if not self._begun:
            self._begin(scored)
        statistics = self._statistics
        statistics.update("reward", scored.rewards[~scored.missing])
        statistics.update("missing", scored.missing)
        if scored.failed is not None:
            statistics.update("failed", scored.failed)
        statistics.update("zero_std_group", zero_std_groups(scored))
        statistics.update("length", scored.mask.sum(dim=1))
        statistics.update("truncated", ~scored.finished)
        for name, part in scored.reward_parts.items():
            statistics.update(f"part {name}", part[~part.isnan()])

    def _begin(self, scored: ScoredRollout) -> None:
        self._parts = tuple(scored.reward_parts)
        if clash := OWN_NAMES & set(self._parts):
            raise ValueError(
                f"a reward is called {sorted(clash)}, but reward/{min(clash)} is a metric of all "
                f"rewards: call it otherwise, such as {min(clash)}_reward"
            )
        names = (*NAMES, *(f"part {name}" for name in self._parts))
        self._statistics = Statistics(names, scored.mask.device)
        self._begun = True

    def on_rollout(
        self, trainer: Trainer, module: Any, scored: ScoredRollout, experience: Experience
    ) -> None:
        """Take in the KL of the policy that drew the tokens."""
        if experience.ref_log_probs is not None:
            self._update_kl(experience, experience.ref_log_probs)

    def _update_kl(self, experience: Experience, ref_log_probs: Tensor) -> None:
        # Only tokens of the policy itself tell of its KL: this is the one that drew them.
        old = experience.old_log_probs
        log_probs = (experience.sampler_log_probs if old is None else old)[experience.mask]
        ref_log_probs = ref_log_probs[experience.mask]
        self._statistics.update("k1", kl_k1(log_probs, ref_log_probs))
        self._statistics.update("k3", kl_k3(log_probs, ref_log_probs))

    def on_minibatch(self, trainer: Trainer, module: Any, update: Update) -> None:
        """Take in the tokens of one optimizer step."""
        for experience, output in update.micro_batches:
            self._statistics.update("entropy", output.entropy[experience.mask])

    def on_iteration_end(self, trainer: Trainer, module: Any) -> None:
        """Reduce over the ranks, log, and warn."""
        of = self._statistics.compute()
        values = {"reward/mean": of["reward"].mean, "reward/std": of["reward"].std}
        values |= {f"reward/{name}": of[f"part {name}"].mean for name in self._parts}
        values["reward/missing_fraction"] = of["missing"].mean
        values["reward/errors"] = of["failed"].total
        values["reward/zero_std_group_fraction"] = of["zero_std_group"].mean
        values["response/length_mean"] = of["length"].mean
        values["response/length_min"] = of["length"].minimum
        values["response/length_max"] = of["length"].maximum
        values["response/truncated_fraction"] = of["truncated"].mean
        values["policy/entropy"] = of["entropy"].mean
        if module.uses_reference:
            values["kl/reference_k1"] = of["k1"].mean
            values["kl/reference_k3"] = of["k3"].mean
        module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)
        self._warn_of_negative_kl(of["k1"])

    def _warn_of_negative_kl(self, kl: Summary) -> None:
        if kl.mean < NEGATIVE_KL - 3 * kl.standard_error and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"the KL of the policy to the reference is {kl.mean:.3g} nats per token, but a KL "
                "is not negative: responses were not drawn from the policy as it is trained. Look "
                "for top-k, top-p, min-p, min_new_tokens or a forced token in sampling"
            )
