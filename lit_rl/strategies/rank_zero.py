"""Models that rank 0 alone builds: others receive them without numbers, then weight by weight."""

import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from transformers.dynamic_module_utils import init_hf_modules

T = TypeVar("T")


def of_rank_0(function: Callable[[], T], shared: nn.Module | None, device: torch.device) -> T:
    """Return on all ranks what rank 0 computes; a collective.

    The others do not call the function. Parameters in its result come to them in their shapes, on
    the device that has no memory; buffers come with their numbers.

    Args:
        function: what rank 0 calls.
        shared: a module on all ranks, of which parameters in the result are to stay the same.
        device: through which ranks speak.

    Raises:
        ValueError: on the others, with what rank 0 raises.
    """
    if distributed.get_rank() == 0:
        try:
            result = function()
            message = (written(result, shared), None)
        except Exception as error:
            distributed.broadcast_object_list([(None, str(error))], device=device)
            raise
        distributed.broadcast_object_list([message], device=device)
        return result
    received: list[Any] = [None]
    distributed.broadcast_object_list(received, device=device)
    [(content, problem)] = received
    if content is None:
        raise ValueError(problem)
    copy: T = read(content, shared)
    return copy


def handed_out(weights: list[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yield weights whole, one at a time, as rank 0 has them; a collective.

    Args:
        weights: in the same order on all ranks, the others of which need only their shapes. Emptied
            on the way: what nobody else holds is freed.
        device: where they are wanted.
    """
    while weights:
        weight = weights.pop(0).detach()
        if distributed.get_rank() == 0:
            whole = weight.to(device).contiguous()
        else:
            whole = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        distributed.broadcast(whole, src=0)
        yield whole


def without_numbers(
    shape: torch.Size, dtype: torch.dtype, requires_grad: bool = False
) -> nn.Parameter:
    """Return a parameter on the device that has no memory."""
    empty = torch.empty(shape, dtype=dtype, device="meta")
    return nn.Parameter(empty, requires_grad=requires_grad)


def exchanged(
    module: nn.Module, exchange: Callable[[nn.Parameter], nn.Parameter]
) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yield each parameter with the one that takes its place; what was shared stays shared.

    Args:
        module: its parameters are exchanged one by one, in their order.
        exchange: returns a new parameter, or the same.
    """
    known: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, old in [*part.named_parameters(recurse=False, remove_duplicate=False)]:
            is_first = old not in known
            new = known.setdefault(old, exchange(old)) if is_first else known[old]
            part.register_parameter(name, new)
            if is_first:
                yield old, new


def forget_unplaced(module: nn.Module | None) -> None:
    """Remove models that an error left without numbers: whoever moves them hides that error."""
    for name, child in [*module.named_children()] if module is not None else []:
        if any(parameter.is_meta for parameter in child.parameters()):
            delattr(module, name)


def written(value: object, shared: nn.Module | None = None) -> bytes:
    """Return what `read` reads: a value with everything but the numbers of parameters.

    Args:
        value: a module, or anything else that can be pickled.
        shared: a module whose parameters are written by their names.
    """
    content = io.BytesIO()
    _Writer(content, shared).dump(value)
    return content.getvalue()


def read(content: bytes, shared: nn.Module | None = None) -> Any:
    """Return what was written; parameters are on the device that has no memory.

    Args:
        content: what `written` returned.
        shared: a module whose parameters are put where those of the writer's were.
    """
    init_hf_modules()  # lets Python find code that came with a model
    return _Reader(io.BytesIO(content), shared).load()


class _Writer(pickle.Pickler):
    """Writes parameters without their numbers, and shared ones by their names."""

    def __init__(self, file: io.BytesIO, shared: nn.Module | None) -> None:
        super().__init__(file)
        named = shared.named_parameters() if shared is not None else ()
        self._names = {id(parameter): name for name, parameter in named}

    def persistent_id(self, obj: Any) -> str | None:
        return self._names.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Parameter):
            return without_numbers, (obj.shape, obj.dtype, obj.requires_grad)
        return NotImplemented


class _Reader(pickle.Unpickler):
    """Reads what `_Writer` wrote."""

    def __init__(self, file: io.BytesIO, shared: nn.Module | None) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: Any) -> nn.Parameter:
        assert self._shared is not None
        return self._shared.get_parameter(pid)
