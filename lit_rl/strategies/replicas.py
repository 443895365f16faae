"""Models whose weights are there only while they are used, and weights cut among ranks."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor, distributed, nn

from lit_rl.strategies.rank_zero import handed_out

M = TypeVar("M", bound=nn.Module)


def without_weights(model: M) -> M:
    """Return a copy of a model whose parameters, shared ones included, are empty.

    It costs the memory of its buffers. Nothing trains it.
    """
    empty = {
        id(parameter): nn.Parameter(torch.empty(0, dtype=parameter.dtype), requires_grad=False)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, empty).eval()


class Replica(Generic[M]):
    """A plain copy of a model that is kept in shards: no hooks, and weights only while it is used.

    Args:
        model: the model, whole.
        weight: from the name of a parameter to its whole weight; a collective.
        device: where the passes run.

    Attributes:
        model: the copy.
    """

    def __init__(self, model: M, weight: Callable[[str], Tensor], device: torch.device) -> None:
        self.model = without_weights(model).to(device)
        self._weight = weight
        self._uses = 0

    @contextmanager
    def filled(self) -> Iterator[M]:
        """Give the copy its weights meanwhile. Every rank has to enter and leave it."""
        if self._uses == 0:
            with torch.inference_mode(False), torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.data = self._weight(name)
        self._uses += 1
        try:
            yield self.model
        finally:
            self._uses -= 1
            if self._uses == 0:
                for parameter in self.model.parameters():
                    parameter.data = parameter.data.new_empty(0)


class Shards:
    """Frozen weights of which every rank keeps an equal part.

    Args:
        weights: the weights by name; those of rank 0 count, and of others only the shapes.
        device: where the parts are kept.
    """

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        self._device = device
        self._parts: dict[str, Tensor] = {}
        self._keep(zip(weights, handed_out([*weights.values()], device), strict=True))

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def replace(self, weights: Mapping[str, Tensor]) -> None:
        """Take other weights of the same names and shapes, which every rank has."""
        self._keep((name, weights[name]) for name in self._shapes)

    def _keep(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
        for name, whole in weights:
            part = -(-whole.numel() // world_size)
            flat = whole.detach().flatten()[rank * part : (rank + 1) * part]
            padded = flat.new_zeros(part, device=self._device)
            padded[: len(flat)] = flat
            self._parts[name] = padded

    def whole(self, name: str) -> Tensor:
        """Return a weight; a collective that every rank has to join."""
        return joined(self._parts[name], self._shapes[name])


def joined(part: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor of which every rank has an equal part of the entries; a collective.

    Args:
        part: the entries of this rank, those of rank 0 first; behind the last one there may be
            others.
        shape: of the whole.
    """
    whole = part.new_empty(distributed.get_world_size() * part.numel())
    distributed.all_gather([*whole.chunk(distributed.get_world_size())], part)
    return whole[: shape.numel()].view(shape)
