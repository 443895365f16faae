"""DeepSpeed's ZeRO: optimizer state, gradients and weights in parts, by stage."""

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from logging import ERROR
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_rl.checkpoints import VerifiedCheckpointIO
from lit_rl.functional import sum_over_ranks
from lit_rl.models import Policy
from lit_rl.models.response_states import ResponseReader
from lit_rl.strategies.clipping import ROUNDING, let_rest
from lit_rl.strategies.rank_zero import exchanged, forget_unplaced
from lit_rl.strategies.replicas import joined
from lit_rl.strategies.sealed_folder import replacing_folder, verify_together
from lit_rl.strategies.sharded import ShardedParallelism

T = TypeVar("T")

EVERYTHING = 10**12
"""Weights that form one piece of an optimizer step: all of a parameter group."""

LIVE_WEIGHTS = 10**9
"""Weights that stage 3 keeps whole from the pass forward to the pass backward, at most."""


class DeepSpeed(DeepSpeedStrategy):
    """Lightning's strategy for DeepSpeed, with the settings that the loop needs.

    Args:
        stage: what is kept in parts: the state of the optimizer (1), also gradients (2), also
            weights (3).
        offload: whether the parts of stage 3 are kept in the memory of the CPU, on which the
            optimizer then runs.
        persistence_threshold: weights of at most so many entries stay whole in stage 3.
        process_group_backend: gloo or nccl; None: as the device asks for.
        timeout: how long a rank waits for the others.

    Raises:
        ModuleNotFoundError: if deepspeed is not installed.
        ValueError: for an offload without stage 3.
    """

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        offload: bool = False,
        persistence_threshold: int = 100_000,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise ModuleNotFoundError(
                "this strategy needs the package deepspeed, which installs without compiling: "
                "DS_BUILD_OPS=0 pip install --no-build-isolation 'lit-rl[deepspeed]'"
            )
        if offload and stage != 3:
            raise ValueError(f"offload of DeepSpeed is for stage 3, not for stage {stage}")
        super().__init__(
            config=engine_config(stage, offload, persistence_threshold),
            logging_level=ERROR,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.stage = stage

    def setup_environment(self) -> None:
        """Refuse a machine on which DeepSpeed does not train.

        Raises:
            ValueError: if the accelerator is no CUDA GPU.
        """
        if not isinstance(self.accelerator, CUDAAccelerator):
            raise ValueError(
                "strategy DeepSpeed needs a CUDA GPU, and this run has none: use --config "
                "configs/strategy/fsdp2.yaml, or ddp.yaml"
            )
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Hand batches over as they are, and remove checkpoints as they are written."""
        if self._checkpoint_io is None:
            self.checkpoint_io = VerifiedCheckpointIO()
        precision: Any = self.precision_plugin.precision
        self.precision_plugin = BatchesAsTheyAre(precision)
        super().setup(trainer)

    def training_step(self, *arguments: Any) -> Any:
        """Run the loop outside of the engine, which the passes of the loop call by themselves.

        In a pass within a pass stage 3 would not learn the order of the weights: it would put each
        together when it is needed and again for the pass backward, the small ones, too.
        """
        assert self.lightning_module is not None
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*arguments)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint that is whole or not there, with hashes."""
        with replacing_folder(Path(self.broadcast(filepath)), self) as part:
            super().save_checkpoint(checkpoint, part, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load a checkpoint, once its hashes are those of its files, and if the engine can read it.

        Raises:
            ValueError: on every rank, if it is not whole; see also `check_engine_checkpoint`.
        """
        assert self.lightning_module is not None
        verify_together(Path(self.broadcast(checkpoint_path)), self)
        check_engine_checkpoint(
            Path(checkpoint_path),
            self.stage,
            self.world_size,
            trains=self.lightning_module.trainer.state.fn == TrainerFn.FITTING,
        )
        return super().load_checkpoint(checkpoint_path, weights_only)

    def teardown(self) -> None:
        """Clean up, also behind an error."""
        forget_unplaced(self.lightning_module)
        super().teardown()


def check_engine_checkpoint(path: Path, stage: int, world_size: int, *, trains: bool) -> None:
    """Refuse a checkpoint that DeepSpeed does not read.

    Args:
        path: the checkpoint.
        stage: of the run that reads it.
        world_size: its number of ranks.
        trains: whether it trains, not only answers held-out prompts.

    Raises:
        ValueError: with the reason.
    """
    written = len([*path.glob("checkpoint/*zero_pp_rank_*_optim_states.pt")])
    if not written:
        raise ValueError(
            f"the checkpoint {path} is none of DeepSpeed: go on with the --config "
            "configs/strategy file of the run that wrote it"
        )
    if stage == 3 and not trains:
        raise ValueError(
            "DeepSpeed stage 3 reads a checkpoint only to train on from it: answer held-out "
            "prompts with the exported model (--config configs/model/hugging_face.yaml "
            "--model.source.name .../export)"
        )
    if written != world_size:
        raise ValueError(
            f"the checkpoint {path} was written by {written} ranks, and DeepSpeed reads it on "
            f"as many only, not on {world_size}: use --trainer.devices {written}"
        )


class BatchesAsTheyAre(DeepSpeedPrecision):
    """The precision of DeepSpeed, whose conversion of batches cannot handle a frozen container."""

    def convert_input(self, data: Any) -> Any:
        """Return a batch as it is: it holds token ids, texts and numbers of the task."""
        return data


def engine_config(stage: int, offload: bool, persistence_threshold: int) -> dict[str, Any]:
    """Return DeepSpeed's settings: the loop says when a step is taken, and clips by itself."""
    zero: dict[str, Any] = {"stage": stage, "sub_group_size": EVERYTHING}
    if stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": persistence_threshold,
            "stage3_max_live_parameters": LIVE_WEIGHTS,
            "stage3_max_reuse_distance": LIVE_WEIGHTS,
        }
    if offload:
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    return {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # which would have to be compiled
        "managed_gradient_accumulation": False,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
    }


class ZeRO(ShardedParallelism):
    """DeepSpeed, stage 1 to 3, as one engine around all models.

    Each pass with gradient is a pass of the engine. The gradient is clipped when the engine hands
    it to the optimizer, in parts: there is no earlier moment at which it is reduced in all stages.
    """

    strategy: DeepSpeed

    @property
    def cuts_weights(self) -> bool:
        """Whether weights are kept in parts, not only gradients and the optimizer's state."""
        return self.strategy.stage == 3

    @property
    def dtype(self) -> torch.dtype | None:
        """Number format of weights in the passes; None: as they are."""
        mixed = self.strategy.precision_plugin.precision == "bf16-mixed"
        return torch.bfloat16 if mixed else None

    def of_rank_0(self, function: Callable[[], T], shared: nn.Module | None = None) -> T:
        """Let rank 0 alone hold a whole model, if weights are kept in parts."""
        return super().of_rank_0(function, shared) if self.cuts_weights else function()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Let rank 0 build models whole, not in parts from the first weight on."""
        if not self.cuts_weights:
            yield
            return
        from deepspeed.runtime.zero import partition_parameters as partition

        partition.shutdown_init_context()
        try:
            yield
        finally:
            partition.restore_init_context()

    def placed_reference(self, reference: Any, policy: nn.Module) -> Any:
        """Return the reference, in parts and in bfloat16 if the weights of the policy are."""
        for parameter in reference.parameters():
            parameter.data = parameter.data.to(self.dtype or parameter.dtype)
        return super().placed_reference(reference, policy) if self.cuts_weights else reference

    def shard(self, learners: Sequence[ResponseReader]) -> None:
        """Cut weights as the engine does, which is made later; the head has to run in step."""
        for model in learners:
            if isinstance(model, Policy):
                model.scores_in_step = self.cuts_weights
        self._buffers = [
            (module, name, buffer)
            for model in learners
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        if self.cuts_weights:
            from deepspeed.runtime.zero import Init

            weights = OneByOne(learners, self.dtype, self.device)
            Init(module=weights, config_dict_or_path=self.strategy.config)
        self._parameters = {id(model): dict(model.named_parameters()) for model in learners}

    def _restore_buffers(self) -> None:
        """Give what is no weight, such as the frequencies of positions, its own precision back.

        The engine makes bfloat16 of all numbers of a module.
        """
        for module, name, buffer in self._buffers:
            setattr(module, name, buffer.to(self.device))
        self._buffers = []

    def whole(self, model: Any) -> AbstractContextManager[Any]:
        """Return the model itself where its weights are whole; see `Parallelism`."""
        self._restore_buffers()
        return super().whole(model) if self.cuts_weights else nullcontext(model)

    def changing(self, reference: Any) -> AbstractContextManager[Any]:
        """Return the reference itself where its weights are whole; see `Parallelism`."""
        return super().changing(reference) if self.cuts_weights else nullcontext(reference)

    def whole_weight(self, parameter: Any) -> Tensor:
        """Return the whole weight of a parameter; a collective."""
        part = parameter.ds_tensor.detach().to(self.device)
        return joined(part.flatten(), parameter.ds_shape)

    def _weight_of(self, model: nn.Module) -> Callable[[str], Tensor]:
        """Return what gives a whole weight of a model by its name; a collective.

        It is not looked up in its module: the engine would take it for a weight that the pass under
        way needs, and keep it whole.
        """
        return lambda name: self.whole_weight(self._parameters[id(model)][name])

    @property
    def root(self) -> Callable[..., Any]:
        """The engine."""
        self._restore_buffers()
        engine: Callable[..., Any] = self.strategy.deepspeed_engine
        return engine

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Leave it to the engine, which adds up until a step is taken."""
        yield

    def step(
        self,
        optimizer: LightningOptimizer,
        *,
        max_grad_norm: float | None,
        resting: frozenset[str],
        counts: bool,
    ) -> dict[str, float]:
        """Clip the gradient of each group and take a step, or drop it; see `Parallelism`."""
        engine = self.strategy.deepspeed_engine
        inner: Optimizer = engine.optimizer.optimizer
        names = [group["name"] for group in inner.param_groups]
        clipping = Clipping(max_grad_norm, resting if counts else frozenset(names), self.device)
        handle = inner.register_step_pre_hook(clipping)
        try:
            # A step in which all groups rest moves nothing, and drops what the engine has added up.
            optimizer.step() if counts else engine.step()
        finally:
            handle.remove()
        if not engine.was_step_applied():  # it found a number that is not finite
            return dict.fromkeys(names, math.nan)
        return {name: clipping.norms.get(name, 0.0) for name in names}


class OneByOne(nn.Module):
    """Models whose weights are taken one at a time, to be cut before the next has memory.

    Args:
        models: the models; on other ranks than 0 they may lack numbers.
        dtype: number format that the engine trains in; None: as they are.
        device: where weights without numbers have room for those of rank 0.
    """

    def __init__(
        self, models: Sequence[nn.Module], dtype: torch.dtype | None, device: torch.device
    ) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.dtype = dtype
        self.device = device

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield each parameter when it is its turn."""
        for _, parameter in exchanged(self.models, self._with_memory):
            yield parameter

    def _with_memory(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta:
            room = torch.empty_like(parameter, dtype=self.dtype, device=self.device)
            return nn.Parameter(room, requires_grad=parameter.requires_grad)
        parameter.data = parameter.data.to(self.dtype or parameter.dtype)
        return parameter


class Clipping:
    """Clips gradients when an optimizer is about to take a step, part of a group by rank.

    Args:
        max_grad_norm: limit of the norm of a group's gradient; None for none.
        resting: names of the groups that the step leaves as they are.
        device: on which ranks add up.

    Attributes:
        norms: the norm of each group before clipping, by its name.
    """

    def __init__(
        self, max_grad_norm: float | None, resting: frozenset[str], device: torch.device
    ) -> None:
        self.max_grad_norm = max_grad_norm
        self.resting = resting
        self.device = device
        self.norms: dict[str, float] = {}

    def __call__(self, optimizer: Optimizer, *arguments: Any) -> None:
        """Clip the groups that the optimizer has at the moment."""
        for group in optimizer.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            if not gradients:  # it is another group's turn
                continue
            squares = torch.stack([gradient.float().pow(2).sum() for gradient in gradients])
            total = sum_over_ranks(squares.sum().to(self.device))
            norm = self.norms[group["name"]] = float(total.sqrt())
            if self.max_grad_norm is not None and norm > self.max_grad_norm:
                for gradient in gradients:
                    gradient.mul_(self.max_grad_norm / (norm + ROUNDING))
        let_rest(optimizer, self.resting)
