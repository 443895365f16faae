"""What a run needs of the memory of each device, by strategy: an estimate before anything is run.

python -m lit_rl.memory --config configs/algorithm/grpo.yaml --devices 1,8
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM

import lit_rl
from lit_rl.algorithms import ActorCritic, PolicyGradient
from lit_rl.callbacks.terminal import console
from lit_rl.cli import RLCLI
from lit_rl.data import PromptDataModule
from lit_rl.models.adapters import base_parameters
from lit_rl.models.attention import Kernel
from lit_rl.models.base import DTYPES
from lit_rl.models.policy import LOGITS_AT_ONCE
from lit_rl.models.response_states import flat_states

LOGITS_IN_UPDATE = 3
"""Tensors of the size of a chunk's logits at a time: log-probs, their exponential and one more."""

LOGITS_IN_SAMPLING = 5
"""Tensors of the size of the logits of all running rows when a token is drawn."""

PROBE = 4096
"""Entries of the parameter of which the state of the optimizer is measured."""


@dataclass(frozen=True)
class Strategy:
    """Which part of what a strategy keeps on each of n devices: 1 / n, or all.

    Attributes:
        name: of the file in configs/strategy.
        cuts_state: whether the state of the optimizer is cut.
        cuts_gradients: whether gradients are.
        cuts_weights: whether weights are, those of the reference included.
        second_gradients: whether gradients of micro-batches lie whole beside those that are
            reduced: in the buckets of DDP, and in what FSDP2 adds up.
        second_weights: whether the optimizer has a copy of the weights, in parts.
    """

    name: str
    cuts_state: bool = False
    cuts_gradients: bool = False
    cuts_weights: bool = False
    second_gradients: bool = False
    second_weights: bool = False


ALONE = Strategy("auto")
STRATEGIES = (
    Strategy("ddp", second_gradients=True),
    Strategy("deepspeed_1", cuts_state=True, second_weights=True),
    Strategy("deepspeed_2", cuts_state=True, cuts_gradients=True, second_weights=True),
    Strategy("deepspeed_3", True, True, True, second_weights=True),
    Strategy("fsdp2", True, True, True, second_gradients=True),
)


@dataclass(frozen=True)
class ModelSize:
    """Bytes of one model.

    Attributes:
        weights: all weights.
        trained: those that are trained; as much for gradients.
        state: the optimizer's state.
        layer: the largest layer.
        rest: what is no layer: embeddings, norms and heads.
        largest: the largest weight.
        activations: what one pass with gradient keeps for its backward pass.
    """

    weights: int
    trained: int
    state: int
    layer: int
    rest: int
    largest: int
    activations: int


@dataclass(frozen=True)
class Footprint:
    """What a run holds, in bytes, before it is cut among devices.

    Attributes:
        policy: the policy.
        critic: the critic, if there is one with a backbone.
        reference: weights of the frozen reference that it does not share with the policy.
        logits: of a chunk of tokens, once.
        cache: keys and values of all responses of a device.
        sampling: logits of all rows of a device, once.
    """

    policy: ModelSize
    critic: ModelSize | None
    reference: int
    logits: int
    cache: int
    sampling: int

    def parts(self, strategy: Strategy, devices: int) -> dict[str, float]:
        """Return the bytes of each part on one device, by name."""
        state = devices if strategy.cuts_state else 1
        gradients = devices if strategy.cuts_gradients else 1
        weights = devices if strategy.cuts_weights else 1
        models = [self.policy, *([self.critic] if self.critic else [])]
        trained = sum(model.trained for model in models)
        kept_twice = trained if strategy.second_gradients and devices > 1 else 0
        parts: dict[str, float] = {
            "weights": self.policy.weights / weights,
            "critic": self.critic.weights / weights if self.critic else 0,
            "reference": self.reference / weights,
            "gradients": trained / gradients + kept_twice,
            "optimizer": sum(model.state for model in models) / state
            + (trained / state if strategy.second_weights else 0),
            "activations": sum(model.activations for model in models),
            "logits": LOGITS_IN_UPDATE * self.logits,
            "cache": self.cache + LOGITS_IN_SAMPLING * self.sampling,
        }
        if strategy.cuts_weights and devices > 1:
            parts["together"] = sum(model.rest + 2 * model.layer for model in models)
        else:
            parts["together"] = 0
        return parts

    def stages(self, strategy: Strategy, devices: int) -> dict[str, float]:
        """Return the bytes on one device at the peak of each stage of an iteration, by name."""
        parts = self.parts(strategy, devices)
        kept = sum(parts[name] for name in ("weights", "critic", "reference", "optimizer"))
        models = [self.policy, *([self.critic] if self.critic else [])]
        cut = strategy.cuts_weights and devices > 1
        largest = max(model.weights for model in models)
        return {
            "generate": kept + parts["cache"] + cut * self.policy.weights,
            "score": kept + cut * largest + parts["logits"],
            "update": kept + sum(parts[n] for n in ("gradients", "activations", "logits"))
            + parts["together"],
            "step": kept + parts["gradients"] + 2 * max(model.largest for model in models),
        }  # fmt: skip


def footprint(module: PolicyGradient, data: PromptDataModule, devices: int = 1) -> Footprint:
    """Return what a run holds, from its settings: nothing is loaded, trained or allocated.

    Responses and prompts are taken as long as they may be.

    Args:
        module: the algorithm.
        data: the prompts.
        devices: over how many the rollouts are spread.
    """
    new, prompt = module.sampling.max_new_tokens, data.max_prompt_tokens
    prompts = ceil(data.batch_size / devices)
    rows = prompts * module.group_size
    trained_rows = ceil(rows / module.num_minibatches)
    pass_tokens = min(
        module.micro_batch_tokens,
        trained_rows * new + min(prompts, trained_rows) * prompt
        if module.packing
        else trained_rows * (prompt + new),
    )
    with FakeTensorMode():
        policy = _without_numbers(module)
        size = _size(module, policy, pass_tokens, policy.base_model)
        config = policy.config.get_text_config(decoder=True)
        adapted = {id(p) for p in policy.parameters()} - {id(p) for p in base_parameters(policy)}
        own = [p for p in policy.parameters() if id(p) in adapted]
        critic = None
        if isinstance(module, ActorCritic) and not _shares_trunk(module):
            critic = _size(module, policy.base_model, pass_tokens, policy.base_model)
    width = policy.dtype.itemsize
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = prompts * prompt + rows * new
    at_once = max(1, LOGITS_AT_ONCE // config.vocab_size)
    chunk = min(at_once, pass_tokens, trained_rows * new)
    return Footprint(
        policy=size,
        critic=critic,
        reference=_bytes(own) if module.uses_reference else 0,
        logits=chunk * config.vocab_size * 4,
        cache=cached * 2 * config.num_hidden_layers * heads * head_dim * width,
        sampling=rows * config.vocab_size * 4,
    )


def _shares_trunk(module: ActorCritic) -> bool:
    return type(module.critic_source).__name__ == "SharedTrunk"


def _without_numbers(module: PolicyGradient) -> Any:
    """Return the policy's model in its shapes; to be called in a mode without memory."""
    with _real_tensors(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            module.source.load_config(), dtype=DTYPES[module.source.dtype]
        )
        if module.adapter is not None:
            module.adapter.inject(model, 0)
    shapes: dict[int, nn.Parameter] = {}
    for part in model.modules():
        for name, parameter in part.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            known = shapes.setdefault(
                id(parameter), nn.Parameter(empty, requires_grad=parameter.requires_grad)
            )
            part.register_parameter(name, known)
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    return model.train()


def _size(module: PolicyGradient, model: Any, tokens: int, base_model: Any) -> ModelSize:
    names = set(base_model._no_split_modules or [])
    layers = [part for part in model.modules() if type(part).__name__ in names]
    parameters = [*model.parameters()]
    trained = _bytes(p for p in parameters if p.requires_grad)
    saved = _saved_bytes(module, base_model, tokens)
    if module.gradient_checkpointing:
        inputs = tokens * base_model.config.get_text_config(decoder=True).hidden_size
        saved = saved // len(layers) + len(layers) * inputs * model.dtype.itemsize
    return ModelSize(
        weights=_bytes(parameters),
        trained=trained,
        state=int(trained * _state_ratio(module)),
        layer=max(_bytes(layer.parameters()) for layer in layers),
        rest=_bytes(parameters) - sum(_bytes(layer.parameters()) for layer in layers),
        largest=max(_bytes([p]) for p in parameters),
        activations=saved,
    )


def _bytes(parameters: Any) -> int:
    return sum(parameter.numel() * parameter.dtype.itemsize for parameter in parameters)


def _saved_bytes(module: PolicyGradient, base_model: Any, tokens: int) -> int:
    """Return what a pass over so many tokens keeps for its backward pass."""
    own = {parameter.untyped_storage()._cdata for parameter in base_model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    ids = torch.zeros(tokens, dtype=torch.long)
    autocast = torch.autocast("cpu", torch.bfloat16, _is_mixed(module), cache_enabled=False)
    with saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        flat_states(base_model, ids, torch.zeros_like(ids), LinearAttention())
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


class LinearAttention:
    """Keeps what a fused attention keeps: its inputs and its result."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel
    ) -> Tensor:
        """Return a tensor of the shape of the queries."""
        repeats = query.shape[1] // key.shape[1]
        keys, values = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
        return query * keys * values


def _is_mixed(module: PolicyGradient) -> bool:
    return module._trainer is not None and str(module.trainer.precision) == "bf16-mixed"


def _state_ratio(module: PolicyGradient) -> float:
    """Return the bytes of the optimizer's state per byte of a trained weight."""
    with _real_tensors():
        probe = nn.Parameter(torch.zeros(PROBE))
        optimizer = module.optimizer([{"params": [probe], "name": "probe"}])
        probe.grad = torch.ones(PROBE)
        optimizer.step()
        tensors = [v for v in optimizer.state[probe].values() if isinstance(v, Tensor)]
        return sum(t.numel() * t.dtype.itemsize for t in tensors if t.numel() > 1) / (4 * PROBE)


@contextmanager
def _real_tensors() -> Iterator[None]:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


class Planned(RLCLI):
    """The command line, which reads a configuration and runs nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def planned(arguments: Sequence[str]) -> tuple[PolicyGradient, PromptDataModule]:
    """Return the algorithm and the data of the options of `train.py fit`.

    Args:
        arguments: the options.
    """
    base = Path(lit_rl.__file__).parents[1] / "configs" / "base.yaml"
    cli = Planned(base, ["fit", *arguments])
    cli.model._trainer = cli.trainer
    return cli.model, cli.datamodule


def table(module: PolicyGradient, data: PromptDataModule, devices: Sequence[int]) -> Table:
    """Return the memory per device by strategy and number of devices, in GiB."""
    parts = ("weights", "critic", "reference", "gradients", "optimizer", "activations", "logits")
    columns = (*parts, "cache", "peak", "in")
    result = Table("strategy", "devices", *columns, title="GiB per device")
    for number in devices:
        held = footprint(module, data, number)
        for strategy in [ALONE] if number == 1 else STRATEGIES:
            of = held.parts(strategy, number)
            stages = held.stages(strategy, number)
            stage = max(stages, key=lambda name: stages[name])
            numbers = [*(of[name] for name in (*parts, "cache")), stages[stage]]
            shown = (f"{value / 2**30:.3g}" for value in numbers)
            result.add_row(strategy.name, str(number), *shown, stage)
    return result


def main(arguments: Sequence[str]) -> None:
    """Print the table of a configuration.

    Args:
        arguments: the options of `train.py fit`, and `--devices` with numbers, such as 1,2,8.
    """
    rest, devices = [*arguments], [1, 2, 4, 8]
    if "--devices" in rest:
        place = rest.index("--devices")
        devices = [int(number) for number in rest[place + 1].split(",")]
        del rest[place : place + 2]
    console().print(table(*planned(rest), devices))


if __name__ == "__main__":
    main(sys.argv[1:])
