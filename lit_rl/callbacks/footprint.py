"""What a run holds in the memory of each device, by strategy: an estimate from its settings."""

from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from lightning.pytorch import strategies as lightning
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM

from lit_rl.algorithms import ActorCritic, PolicyGradient
from lit_rl.data import PromptDataModule
from lit_rl.models.adapters import base_parameters
from lit_rl.models.attention import Kernel
from lit_rl.models.base import DTYPES
from lit_rl.models.policy import LOGITS_AT_ONCE
from lit_rl.models.response_states import flat_states
from lit_rl.strategies import FSDP2, DeepSpeed
from lit_rl.strategies.zero import LIVE_WEIGHTS

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
        cuts_gradients: whether gradients are, from the first micro-batch of a step on; those of
            FSDP2 add up whole until the last is reduced.
        cuts_weights: whether weights are, those of the reference included.
        stays_whole: how many weights of all models stay gathered from the pass forward to the pass
            backward at most, if that is more than a layer.
        second_gradients: whether gradients lie whole a second time, in the buckets of DDP.
        second_weights: whether the optimizer has a copy of the weights, in parts.
        second_base: whether a critic with an adapter has a base of its own.
    """

    name: str
    cuts_state: bool = False
    cuts_gradients: bool = False
    cuts_weights: bool = False
    stays_whole: int = 0
    second_gradients: bool = False
    second_weights: bool = False
    second_base: bool = False


ALONE = Strategy("auto")
STRATEGIES = (
    Strategy("ddp", second_gradients=True),
    Strategy("deepspeed_1", cuts_state=True, second_weights=True),
    Strategy("deepspeed_2", cuts_state=True, cuts_gradients=True, second_weights=True),
    Strategy("deepspeed_3", True, True, True, stays_whole=LIVE_WEIGHTS, second_weights=True),
    Strategy("fsdp2", cuts_state=True, cuts_weights=True, second_base=True),
)


def strategy_of(strategy: lightning.Strategy) -> Strategy:
    """Return what the strategy of a Trainer keeps on each device; an offload is not counted."""
    if isinstance(strategy, DeepSpeed):
        name = f"deepspeed_{strategy.stage}"
    elif isinstance(strategy, FSDP2):
        name = "fsdp2"
    else:
        name = "ddp" if isinstance(strategy, lightning.DDPStrategy) else ALONE.name
    return next(kind for kind in (ALONE, *STRATEGIES) if kind.name == name)


@dataclass(frozen=True)
class ModelSize:
    """Bytes of one model.

    Attributes:
        width: one weight.
        weights: all weights.
        base: those beneath an adapter.
        trained: those that are trained; as much for gradients.
        state: the optimizer's state.
        layer: the largest layer.
        rest: what is no layer: embeddings, norms and heads.
        largest: the largest weight.
        activations: what one pass with gradient keeps for its backward pass.
    """

    width: int
    weights: int
    base: int
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
        shared = 0 if self.critic is None or strategy.second_base else self.critic.base
        kept_twice = trained if strategy.second_gradients and devices > 1 else 0
        parts: dict[str, float] = {
            "weights": self.policy.weights / weights,
            "critic": (self.critic.weights - shared) / weights if self.critic else 0,
            "reference": self.reference / weights,
            "gradients": trained / gradients + kept_twice,
            "optimizer": sum(model.state for model in models) / state
            + (trained / state if strategy.second_weights else 0),
            "activations": sum(model.activations for model in models),
            "logits": LOGITS_IN_UPDATE * self.logits,
            "cache": self.cache + LOGITS_IN_SAMPLING * self.sampling,
        }
        is_cut = strategy.cuts_weights and devices > 1
        whole = (parts["weights"] + parts["critic"]) * weights
        parts["gathered"] = is_cut * max(
            sum(model.rest + 2 * model.layer for model in models),
            min(whole, strategy.stays_whole * self.policy.width),
        )
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
            + parts["gathered"],
            "step": kept + parts["gradients"] + 2 * max(model.largest for model in models),
        }  # fmt: skip


def unit_of(size: float) -> tuple[str, int]:
    """Return the unit in which a size in bytes reads well, and its bytes."""
    return ("GiB", 2**30) if size >= 2**30 else ("MiB", 2**20)


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
        if module.layout != "padded"
        else trained_rows * (prompt + new),
    )
    policy = _without_numbers(module)
    state_ratio = _state_ratio(module)
    # Mixed precision takes effect on tensors of a real device, which is slower to follow.
    with FakeTensorMode() if _is_mixed(module) else nullcontext() as mode:
        if mode is not None:
            _move_to_cpu(policy)
        saved = _saved_bytes(module, policy.base_model, pass_tokens)
    size = _size(policy, state_ratio, saved)
    critic = None
    if isinstance(module, ActorCritic) and not _shares_trunk(module):
        critic = _size(policy.base_model, state_ratio, saved)
    config = policy.config.get_text_config(decoder=True)
    adapted = {id(p) for p in policy.parameters()} - {id(p) for p in base_parameters(policy)}
    own = [p for p in policy.parameters() if id(p) in adapted]
    width = policy.dtype.itemsize
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sampled = min(prompts, module.prompts_at_a_time or prompts)
    cached = sampled * (prompt + module.group_size * new)
    at_once = max(1, LOGITS_AT_ONCE // config.vocab_size)
    chunk = min(at_once, pass_tokens, trained_rows * new)
    return Footprint(
        policy=size,
        critic=critic,
        reference=_bytes(own) if module.uses_reference else 0,
        logits=chunk * config.vocab_size * 4,
        cache=cached * 2 * config.num_hidden_layers * heads * head_dim * width,
        sampling=sampled * module.group_size * config.vocab_size * 4,
    )


def _shares_trunk(module: ActorCritic) -> bool:
    return type(module.critic_source).__name__ == "SharedTrunk"


def _without_numbers(module: PolicyGradient) -> Any:
    """Return the policy's model in its shapes, on the device that has no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            module.source.load_config(), dtype=DTYPES[module.source.dtype]
        )
        if module.adapter is not None:
            module.adapter.inject(model, 0)
    return model.train()


def _move_to_cpu(model: nn.Module) -> None:
    """Give a model without numbers weights on the CPU; to be called in a mode without memory."""
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


def _layers(model: Any) -> list[nn.Module]:
    names = set(model.base_model._no_split_modules or [])
    return [part for part in model.modules() if type(part).__name__ in names]


def _size(model: Any, state_ratio: float, activations: int) -> ModelSize:
    layers = _layers(model)
    parameters = [*model.parameters()]
    trained = _bytes(p for p in parameters if p.requires_grad)
    return ModelSize(
        width=model.dtype.itemsize,
        weights=_bytes(parameters),
        base=_bytes(base_parameters(model)),
        trained=trained,
        state=int(trained * state_ratio),
        layer=max(_bytes(layer.parameters()) for layer in layers),
        rest=_bytes(parameters) - sum(_bytes(layer.parameters()) for layer in layers),
        largest=max(_bytes([p]) for p in parameters),
        activations=activations,
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

    ids = torch.zeros(tokens, dtype=torch.long, device=base_model.device)
    autocast = torch.autocast("cpu", torch.bfloat16, _is_mixed(module), cache_enabled=False)
    with saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        flat_states(base_model, ids, torch.zeros_like(ids), LinearAttention())
    total = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    if module.gradient_checkpointing:
        inputs = tokens * base_model.config.get_text_config(decoder=True).hidden_size
        number = len(_layers(base_model))
        total = total // number + number * inputs * base_model.dtype.itemsize
    return total


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
    probe = nn.Parameter(torch.zeros(PROBE))
    optimizer = module.optimizer([{"params": [probe], "name": "probe"}])
    probe.grad = torch.ones(PROBE)
    optimizer.step()
    tensors = [v for v in optimizer.state[probe].values() if isinstance(v, Tensor)]
    return sum(t.numel() * t.dtype.itemsize for t in tensors if t.numel() > 1) / (4 * PROBE)
