"""Fully sharded data parallel, the second: weights, gradients and optimizer state in parts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lit_rl.checkpoints import VerifiedCheckpointIO
from lit_rl.models.response_states import ResponseReader
from lit_rl.strategies.rank_zero import exchanged, forget_unplaced, handed_out, without_numbers
from lit_rl.strategies.sealed_folder import replacing_folder, verify_together
from lit_rl.strategies.sharded import ShardedParallelism


class FSDP2(ModelParallelStrategy):
    """Lightning's strategy for `fully_shard`, with all devices data parallel.

    Args:
        save_distributed_checkpoint: write each rank's part of a checkpoint into a folder, or put
            the parts together into one file.
        process_group_backend: gloo or nccl; None: as the device asks for.
        timeout: how long a rank waits for the others.
    """

    def __init__(
        self,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def setup_environment(self) -> None:
        """Let all devices be data parallel, and files have a hash."""
        if self._checkpoint_io is None:
            self.checkpoint_io = VerifiedCheckpointIO()
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint that is whole or not there, with hashes."""
        path = Path(self.broadcast(filepath))
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with replacing_folder(path, self) as part:
            super().save_checkpoint(checkpoint, part, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load a checkpoint, once its hashes are those of its files.

        Raises:
            ValueError: on every rank, if it is not whole.
        """
        verify_together(Path(self.broadcast(checkpoint_path)), self)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def teardown(self) -> None:
        """Clean up, also behind an error."""
        forget_unplaced(self.lightning_module)
        super().teardown()


class Pass(nn.Module):
    """Calls a function as a forward pass of all the models that it holds."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, function: Callable[[], Any]) -> Any:
        """Return what the function returns."""
        return function()


class FullySharded(ShardedParallelism):
    """FSDP2: each layer of the models is put together for its part of a pass with gradient.

    What is no layer (embeddings, norms, heads) stays together from the forward pass to the backward
    pass. Gradients of micro-batches add up on each rank, whole, until the last is reduced.
    """

    strategy: FSDP2

    def whole_weight(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole weight of a parameter; a collective."""
        weight = parameter.detach()
        return weight.full_tensor() if isinstance(weight, DTensor) else weight

    def shard(self, learners: Sequence[ResponseReader]) -> None:
        """Cut each layer, and all that is no layer as one."""
        mesh = self.strategy.device_mesh["data_parallel"]
        weights = _taken_weights(learners)
        self._root = Pass(learners)
        for layer in _layers(learners):
            fully_shard(layer, mesh=mesh)
        fully_shard(self._root, mesh=mesh)
        self._root._apply(self._with_memory)
        wholes = handed_out(weights, self.device)
        for parameter, whole in zip(self._root.parameters(), wholes, strict=True):
            assert isinstance(parameter, DTensor)
            part = distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None)
            parameter.detach().copy_(part)

    def _with_memory(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=self.device)
        return tensor.to(self.device)

    @property
    def root(self) -> Callable[..., Any]:
        """The module that holds all models."""
        return self._root

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Let gradients add up on each rank, and reduce them over ranks only in the last pass."""
        assert isinstance(self._root, FSDPModule)
        self._root.set_requires_gradient_sync(last)
        yield


def _layers(learners: Sequence[ResponseReader]) -> list[nn.Module]:
    """Return the modules that transformers says stay on one device: the layers."""
    layers = []
    for model in learners:
        if getattr(model, "backbone", model) is not None:  # else it reads the policy's states
            names = set(model.base_model._no_split_modules or [])
            layers += [module for module in model.modules() if type(module).__name__ in names]
    return layers


def _taken_weights(learners: Sequence[nn.Module]) -> list[Tensor]:
    """Return the weights of models, in the order of their parameters, which are left without them.

    What a model shares with another, the base beneath adapters, becomes its own: its parts are then
    kept once per model.
    """

    def empty(parameter: nn.Parameter) -> nn.Parameter:
        return without_numbers(parameter.shape, parameter.dtype, parameter.requires_grad)

    return [old.detach() for model in learners for old, _ in exchanged(model, empty)]
