"""A LoRA or DoRA adapter that was trained before, such as one of supervised fine-tuning."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from lit_rl.models.adapters import ADAPTER, PREFIX, Adapter, check_dropout, peft_package
from lit_rl.models.lora import inject, linear_layers

MATRICES = ("r", "lora_alpha", "use_dora", "use_rslora", "rank_pattern", "alpha_pattern")
"""Settings that say what the matrices compute."""

SAID_BY_WEIGHTS = (
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
)
"""Settings that say beside which layers the matrices stand."""

WITHOUT_EFFECT = (
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "runtime_config",
    "megatron_core",
)
"""Settings that do not change what a trained adapter computes."""


@dataclass(frozen=True)
class PretrainedLoRA(Adapter):
    """An adapter to start from; rank, alpha and layers are those that it was trained with.

    The reference of a KL is a frozen copy of it, so that the KL starts at 0.

    Args:
        path: folder of an adapter that peft wrote, or its name on the Hugging Face hub.
        dropout: as of `LoRA`, whatever the adapter was trained with.

    Raises:
        ValueError: for a dropout outside [0, 1).
    """

    starts_at_base: ClassVar[bool] = False

    path: str
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_dropout(self.dropout)

    def inject(self, model: PreTrainedModel, seed: int) -> None:
        """Put the adapter beside the layers that it was trained with.

        Raises:
            ModuleNotFoundError: if peft is not installed.
            ValueError: if there is no such adapter, if it trains something else than low-rank
                matrices, or if it does not fit the model.
        """
        config = self._config()
        weights = {
            name.removeprefix(PREFIX): weight
            for name, weight in peft_package().load_peft_weights(self.path, device="cpu").items()
        }
        names, existing = _adapted_layers(weights), linear_layers(model)
        if not names or not names <= existing.keys():
            raise ValueError(
                f"the adapter {self.path!r} does not fit {type(model).__name__}, which has no "
                f"linear layers {sorted(names - existing.keys())[:3]}. "
                f"{_advice(config)}"
            )
        settings = {name: getattr(config, name) for name in MATRICES}
        layers = {name: existing[name] for name in sorted(names)}
        inject(model, layers, seed, lora_dropout=self.dropout, **settings)
        expected = peft_package().get_peft_model_state_dict(model, save_embedding_layers=False)
        wrong = [
            name
            for name in sorted(expected.keys() | weights.keys())
            if name not in expected
            or name not in weights
            or expected[name].shape != weights[name].shape
        ]
        if wrong:
            raise ValueError(
                f"the adapter {self.path!r} does not fit {type(model).__name__}: {len(wrong)} "
                f"weights are missing, too many or of another size, such as {wrong[0]}. "
                f"{_advice(config)}"
            )
        peft_package().set_peft_model_state_dict(model, weights, adapter_name=ADAPTER)

    def _config(self) -> Any:
        try:
            config = peft_package().PeftConfig.from_pretrained(self.path)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"no adapter to load at {self.path!r}: neither a folder with adapter_config.json, "
                f"nor a repository that the Hugging Face hub gives: {error}"
            ) from error
        _refuse_more_than_matrices(config, self.path)
        return config


def _refuse_more_than_matrices(config: Any, path: str) -> None:
    peft = peft_package()
    if config.peft_type != peft.PeftType.LORA:
        raise ValueError(f"the adapter {path!r} is {config.peft_type}; only LORA can be trained on")
    usual = peft.LoraConfig()
    known = {*MATRICES, *SAID_BY_WEIGHTS, *WITHOUT_EFFECT}
    other = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in known and getattr(config, field.name) != getattr(usual, field.name)
    }
    if other.get("init_lora_weights") in (False, "gaussian"):  # the base is what it was
        del other["init_lora_weights"]
    if other:
        raise ValueError(
            f"the adapter {path!r} is more than low-rank matrices beside frozen weights: {other}. "
            "Merge it into its base, and give the merged model as source"
        )


def _adapted_layers(weights: Mapping[str, Tensor]) -> set[str]:
    parts = (name.partition(".lora_") for name in weights)
    return {layer for layer, separator, _ in parts if separator}


def _advice(config: Any) -> str:
    return f"Give as source the model that it was trained upon: {config.base_model_name_or_path!r}"
