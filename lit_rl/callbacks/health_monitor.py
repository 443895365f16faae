"""A watch on what goes wrong in a run, while it runs."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_rl.algorithms import TRPO, ActorCritic
from lit_rl.algorithms.hooks import RLCallback, callbacks_of
from lit_rl.callbacks import health_alarms as alarms
from lit_rl.callbacks.critic_metrics import CriticMetrics
from lit_rl.callbacks.health_alarms import COMPARED, Alarm, Reading
from lit_rl.callbacks.held_out_watch import HeldOutWatch
from lit_rl.callbacks.metric_history import MetricHistory
from lit_rl.callbacks.ratio_metrics import RatioMetrics
from lit_rl.callbacks.reward_metrics import RewardMetrics
from lit_rl.callbacks.roll_back import check_roll_back, roll_back

Action = Literal["warn", "stop", "lower_learning_rate", "roll_back"]

MAX_ROLL_BACKS = 3
"""How often a run rolls back; at the alarm behind the last time it ends."""

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
            lasts, every `patience` iterations. `roll_back` goes on from the last checkpoint before
            that which the alarm is about, with the next prompts, and lowers the learning rate as
            `lower_learning_rate` does; at the alarm behind the third time it ends the run.
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
        if action not in get_args(Action):
            raise ValueError(
                f"action {action!r} of HealthMonitor is unknown; choose warn, stop, "
                "lower_learning_rate or roll_back"
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
        self.roll_backs = 0
        self._counts = {alarm.name: 0 for alarm in self.alarms}
        self._wrong_since: dict[str, int] = {}
        self._best_held_out: int | None = None  # to go back to before the next iteration
        self._scale = 1.0

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Refuse an action without effect, and warn of metrics that nothing logs.

        Raises:
            ValueError: for `lower_learning_rate` where the optimizer does not move the policy, and
                for `roll_back` where there are no checkpoints to go back to.
        """
        if stage != "fit":
            return
        if self.action == "roll_back":
            check_roll_back(trainer)
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
        for kind in needed:
            if not callbacks_of(trainer, kind):
                rank_zero_warn(
                    f"HealthMonitor reads metrics of {kind.__name__}, which is not there, and is "
                    f"silent about what they would show: add lit_rl.callbacks.{kind.__name__}"
                )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Let a lowered learning rate hold in a resumed run, too; go back after a validation."""
        if self._scale != 1:
            self._apply_scale(pl_module)
        if self._best_held_out is not None:
            good_until, self._best_held_out = self._best_held_out, None
            self._roll_back(trainer, pl_module, "held_out", good_until, too_fast=False)

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
        ringing = []
        for alarm in self.alarms:
            value = alarm.quantity(reading)
            if self._rings(alarm, value, reading, pl_module.iteration):
                ringing.append(alarm)
                self._ring(
                    trainer, pl_module, alarm.name, alarm.message(value), too_fast=alarm.too_fast
                )
        cause = " and ".join(alarm.name for alarm in ringing)
        if ringing and self.action == "roll_back" and not self._gives_up(trainer, pl_module, cause):
            # The first wrong iteration may have seen what is wrong with the weights before it.
            good_until = min(self._wrong_since[alarm.name] for alarm in ringing) - 2
            too_fast = any(alarm.too_fast for alarm in ringing)
            self._roll_back(trainer, pl_module, cause, good_until, too_fast=too_fast)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Look at the accuracy on held-out prompts."""
        if trainer.state.fn != "fit":
            return
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        message = self.held_out.message(pl_module.iteration, metrics, self.history)
        if message is not None:
            self._ring(trainer, pl_module, "held_out", message, too_fast=False)
            # Later, so that what is saved of this validation are the weights that it was of.
            if self.action == "roll_back" and not self._gives_up(trainer, pl_module, "held_out"):
                self._best_held_out = self.held_out.best_iteration()

    def _rings(self, alarm: Alarm, value: float, reading: Reading, iteration: int) -> bool:
        """Count iterations in a row; what is not known leaves the count as it is."""
        if math.isnan(value):
            return False
        if alarm.wrong(value, reading):
            count = self._counts[alarm.name] + 1
            self._wrong_since.setdefault(alarm.name, iteration)
        else:
            count = 0
            self._wrong_since.pop(alarm.name, None)
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
            self._lower_learning_rate(module, name)

    def _lower_learning_rate(self, module: Any, name: str) -> None:
        self._scale *= self.learning_rate_factor
        self._apply_scale(module)
        rank_zero_info(
            f"HealthMonitor, iteration {module.iteration}: {name}: the policy's learning rate is "
            f"{self._scale:.3g} of the configured one from here on"
        )

    def _gives_up(self, trainer: Trainer, module: Any, cause: str) -> bool:
        """End the run if rolling back has been no help."""
        if self.roll_backs < MAX_ROLL_BACKS:
            return False
        trainer.should_stop = True
        rank_zero_warn(
            f"HealthMonitor, iteration {module.iteration}: {cause} again, although the run was "
            f"rolled back {MAX_ROLL_BACKS} times, so it ends here: another setting has to change. "
            "The earlier checkpoints are whole"
        )
        return True

    def _roll_back(
        self, trainer: Trainer, module: Any, cause: str, good_until: int, *, too_fast: bool
    ) -> None:
        """Go back to before something went wrong, where there is a checkpoint of then."""
        where = f"HealthMonitor, iteration {module.iteration}: {cause}: "
        iteration = roll_back(trainer, module, good_until)
        if iteration is None:
            rank_zero_warn(
                f"{where}no whole checkpoint is old enough to roll back to, so the run goes on as "
                "it is; a lower every_n_iterations of IterationCheckpoint writes more of them"
            )
            return
        self.roll_backs += 1
        self._counts = dict.fromkeys(self._counts, 0)
        self._wrong_since = {}
        self._apply_scale(module)
        rank_zero_info(
            f"{where}rolled back to the weights of iteration {iteration} "
            f"({self.roll_backs} of at most {MAX_ROLL_BACKS} times)"
        )
        if too_fast and not isinstance(module, TRPO):
            self._lower_learning_rate(module, cause)

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
            "wrong_since": dict(self._wrong_since),
            "best_held_out": self._best_held_out,
            "roll_backs": self.roll_backs,
            "scale": self._scale,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what the alarms of a checkpoint remember."""
        self.history.load_state_dict(state_dict["history"])
        self.held_out.load_state_dict(state_dict["held_out"])
        self.rung = list(state_dict["rung"])
        self._counts |= {n: c for n, c in state_dict["counts"].items() if n in self._counts}
        self._wrong_since = dict(state_dict.get("wrong_since", {}))
        self._best_held_out = state_dict.get("best_held_out")
        self.roll_backs = state_dict.get("roll_backs", 0)
        self._scale = state_dict["scale"]


def _with_threshold(*alarms: tuple[float | None, Callable[[float], Alarm]]) -> list[Alarm]:
    """Return the alarms whose threshold is set."""
    return [alarm(threshold) for threshold, alarm in alarms if threshold is not None]
