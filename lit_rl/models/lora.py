"""LoRA and DoRA by peft: low-rank matrices beside the frozen weights of linear layers."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lit_rl.models.adapters import ADAPTER, Adapter, adapter_layers, check_dropout, peft_package

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoRA(Adapter):
    """y = W x + alpha / rank * B A x, with W frozen; A is random and B starts at 0.

    LoRA, arXiv:2106.09685, section 4.1. DoRA, arXiv:2402.09353, eq. 5 and section 4.3:
    y = m * (W + alpha / rank * B A) x / |W + alpha / rank * B A|, with the norm of each row taken
    as a constant in the gradient; m starts at the norms of W. The matrices are float32 whatever the
    format of W. A learning rate about ten times that of full fine-tuning suits them.

    Args:
        rank: rows of A and columns of B.
        alpha: scale of B A, over the rank.
        dropout: probability with which an entry of the adapter's input is zero in the updates;
            never in generation and scoring. Above 0 the log-probs of an update are not those of
            the policy that is scored: the ratio is off from the first update on.
        target_modules: "all-linear", for all linear layers but the output head; or names of linear
            layers, such as [q_proj, v_proj]; or a regular expression for their whole names. The
            output head and the embeddings stay as they are.
        use_dora: whether the norm of each row is trained apart from its direction.

    Raises:
        ValueError: for a setting outside its range.
    """

    starts_at_base: ClassVar[bool] = True

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str | Sequence[str] = ALL_LINEAR
    use_dora: bool = False

    def __post_init__(self) -> None:
        if not self.rank >= 1:
            raise ValueError(f"rank of LoRA is {self.rank}, must be at least 1, such as 16")
        if not self.alpha >= 1:
            raise ValueError(f"alpha of LoRA is {self.alpha}, must be at least 1, such as 32")
        check_dropout(self.dropout)

    def inject(self, model: PreTrainedModel, seed: int) -> None:
        """Put the matrices into the target modules.

        Raises:
            ModuleNotFoundError: if peft is not installed.
            ValueError: if a target names no linear layer.
        """
        layers = target_layers(model, self.target_modules)
        inject(
            model,
            layers,
            seed,
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            use_dora=self.use_dora,
        )


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the layers of a model that can have an adapter: linear ones, but the output head."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def target_layers(model: PreTrainedModel, targets: str | Sequence[str]) -> dict[str, nn.Module]:
    """Return the layers that `target_modules` of `LoRA` means, by their whole names.

    Raises:
        ValueError: if a target, or all of them, means no layer; with those that exist.
    """
    layers = linear_layers(model)
    if targets == ALL_LINEAR:
        found = set(layers)
        unknown = [] if found else [ALL_LINEAR]
    elif isinstance(targets, str):
        found = {name for name in layers if re.fullmatch(targets, name)}
        unknown = [] if found else [targets]
    else:
        matches = {target: _ending_with(target, layers) for target in targets}
        found = {name for names in matches.values() for name in names}
        unknown = [target for target, names in matches.items() if not names]
    if unknown or not found:
        names = sorted({name.rpartition(".")[2] for name in layers})
        raise ValueError(
            f"target_modules of LoRA is {targets!r}, of which {unknown} is no linear layer of "
            f"{type(model).__name__}; it has {names} (output head and embeddings cannot have an "
            "adapter), and 'all-linear' means all of them"
        )
    return {name: layer for name, layer in layers.items() if name in found}


def inject(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], seed: int, **settings: Any
) -> None:
    """Put matrices beside the given layers of `model`, in float32, and freeze all else.

    Args:
        model: a model without an adapter.
        layers: those that have the adapter, by name.
        seed: seed of A.
        settings: the other settings of `peft.LoraConfig`.
    """
    peft = peft_package()
    config = peft.LoraConfig(
        target_modules=list(layers),
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
        **settings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        peft.functional.inject_adapter_in_model(config, model, ADAPTER)
    peft.functional.cast_adapter_dtype(model, ADAPTER)
    for layer in adapter_layers(model).values():
        if layer.use_dora[ADAPTER]:
            _set_magnitudes(layer)


def _set_magnitudes(layer: Any) -> None:
    # peft rounds them to the format of the base: the policy would not start as its base.
    layer.lora_magnitude_vector[ADAPTER].update_layer(
        base_layer=layer.base_layer,
        lora_A=layer.lora_A[ADAPTER].weight,
        lora_B=layer.lora_B[ADAPTER].weight,
        scaling=layer.scaling[ADAPTER],
    )


def _ending_with(target: str, names: Collection[str]) -> list[str]:
    return [name for name in names if name == target or name.endswith(f".{target}")]
