"""The weight of the KL to the reference over a run: held, scheduled, or steered to a target."""

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import Trainer

from lit_rl.algorithms.hooks import RLCallback, callbacks_of
from lit_rl.data import prompt_data
from lit_rl.evaluation import widest_float
from lit_rl.functional import kl_k1, sum_over_ranks
from lit_rl.types import Experience, ScoredRollout

KLUnit = Literal["nats_per_response", "nats_per_token"]

LARGEST_ERROR = 0.2
"""Relative error of the KL, in either direction, beyond which `adaptive_kl_coef` reacts no more."""


class KLController(RLCallback, ABC):
    """Sets `kl_coef` of the algorithm before every iteration, the first one included.

    The algorithm multiplies its KL by that number wherever the KL acts, in the reward or in the
    loss. What the configuration of the algorithm says of `kl_coef` no longer matters.
    """

    needs_reference: ClassVar[bool] = True
    goes_back: ClassVar[bool] = True

    @abstractmethod
    def coefficient(self, iteration: int) -> float:
        """Return the weight of the KL in an iteration.

        Args:
            iteration: iterations that are finished before it; 0 for the first one.
        """

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Refuse an algorithm in which the weight would have no effect, or two meanings.

        Raises:
            ValueError: if there is another controller, if rows are left out of the updates, or if
                the advantages do not see the KL in the reward, or one of another policy.
        """
        if stage != "fit":
            return
        name = type(self).__name__
        names = [type(other).__name__ for other in callbacks_of(trainer, KLController)]
        if len(names) > 1:
            raise ValueError(f"one of {' and '.join(names)} can set kl_coef, not all: leave one")
        if pl_module.skip_zero_advantages:
            raise ValueError(
                f"skip_zero_advantages leaves out rows that the KL of {name} would train: set it "
                "to false"
            )
        if (
            pl_module.kl.in_reward
            and pl_module.sampler_correction
            and pl_module.old_log_probs.single_update
        ):
            raise ValueError(
                f"{name} weighs a KL that is deducted from the reward, which old_log_probs "
                f"{type(pl_module.old_log_probs).__name__} would take from the sampler, which "
                "sampler_correction says is not the policy: use RecomputedLogProbs"
            )
        if pl_module.kl.in_reward and not pl_module.advantage.sees_final_reward:
            raise ValueError(
                f"{name} weighs a KL that is deducted from the reward, which "
                f"{type(pl_module.advantage).__name__} does not see: use kl KLInLoss"
            )

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Set the weight of the first iteration, or of the one that a resumed run goes on with."""
        pl_module.kl_coef = self.coefficient(pl_module.iteration)

    def on_iteration_end(self, trainer: Trainer, module: Any) -> None:
        """Set the weight of the next iteration."""
        module.kl_coef = self.coefficient(module.iteration)


class FixedKL(KLController):
    """The same weight in every iteration, however far the policy moves.

    Args:
        coef: the weight of the KL, at least 0.
    """

    def __init__(self, coef: float) -> None:
        _check_not_negative("coef", coef)
        self.coef = coef

    def coefficient(self, iteration: int) -> float:
        """Return the weight of the KL in an iteration."""
        return self.coef


class ScheduledKL(KLController):
    """A weight that goes from one value to another over a number of iterations, then stays.

    Args:
        initial: the weight in the first iteration, at least 0.
        final: the weight in every iteration behind the first `num_iterations`, at least 0.
        num_iterations: iterations over which the weight moves.
    """

    def __init__(self, initial: float, final: float, num_iterations: int) -> None:
        _check_not_negative("initial", initial)
        _check_not_negative("final", final)
        if num_iterations < 1:
            raise ValueError(
                f"num_iterations is {num_iterations}, must be at least 1; use FixedKL for a weight "
                "that does not move"
            )
        self.initial = initial
        self.final = final
        self.num_iterations = num_iterations

    def coefficient(self, iteration: int) -> float:
        """Return the weight of the KL in an iteration."""
        way = self.way(min(1.0, iteration / self.num_iterations))
        return (1 - way) * self.initial + way * self.final

    @abstractmethod
    def way(self, passed: float) -> float:
        """Return the share of the way from `initial` to `final`.

        Args:
            passed: the share of the iterations that have passed, in [0, 1].
        """


class LinearKL(ScheduledKL):
    """coefficient = initial + (final - initial) * min(1, iteration / num_iterations).

    `iteration` counts the finished ones. The arguments are those of `ScheduledKL`.

    Example:
        >>> controller = LinearKL(initial=0.5, final=0.0, num_iterations=4)
        >>> [controller.coefficient(iteration) for iteration in range(6)]
        [0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
    """

    def way(self, passed: float) -> float:
        """Return the share of the way from `initial` to `final`."""
        return passed


class CosineKL(ScheduledKL):
    """coefficient = final + (initial - final) * (1 + cos(pi * passed)) / 2.

    passed = min(1, iteration / num_iterations); `iteration` counts the finished ones. The weight
    moves slowly at both ends. The arguments are those of `ScheduledKL`.

    Example:
        >>> controller = CosineKL(initial=0.0, final=1.0, num_iterations=2)
        >>> [round(controller.coefficient(iteration), 3) for iteration in range(4)]
        [0.0, 0.5, 1.0, 1.0]
    """

    def way(self, passed: float) -> float:
        """Return the share of the way from `initial` to `final`."""
        return (1 - math.cos(math.pi * passed)) / 2


def adaptive_kl_coef(
    coefficient: float, kl: float, *, target: float, num_responses: int, horizon: int
) -> float:
    """Coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * num_responses / horizon).

    Ziegler et al., arXiv:1909.08593, section 2.2. Their constant gain of 0.1 is
    num_responses / horizon here, as in the code they released: the weight then moves with the
    number of samples, however they are cut into iterations.

    Without responses the coefficient stays. A KL that is NaN makes it NaN.

    Args:
        coefficient: weight of the KL in this iteration.
        kl: measured KL to the reference, in the unit of `target`.
        target: the KL that is to be held, above 0.
        num_responses: responses of this iteration, on all ranks.
        horizon: responses over which a clipped error of 0.2 changes the weight by about a fifth.

    Returns:
        The weight in the next iteration, above 0 if `coefficient` is.

    Raises:
        ValueError: if there are so many responses to a horizon that the weight could fall below 0.

    Example:
        >>> round(adaptive_kl_coef(0.2, 12.0, target=6.0, num_responses=256, horizon=10000), 6)
        0.201024
    """
    _check_horizon(horizon, num_responses)
    error = min(max(kl / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coefficient * (1 + error * num_responses / horizon)


class AdaptiveKL(KLController):
    """Raises the weight while the KL to the reference is above a target, lowers it while below.

    The weight of the next iteration is `adaptive_kl_coef` of this one. The KL is that of the policy
    that drew the responses, by k1: the sum of log_probs - ref_log_probs over the tokens that count,
    divided by the number of those tokens or of the responses they stand in, on all ranks. While a
    critic warms up, so that the policy cannot follow, the weight stays. A checkpoint holds it.

    Args:
        initial: the weight in the first iteration, above 0: 0 would stay 0.
        target: the KL to hold, above 0, in `unit`.
        unit: what the target counts. A response of 50 tokens with 0.1 nats per token has 5 nats per
            response, so no default would be right for both.
        horizon: responses over which a large error changes the weight by about a fifth, above 0.
            Ziegler et al. use 10000.
    """

    def __init__(self, initial: float, target: float, unit: KLUnit, horizon: int) -> None:
        for name, value in (("initial", initial), ("target", target), ("horizon", horizon)):
            if not value > 0:
                raise ValueError(f"{name} of AdaptiveKL is {value}, must be above 0")
        if unit not in ("nats_per_response", "nats_per_token"):
            raise ValueError(
                f"unit of AdaptiveKL is {unit!r}: say nats_per_response or nats_per_token, which "
                f"the target {target} counts"
            )
        self.initial = initial
        self.target = target
        self.unit = unit
        self.horizon = horizon
        self._coefficient = initial
        self._kl = math.nan
        self._num_responses = 0
        self._policy_moves = True

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Refuse what every controller does, and iterations that are too large for the horizon.

        Raises:
            ValueError: if there are so many responses that the weight could fall below 0.
        """
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and (data := prompt_data(trainer)) is not None:
            _check_horizon(self.horizon, data.batch_size * pl_module.group_size)

    def coefficient(self, iteration: int) -> float:
        """Return the weight of the KL in the next iteration, whichever that is."""
        return self._coefficient

    def on_rollout(
        self, trainer: Trainer, module: Any, scored: ScoredRollout, experience: Experience
    ) -> None:
        """Measure the KL of the policy that drew the responses."""
        assert experience.ref_log_probs is not None
        self._policy_moves = module.trains_policy
        mask, log_probs = experience.mask, experience.old_log_probs
        log_probs = experience.sampler_log_probs if log_probs is None else log_probs
        kl = kl_k1(log_probs[mask], experience.ref_log_probs[mask])
        sums = torch.stack([kl.to(widest_float(mask.device)).sum(), mask.any(1).sum(), mask.sum()])
        total, num_responses, num_tokens = sum_over_ranks(sums).tolist()
        self._num_responses = int(num_responses)
        number = num_responses if self.unit == "nats_per_response" else num_tokens
        self._kl = total / max(1.0, number)

    def on_iteration_end(self, trainer: Trainer, module: Any) -> None:
        """Move the weight, and set it for the next iteration."""
        if self._policy_moves:
            self._coefficient = adaptive_kl_coef(
                self._coefficient,
                self._kl,
                target=self.target,
                num_responses=self._num_responses,
                horizon=self.horizon,
            )
        super().on_iteration_end(trainer, module)

    def state_dict(self) -> dict[str, Any]:
        """Return the weight."""
        return {"coefficient": self._coefficient}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the weight of a checkpoint."""
        self._coefficient = state_dict["coefficient"]


def _check_horizon(horizon: int, num_responses: int) -> None:
    if LARGEST_ERROR * num_responses >= horizon:
        raise ValueError(
            f"horizon is {horizon} responses, but an iteration has {num_responses}: a low KL would "
            "turn the weight negative. Set horizon to many times that, for example 10000"
        )


def _check_not_negative(name: str, coef: float) -> None:
    if not coef >= 0:
        raise ValueError(
            f"{name} is {coef}, must be at least 0: a negative weight would drive the policy away "
            "from the reference"
        )
