"""A reference that follows the policy."""

from typing import Any, ClassVar

import torch
from lightning.pytorch import Trainer

from lit_rl.algorithms.hooks import RLCallback, callbacks_of
from lit_rl.models.adapters import base_names, base_parameters, switch_adapter, without_base

STATE = "lit_rl_reference"
"""Key of a checkpoint under which the weights of the reference stand."""


class ReferenceSync(RLCallback):
    """Moves the frozen reference towards the policy after every n iterations.

    reference = weight * policy + (1 - weight) * reference, for every parameter. With weight 1 the
    reference becomes the policy as it is then; with less it is a moving average of it. Between
    these moments it stays frozen, and it shares no tensor with the policy but the base beneath an
    adapter. With an adapter it is the adapter's matrices that are averaged, not their products.

    A checkpoint holds the weights of the reference; without this callback it does not, since the
    reference is what the policy was at the start. A run that goes on from a moved reference without
    this callback is refused.

    Args:
        every_n_iterations: iterations from one move to the next.
        weight: share of the way to the policy, in (0, 1].
    """

    needs_reference: ClassVar[bool] = True
    moves_reference: ClassVar[bool] = True
    goes_back: ClassVar[bool] = True

    def __init__(self, every_n_iterations: int, weight: float = 1.0) -> None:
        if every_n_iterations < 1:
            raise ValueError(
                f"every_n_iterations of ReferenceSync is {every_n_iterations}, must be at least 1"
            )
        if not 0 < weight <= 1:
            raise ValueError(
                f"weight of ReferenceSync is {weight}, must be in (0, 1]: 1 makes the reference "
                "the policy, 0.1 takes a tenth of the way"
            )
        self.every_n_iterations = every_n_iterations
        self.weight = weight

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Refuse to move a reference that nothing reads.

        Raises:
            ValueError: if `kl_coef` is 0 and no other callback needs the reference.
        """
        used = pl_module.kl_coef > 0 or any(
            callback.needs_reference and not isinstance(callback, ReferenceSync)
            for callback in callbacks_of(trainer, RLCallback)
        )
        if stage == "fit" and not used:
            raise ValueError(
                "ReferenceSync moves a reference that nothing reads: kl_coef is 0 and there is no "
                "KL controller. Set kl_coef above 0, for example 0.04, or leave ReferenceSync out"
            )

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Let the reference read its adapter, even one that still adds nothing."""
        switch_adapter(pl_module.reference, on=True)

    @torch.no_grad()
    def on_iteration_end(self, trainer: Trainer, module: Any) -> None:
        """Move the reference, if it is time."""
        if module.iteration % self.every_n_iterations:
            return
        whole, changing = module.parallelism.whole, module.parallelism.changing
        with whole(module.policy) as policy, changing(module.reference) as reference:
            for moved, parameter in zip(reference.parameters(), policy.parameters(), strict=True):
                if moved is not parameter:
                    moved.lerp_(parameter, self.weight)
        module.reference_moved = True

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Store the weights of the reference, but not the base beneath an adapter."""
        with pl_module.parallelism.whole(pl_module.reference) as reference:
            base = base_names(reference, base_parameters(reference))
            checkpoint[STATE] = without_base(reference.state_dict(), base)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Give the reference its weights back; one that has never moved is what it was."""
        if STATE not in checkpoint or pl_module.reference is None:
            return
        with pl_module.parallelism.changing(pl_module.reference) as reference:
            base = base_names(reference, base_parameters(reference))
            reference.load_state_dict({**base, **checkpoint[STATE]})
