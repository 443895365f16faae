"""Adapters: small trained layers upon a frozen base, which every role of a run shares."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rl.functional import fingerprint

ADAPTER = "default"
"""Name of the one adapter of a model within peft."""

PREFIX = "base_model.model."
"""What stands before the names of a model's layers in the files of peft."""

M = TypeVar("M", bound=nn.Module)


class Adapter(ABC):
    """What is trained in the place of a model's own weights.

    Attributes:
        starts_at_base: whether the model with a new adapter computes what it does without one.
        dropout: probability with which an entry of the adapter's input is zero in the updates.
    """

    starts_at_base: ClassVar[bool]
    dropout: float

    @abstractmethod
    def inject(self, model: PreTrainedModel, seed: int) -> None:
        """Put a new adapter into `model`, in place, and freeze all else.

        The model stays of its class, and its own weights are never written to.

        Args:
            model: a Hugging Face causal language model without an adapter.
            seed: seed of what is drawn at random; the global random state stays as it is.
        """


def peft_package() -> Any:
    """Return the package peft, which nothing but an adapter needs.

    Raises:
        ModuleNotFoundError: if it is not installed.
    """
    try:
        import peft.functional
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "an adapter needs the package peft: pip install 'lit-rl[lora]'"
        ) from error
    return peft


def check_dropout(dropout: float) -> None:
    """Refuse a dropout outside [0, 1)."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout of an adapter is {dropout}, must be in [0, 1), usually 0")


def adapter_layers(module: nn.Module) -> dict[str, Any]:
    """Return the layers of `module` that an adapter stands upon, by name; empty without one.

    Each is a layer of peft around the original one, its `base_layer`.
    """
    return {name: layer for name, layer in module.named_modules() if hasattr(layer, "lora_A")}


def base_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the frozen parameters that the adapter of `module` stands upon, each once.

    Empty where `module` has no adapter: then it has no base.
    """
    layers = adapter_layers(module)
    if not layers:
        return []
    own = {
        parameter
        for layer in layers.values()
        for name, child in layer.named_children()
        if name != "base_layer"
        for parameter in child.parameters()
    }
    return [parameter for parameter in module.parameters() if parameter not in own]


def base_names(module: nn.Module, base: Iterable[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the given parameters by every name that they have in `module`."""
    chosen = set(base)
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if parameter in chosen}


def without_base(
    state: Mapping[str, Tensor], base: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return a state dict without the given weights, and without what describes quantized ones.

    Args:
        state: a state dict.
        base: weights by their names in it, as of `base_names`.
    """
    descriptions = tuple(f"{name}." for name in base)
    return {
        name: value
        for name, value in state.items()
        if name not in base and not name.startswith(descriptions)
    }


def copy_on_base(module: M) -> M:
    """Return a deep copy of `module` upon the very same base; without an adapter, of everything.

    The base is frozen, and nothing else is shared: an adapter and its copy go their own ways.
    """
    return copy.deepcopy(
        module, {id(parameter): parameter for parameter in base_parameters(module)}
    )


def put_on_base(module: nn.Module, base: Mapping[str, nn.Parameter]) -> None:
    """Let a module stand upon a base in the place of its own, which holds the same numbers.

    Args:
        module: a module with an adapter.
        base: the other base, by the names that it has in `module`, see `base_names`.
    """
    for name, parameter in base.items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner).register_parameter(leaf, parameter)


def switch_adapter(module: nn.Module, *, on: bool) -> None:
    """Let a frozen `module` read its adapter, or be its base alone; nothing else changes."""
    for layer in adapter_layers(module).values():
        layer.enable_adapters(on)
    module.requires_grad_(False)  # of which `enable_adapters` has an opinion, too


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """Return the plain model that computes what `model` with its adapter does.

    `model` is left as it is, bit for bit. The sum of weight and adapter is rounded once to the
    format of the weight.

    Args:
        model: a model with an adapter.

    Returns:
        A model that owns its adapted layers and shares the others with `model`.
    """
    result = copy_on_base(model)
    for name, layer in adapter_layers(result).items():
        plain, dtype = layer.base_layer, layer.base_layer.weight.dtype
        wide = torch.promote_types(dtype, torch.float32)
        weight = plain.weight.detach().to(wide, copy=True)
        plain.weight = nn.Parameter(weight, requires_grad=False)
        layer.merge(safe_merge=True)
        plain.to(dtype)
        result.set_submodule(name, plain)
    del result.peft_config
    return result


def base_fingerprint(module: nn.Module) -> str:
    """Return the fingerprint of the base of a module; it does not depend on the adapter."""
    base = base_names(module, base_parameters(module))
    return fingerprint({name.replace(".base_layer", ""): p for name, p in base.items()})
