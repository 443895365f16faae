"""What strategies have in common that keep each weight in parts on all ranks."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn

from lit_rl.models.response_states import ResponseReader
from lit_rl.strategies.parallelism import Parallelism
from lit_rl.strategies.rank_zero import of_rank_0
from lit_rl.strategies.replicas import Replica, Shards

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


class ShardedParallelism(Parallelism):
    """Weights lie in parts on all ranks, and are put together for the passes.

    Passes with gradient run through what the strategy made of the models. All others run on a plain
    copy that is filled once for as many passes as there are, and emptied behind them: its memory is
    that of one whole model at a time, and ranks may sample responses of different lengths.
    """

    weights_are_whole: ClassVar[bool] = False
    saves_weights_itself: ClassVar[bool] = True

    def __init__(self, strategy: ParallelStrategy) -> None:
        super().__init__(strategy)
        self._learners: list[ResponseReader] = []
        self._replicas: dict[int, Replica[Any]] = {}
        self._shards: dict[int, Shards] = {}

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        assert self.strategy is not None
        return self.strategy.root_device

    @abstractmethod
    def whole_weight(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole weight of a parameter of a placed learner; a collective."""

    @abstractmethod
    def shard(self, learners: Sequence[ResponseReader]) -> None:
        """Cut the weights of the models, which are whole on rank 0; others may lack numbers."""

    def check_checkpoint(self, path: Path) -> None:
        """Leave it to the strategy, which loads it."""

    def check_free(self) -> None:
        """Refuse to hand models over to another strategy; see `Parallelism`."""
        if self._learners:
            raise ValueError(
                "the models of this module are in shards, which another trainer cannot take over: "
                "make a new module, and give it a checkpoint or the exported model"
            )

    def of_rank_0(self, function: Callable[[], T], shared: nn.Module | None = None) -> T:
        """Let rank 0 alone hold a whole model; see `Parallelism`."""
        return of_rank_0(function, shared, self.device)

    def placed_reference(self, reference: M, policy: nn.Module) -> M:
        """Return the reference without its weights, of which every rank keeps a part.

        The base beneath an adapter, which it shares with the policy, is taken from there.
        """
        if id(reference) in self._shards:
            return reference
        places = {id(parameter): name for name, parameter in policy.named_parameters()}
        shared = {
            name: places[id(parameter)]
            for name, parameter in reference.named_parameters()
            if id(parameter) in places
        }
        own = {name: p for name, p in reference.named_parameters() if name not in shared}
        shards = Shards(own, self.device)
        of_policy = self._weight_of(policy)

        def weight(name: str) -> Tensor:
            return shards.whole(name) if name in shards else of_policy(shared[name])

        replica = Replica(reference, weight, self.device)
        self._replicas[id(replica.model)] = replica
        self._shards[id(replica.model)] = shards
        return replica.model

    def place(self, learners: Sequence[ResponseReader]) -> None:
        """Cut the weights of the models that are trained.

        Raises:
            ValueError: if other models were placed before.
        """
        if self._learners:
            if [*map(id, self._learners)] != [*map(id, learners)]:
                raise ValueError(
                    "these models were put into shards to answer held-out prompts; make a new "
                    "module to train them"
                )
            return
        for model in learners:
            self._replicas[id(model)] = Replica(model, self._weight_of(model), self.device)
        self.shard(learners)
        self._learners = [*learners]

    def _weight_of(self, model: nn.Module) -> Callable[[str], Tensor]:
        """Return what gives a whole weight of a model by its name; a collective."""
        return lambda name: self.whole_weight(model.get_parameter(name))

    def whole(self, model: M) -> AbstractContextManager[M]:
        """Return a context that gives the plain copy of a model its weights; see `Parallelism`."""
        replica: Replica[Any] = self._replicas[id(model)]
        if isinstance(model, ResponseReader):
            replica.model.layout = model.layout
        return replica.filled()

    def changing(self, reference: M) -> AbstractContextManager[M]:
        """Return a context that gives the reference its weights, and keeps what they become."""
        return self._changing(reference)

    @contextmanager
    def _changing(self, reference: M) -> Iterator[M]:
        with self.whole(reference) as model:
            yield model
            self._shards[id(reference)].replace(dict(model.named_parameters()))

    def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Run a pass through what the strategy made of the models; see `Parallelism`."""

        def tensors() -> tuple[type, dict[str, Any]]:
            output = function(*arguments)
            return type(output), vars(output).copy()

        kind, values = self.root(tensors)
        output: T = kind(**values)
        return output

    @property
    @abstractmethod
    def root(self) -> Callable[..., Any]:
        """What calls a function as a pass of all the models; its tensors may stand in a tuple."""

    def left_out(self, parameters: Any) -> Tensor:
        """Return 0: no rank waits for the gradient of a parameter."""
        return torch.zeros((), device=self.device)
