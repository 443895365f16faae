"""What the loop asks of the strategy: all that differs between one device and many."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Float
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from torch import Tensor, nn

from lit_rl.models.response_states import ResponseReader
from lit_rl.strategies.clipping import clip_grad_norms, let_rest

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


class Parallelism:
    """Every rank holds all weights, whole: one device, or data parallel ranks (DDP).

    A strategy that keeps weights otherwise is a subclass. A loop has to

    - build its models in `building` by `of_rank_0`, and hand them there to `placed_reference`
      and `place`;
    - sample and score with what `whole` gives, in as many passes as it likes;
    - run each pass with gradient by `run`, in equal numbers on all ranks, and its backward pass
      within `accumulate`;
    - take an optimizer step by `step`.

    Args:
        strategy: the strategy of the Trainer; None: there is no Trainer yet.

    Attributes:
        weights_are_whole: whether the parameters of a model are its weights, which may be read and
            written by whoever has them.
        saves_weights_itself: whether the strategy puts the weights into a checkpoint, a folder, and
            not Lightning.
    """

    weights_are_whole: ClassVar[bool] = True
    saves_weights_itself: ClassVar[bool] = False

    def __init__(self, strategy: Strategy | None = None) -> None:
        self.strategy = strategy

    @property
    def is_parallel(self) -> bool:
        """Whether ranks reduce their gradients."""
        return isinstance(self.strategy, ParallelStrategy)

    def check_checkpoint(self, path: Path) -> None:
        """Refuse a checkpoint that this strategy cannot read.

        Raises:
            ValueError: with the reason.
        """
        if path.is_dir():
            raise ValueError(
                f"the checkpoint {path} is a folder of weights in shards, which one device and ddp "
                "do not read: go on with the --config configs/strategy file of the run that wrote "
                "it, which takes --trainer.devices 1 too if it is fsdp2"
            )

    def check_free(self) -> None:
        """Refuse to hand models over to another strategy that this one has put into shards.

        Raises:
            ValueError: if it has.
        """

    def building(self) -> AbstractContextManager[None]:
        """Return a context in which models are built, whole and on the CPU, and placed."""
        return nullcontext()

    def of_rank_0(self, function: Callable[[], T], shared: nn.Module | None = None) -> T:
        """Return what a function gives that builds a model, or reads all weights of one.

        Where every rank keeps a part of the weights, rank 0 alone calls it. The others receive what
        it returns; the parameters in it have no numbers until the models are placed. Every rank
        has to join.

        Args:
            function: returns a model, or what it read.
            shared: a model of which parameters may be in the result.
        """
        return function()

    def placed_reference(self, reference: M, policy: nn.Module) -> M:
        """Return a frozen model as it is kept between the passes over it.

        Args:
            reference: the frozen model. What it shares with the policy stays shared where it can.
            policy: the policy, not placed yet.
        """
        return reference

    def place(self, learners: Sequence[ResponseReader]) -> None:
        """Put the models that are trained where the strategy keeps them; a second time is free.

        Args:
            learners: the models.
        """

    def whole(self, model: M) -> AbstractContextManager[M]:
        """Return a context that gives a model with all its weights, for passes without gradient.

        Every rank has to enter it; within, passes are the rank's own affair. Nothing that is
        written to the weights stays.

        Args:
            model: one of the models that were placed.
        """
        return nullcontext(model)

    def changing(self, reference: M) -> AbstractContextManager[M]:
        """Return `whole` of the frozen reference, of which changes stay."""
        return self.whole(reference)

    def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Return `function(*arguments)`, a pass of the placed models with gradient.

        Every rank has to run the same number of passes.

        Args:
            function: returns a container of tensors.
            arguments: what it receives.
        """
        return function(*arguments)

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Let gradients add up on each rank, and reduce them over ranks only in the last pass."""
        if last or not isinstance(self.strategy, ParallelStrategy):
            yield
        else:
            with self.strategy.block_backward_sync():
                yield

    def left_out(self, parameters: Iterable[nn.Parameter]) -> Float[Tensor, ""]:
        """Return a 0 to add to a loss that parameters take no part in.

        Data parallel ranks wait for the gradient of every parameter: there, theirs is 0. On one
        device they have none.
        """
        if not self.is_parallel:
            return torch.zeros(())
        return 0.0 * torch.stack([p.sum() for p in parameters if p.requires_grad]).sum()

    def step(
        self,
        optimizer: LightningOptimizer,
        *,
        max_grad_norm: float | None,
        resting: frozenset[str],
        counts: bool,
    ) -> dict[str, float]:
        """Clip the gradient of each parameter group, take an optimizer step and drop the gradient.

        Where the norm of a group is not finite, no step is taken, of any group.

        Args:
            optimizer: counts the step.
            max_grad_norm: limit of the norm of a group's gradient; None for none.
            resting: names of the groups that the step leaves as they are.
            counts: whether there is anything to learn from; else no step is taken, and momentum
                moves nothing.

        Returns:
            The norm of each group before clipping, by its name; the same on all ranks.
        """
        norms = clip_grad_norms(optimizer.optimizer, max_grad_norm)
        let_rest(optimizer.optimizer, resting)
        if counts and all(map(math.isfinite, norms.values())):
            optimizer.step()
        optimizer.optimizer.zero_grad(set_to_none=True)
        return norms
