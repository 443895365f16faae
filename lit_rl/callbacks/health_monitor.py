"""A watch on what goes wrong in a run, while it runs."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_rl.algorithms import TRPO, ActorCritic
from lit_rl.algorithms.hooks import RLCallback
from lit_rl.callbacks import health_alarms as alarms
from lit_rl.callbacks.critic_metrics import CriticMetrics
from lit_rl.callbacks.health_alarms import COMPARED, Alarm, Reading
from lit_rl.callbacks.held_out_watch import HeldOutWatch
from lit_rl.callbacks.metric_history import MetricHistory
from lit_rl.callbacks.ratio_metrics import RatioMetrics
from lit_rl.callbacks.reward_metrics import RewardMetrics

Action = Literal["warn", "stop", "lower_learning_rate"]

USUAL = 20
"""Iterations whose median gradient norm is the usual one."""


class HealthMonitor(RLCallback):
    """Warns, in one sentence and once for each cause, of what goes wrong; stops the run if asked.

    After each iteration it reads what `RewardMetrics`, `RatioMetrics`, `CriticMetrics` and the
    algorithm logged, and after each validation the accuracy on held-out prompts. These numbers are
    the same on every rank, so all ranks decide alike. docs/health.md is the table of the alarms. A
    threshold that is None switches its alarm off.

    A checkpoint holds everything that an alarm remembers, so a resumed run warns of what the
    uninterrupted one would. A run that it stopped ends like one that is over, with its last
    checkpoint; resumed from there, it does not stop for the same cause again.

    Args:
        action: what an alarm does beside its warning. `stop` ends the run after the iteration.
            `lower_learning_rate` multiplies the policy's learning rate, for the rest of the run,
            each time that an alarm rings of which too large steps are the usual cause; while it
            lasts, every `patience` iterations.
        learning_rate_factor: by what, in (0, 1).
        patience: iterations in a row for which something has to be wrong; also the number of
            iterations that count as the start of the run.
        min_entropy: least entropy of the policy before the task is solved, in nats per token.
        max_entropy_factor: largest entropy, as a multiple of that at the start.
        max_reference_kl: largest KL to the reference, in nats per token.
        max_update_kl: largest mean KL from the policy that sampled over the updates of an
            iteration, in nats per token.
        max_clip_fraction: largest share of tokens at which a clip binds.
        max_truncated_fraction: largest share of truncated responses while the reward does not rise.
        max_length_factor: largest change of the mean length since the start, up or down, while the
            reward does not rise, as a factor.
        min_explained_variance: least explained variance of the critic.
        max_grad_norm_factor: largest gradient norm, as a multiple of the median of the last 20;
            only one above `max_grad_norm` of the algorithm counts.
        max_sampler_difference: largest difference between log-probs of sampler and trainer at one
            token, in nats.
        max_held_out_drop: largest fall of the held-out greedy accuracy below its best; it also has
            to be three standard errors.

    Raises:
        ValueError: for an action that does not exist and for a number out of its range.
    """

    def __init__(
        self,
        action: Action = "warn",
        learning_rate_factor: float = 0.5,
        patience: int = 5,
        min_entropy: float | None = 0.01,
        max_entropy_factor: float | None = 2.0,
        max_reference_kl: float | None = 0.5,
        max_update_kl: float | None = 0.1,
        max_clip_fraction: float | None = 0.65,
        max_truncated_fraction: float | None = 0.9,
        max_length_factor: float | None = 3.0,
        min_explained_variance: float | None = -0.1,
        max_grad_norm_factor: float | None = 20.0,
        max_sampler_difference: float | None = 1.0,
        max_held_out_drop: float | None = 0.1,
    ) -> None:
        if action not in ("warn", "stop", "lower_learning_rate"):
            raise ValueError(
                f"action {action!r} of HealthMonitor is unknown; choose warn, stop or "
                "lower_learning_rate"
            )
        if not 0 < learning_rate_factor < 1:
            raise ValueError(
                f"learning_rate_factor of HealthMonitor is {learning_rate_factor}, must be between "
                "0 and 1, for example 0.5"
            )
        if patience < 1:
            raise ValueError(f"patience is {patience} iterations, must be at least 1")
        self.action = action
        self.learning_rate_factor = learning_rate_factor
        wait = {"patience": patience}
        self.alarms = [alarms.not_finite(), alarms.no_signal(**wait)]
        self.alarms += _with_threshold(
            (min_entropy, partial(alarms.entropy_collapse, **wait)),
            (max_entropy_factor, partial(alarms.entropy_rise, **wait)),
            (max_reference_kl, partial(alarms.reference_kl, **wait)),
            (max_update_kl, partial(alarms.update_kl, **wait)),
            (max_clip_fraction, partial(alarms.clipping, **wait)),
            (max_truncated_fraction, partial(alarms.truncation, **wait)),
            (max_length_factor, partial(alarms.length, **wait)),
            (min_explained_variance, partial(alarms.critic, **wait)),
            (max_grad_norm_factor, alarms.grad_norm),
            (max_sampler_difference, alarms.sampler),
        )
        self.held_out = HeldOutWatch(max_held_out_drop)
        self.history = MetricHistory(COMPARED, num_first=patience, num_last=max(USUAL, patience))
        self.rung: list[str] = []
        self._counts = {alarm.name: 0 for alarm in self.alarms}
        self._scale = 1.0

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Refuse an action without effect, and warn of metrics that nothing logs.

        Raises:
            ValueError: for `lower_learning_rate` where the optimizer does not move the policy.
        """
        if stage != "fit":
            return
        if self.action == "lower_learning_rate" and isinstance(pl_module, TRPO):
            raise ValueError(
                "action lower_learning_rate of HealthMonitor has no effect on TRPO, whose policy "
                "the optimizer does not move: use stop, and a smaller max_kl"
            )
        needed = [
            RewardMetrics,
            RatioMetrics,
            *([CriticMetrics] * isinstance(pl_module, ActorCritic)),
        ]
        present = trainer.callbacks  # type: ignore[attr-defined]
        for kind in needed:
            if not any(isinstance(callback, kind) for callback in present):
                rank_zero_warn(
                    f"HealthMonitor reads metrics of {kind.__name__}, which is not there, and is "
                    f"silent about what they would show: add lit_rl.callbacks.{kind.__name__}"
                )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Let a lowered learning rate hold in a resumed run, too."""
        if self._scale != 1:
            self._apply_scale(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the metrics of the iteration that has just ended."""
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        self.history.add(metrics)
        limit = pl_module.max_grad_norm
        reading = Reading(
            metrics=metrics,
            history=self.history,
            compares_groups=pl_module.advantage.min_group_size > 1,
            success_reward=pl_module.evaluation.success_reward,
            max_grad_norm=math.inf if limit is None else limit,
        )
        for alarm in self.alarms:
            value = alarm.quantity(reading)
            if self._rings(alarm, value, reading):
                self._ring(
                    trainer, pl_module, alarm.name, alarm.message(value), too_fast=alarm.too_fast
                )

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Look at the accuracy on held-out prompts."""
        if trainer.state.fn != "fit":
            return
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        message = self.held_out.message(pl_module.iteration, metrics, self.history)
        if message is not None:
            self._ring(trainer, pl_module, "held_out", message, too_fast=False)

    def _rings(self, alarm: Alarm, value: float, reading: Reading) -> bool:
        """Count iterations in a row; what is not known leaves the count as it is."""
        if math.isnan(value):
            return False
        count = self._counts[alarm.name] + 1 if alarm.wrong(value, reading) else 0
        rings = count >= alarm.patience
        self._counts[alarm.name] = 0 if rings else count
        return rings

    def _ring(
        self, trainer: Trainer, module: Any, name: str, message: str, *, too_fast: bool
    ) -> None:
        where = f"HealthMonitor, iteration {module.iteration}: "
        is_new = name not in self.rung
        if is_new:
            self.rung.append(name)
            rank_zero_warn(where + message)
        if self.action == "stop" and is_new:
            trainer.should_stop = True
            rank_zero_info(f"Stopped after iteration {module.iteration} by HealthMonitor ({name})")
        if self.action == "lower_learning_rate" and too_fast:
            self._scale *= self.learning_rate_factor
            self._apply_scale(module)
            rank_zero_info(
                f"{where}{name}: the policy's learning rate is {self._scale:.3g} of the configured "
                "one from here on"
            )

    def _apply_scale(self, module: Any) -> None:
        """Scale the configured learning rate of the actor, at the place of the schedule."""
        scheduler = module.scheduler
        for index, group in enumerate(module.raw_optimizer.param_groups):
            if group["name"] == "actor":
                scheduler.base_lrs[index] = group["initial_lr"] * self._scale
                factor = scheduler.lr_lambdas[index](scheduler.last_epoch)
                group["lr"] = scheduler.base_lrs[index] * factor

    def state_dict(self) -> dict[str, Any]:
        """Return what the alarms remember."""
        return {
            "history": self.history.state_dict(),
            "held_out": self.held_out.state_dict(),
            "rung": list(self.rung),
            "counts": dict(self._counts),
            "scale": self._scale,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what the alarms of a checkpoint remember."""
        self.history.load_state_dict(state_dict["history"])
        self.held_out.load_state_dict(state_dict["held_out"])
        self.rung = list(state_dict["rung"])
        self._counts |= {n: c for n, c in state_dict["counts"].items() if n in self._counts}
        self._scale = state_dict["scale"]


def _with_threshold(*alarms: tuple[float | None, Callable[[float], Alarm]]) -> list[Alarm]:
    """Return the alarms whose threshold is set."""
    return [alarm(threshold) for threshold, alarm in alarms if threshold is not None]
