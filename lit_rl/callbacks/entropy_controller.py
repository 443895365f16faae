"""The weight of the entropy bonus, steered so that the policy keeps a certain entropy."""

from typing import Any, ClassVar

from lightning.pytorch import Trainer

from lit_rl.algorithms.hooks import RLCallback
from lit_rl.evaluation import Statistics
from lit_rl.types import Experience, ScoredRollout, Update


def adaptive_entropy_coef(
    coefficient: float,
    entropy: float,
    *,
    target: float,
    step: float,
    minimum: float,
    maximum: float,
) -> float:
    """clip(coefficient + step * sign(target - entropy), minimum, maximum).

    Skywork-OR1, arXiv:2505.22312, section 3.2.5. Deliberate differences: the coefficient has
    bounds, and it acts in every iteration, while theirs acts only where the entropy is not above
    the target.

    An entropy equal to the target, or unknown (NaN), leaves the coefficient as it is.

    Args:
        coefficient: weight of the entropy bonus in this iteration.
        entropy: mean entropy of the policy, in nats per token.
        target: the entropy that is to be held, in nats per token.
        step: by how much the coefficient moves.
        minimum: the smallest coefficient.
        maximum: the largest coefficient.

    Returns:
        The coefficient of the next iteration, in [minimum, maximum].

    Example:
        >>> bounds = {"target": 0.5, "step": 0.25, "minimum": 0.0, "maximum": 1.0}
        >>> [adaptive_entropy_coef(0.5, entropy, **bounds) for entropy in (0.4, 0.5, 0.6)]
        [0.75, 0.5, 0.25]
    """
    moved = coefficient + step * ((entropy < target) - (entropy > target))
    return min(max(moved, minimum), maximum)


class EntropyController(RLCallback):
    """Raises `entropy_coef` of the algorithm while the entropy is below a target, else lowers it.

    The coefficient of the next iteration is `adaptive_entropy_coef` of this one; the first is the
    algorithm's own `entropy_coef`. The entropy is the metric `policy/entropy`: over the tokens of
    all updates of the iteration, on all ranks. While a critic warms up, so that the policy cannot
    follow, the coefficient stays. A checkpoint holds it.

    Args:
        target: the entropy to hold, in nats per token, above 0.
        step: by how much the coefficient moves in one iteration, above 0.
        minimum: the smallest coefficient. Below 0, it lets the controller press the entropy down.
        maximum: the largest coefficient.
    """

    goes_back: ClassVar[bool] = True

    def __init__(
        self, target: float, step: float, minimum: float = 0.0, maximum: float = 0.1
    ) -> None:
        for name, value in (("target", target), ("step", step)):
            if not value > 0:
                raise ValueError(f"{name} of EntropyController is {value}, must be above 0")
        if not minimum < maximum:
            raise ValueError(
                f"minimum {minimum} of EntropyController must be below maximum {maximum}, for "
                "example 0.0 and 0.1"
            )
        self.target = target
        self.step = step
        self.minimum = minimum
        self.maximum = maximum
        self._coefficient: float | None = None
        self._policy_moves = True
        self._statistics: Statistics

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Refuse an algorithm whose entropy cannot be held.

        Raises:
            ValueError: if rows are left out of the updates, or if the first coefficient is out of
                bounds.
        """
        if stage != "fit":
            return
        if pl_module.skip_zero_advantages:
            raise ValueError(
                "skip_zero_advantages leaves out rows that the entropy bonus of EntropyController "
                "would train: set it to false"
            )
        if not self.minimum <= pl_module.entropy_coef <= self.maximum:
            raise ValueError(
                f"entropy_coef {pl_module.entropy_coef} of the algorithm, from which "
                f"EntropyController starts, is not between its minimum {self.minimum} and its "
                f"maximum {self.maximum}"
            )

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start from the algorithm's own coefficient, or go on from that of a checkpoint."""
        if self._coefficient is not None:
            pl_module.entropy_coef = min(max(self._coefficient, self.minimum), self.maximum)

    def on_rollout(
        self, trainer: Trainer, module: Any, scored: ScoredRollout, experience: Experience
    ) -> None:
        """Begin to measure."""
        self._policy_moves = module.trains_policy
        self._statistics = Statistics(("entropy",), experience.mask.device)

    def on_minibatch(self, trainer: Trainer, module: Any, update: Update) -> None:
        """Take in the tokens of one optimizer step."""
        for experience, output in update.micro_batches:
            self._statistics.update("entropy", output.entropy[experience.mask])

    def on_iteration_end(self, trainer: Trainer, module: Any) -> None:
        """Set the coefficient of the next iteration."""
        if not self._policy_moves:
            return
        self._coefficient = module.entropy_coef = adaptive_entropy_coef(
            module.entropy_coef,
            self._statistics.compute()["entropy"].mean,
            target=self.target,
            step=self.step,
            minimum=self.minimum,
            maximum=self.maximum,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient; None before the first iteration."""
        return {"coefficient": self._coefficient}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the coefficient of a checkpoint."""
        self._coefficient = state_dict["coefficient"]
