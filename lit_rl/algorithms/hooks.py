"""The moments of an iteration at which a callback may look at it."""

from typing import Any, ClassVar, Literal, TypeVar

from lightning.pytorch import Callback, Trainer

from lit_rl.types import Experience, ScoredRollout, Update

Hook = Literal["on_scored", "on_rollout", "on_minibatch", "on_iteration_end"]
CallbackT = TypeVar("CallbackT", bound=Callback)


class RLCallback(Callback):
    """A Lightning callback that also sees the parts of an iteration.

    The hooks run inside `training_step`, on every rank, in this order::

        on_scored                        once per round of sampling: one, or more in `DAPO`
        on_rollout                       once per iteration
        on_minibatch                     once per optimizer step
        on_iteration_end                 once per iteration

    `module` is the algorithm, a `lit_rl.algorithms.PolicyGradient`. A hook may change what the
    algorithm does next by assigning to an attribute of it, for example `module.kl_coef`. Values are
    logged with `module.log_dict`, in `on_iteration_end`: Lightning keeps the last value of a key in
    one training step, and every rank has to log the same keys in the same order.

    `needs_reference` says that the frozen reference is needed even where `kl_coef` is 0, and
    `moves_reference` that the callback changes it: such a callback sets `module.reference_moved`
    when it does, and stores and restores the weights of the reference with a checkpoint.
    `goes_back` says that what the callback stores with a checkpoint is part of what is learnt, such
    as a weight that it steers: it then goes back with the weights where a run rolls back.

    `module.iteration` counts finished iterations: before `on_iteration_end` it does not
    count the one under way, at `on_iteration_end` it does, so there it is the number of this
    iteration, from 1.

    Example:
        A user's file, named by `class_path` in a config::

            class StopAtEntropy(RLCallback):
                def on_minibatch(self, trainer, module, update):
                    # None on a rank that had no row, or where a critic alone is trained.
                    batches = update.micro_batches
                    low = any(out.entropy[exp.mask].mean() < 0.01 for exp, out in batches)
                    # All ranks have to stop together.
                    stop = trainer.strategy.reduce_boolean_decision(low, all=False)
                    trainer.should_stop = trainer.should_stop or stop
    """

    needs_reference: ClassVar[bool] = False
    moves_reference: ClassVar[bool] = False
    goes_back: ClassVar[bool] = False

    def on_scored(self, trainer: Trainer, module: Any, scored: ScoredRollout) -> None:
        """Called when responses of this rank are sampled and scored, used for training or not.

        Args:
            trainer: the trainer.
            module: the algorithm.
            scored: the responses with their rewards, as the reward gave them.
        """

    def on_rollout(
        self, trainer: Trainer, module: Any, scored: ScoredRollout, experience: Experience
    ) -> None:
        """Called when the rollout of this rank is scored and its advantages are known.

        Args:
            trainer: the trainer.
            module: the algorithm.
            scored: the responses that are trained on, with their rewards as the reward gave them.
            experience: what the updates of this iteration read.
        """

    def on_minibatch(self, trainer: Trainer, module: Any, update: Update) -> None:
        """Called after each optimizer step.

        Args:
            trainer: the trainer.
            module: the algorithm.
            update: the rows of the minibatch on this rank and the policy's output on them, from
                before the step.
        """

    def on_iteration_end(self, trainer: Trainer, module: Any) -> None:
        """Called after the last optimizer step of an iteration.

        Args:
            trainer: the trainer.
            module: the algorithm.
        """


def callbacks_of(trainer: Trainer, kind: type[CallbackT]) -> list[CallbackT]:
    """Return the callbacks of a trainer that are of one kind, in their order.

    Args:
        trainer: the trainer.
        kind: their class, or one above it.
    """
    untyped: Any = trainer  # Lightning says nothing of this attribute
    return [callback for callback in untyped.callbacks if isinstance(callback, kind)]


def call_hooks(trainer: Trainer, hook: Hook, module: Any, *arguments: Any) -> None:
    """Call one hook of every `RLCallback` of the trainer, in the order of its callbacks.

    Args:
        trainer: the trainer whose callbacks are called.
        hook: name of the method.
        module: the algorithm.
        arguments: what the hook receives after `trainer` and `module`.
    """
    for callback in callbacks_of(trainer, RLCallback):
        getattr(callback, hook)(trainer, module, *arguments)
