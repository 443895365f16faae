"""Dropout is a property of a model's config: off while training, restored in what is exported."""

from typing import Any

from transformers import PretrainedConfig


def _with_text_config(config: PretrainedConfig) -> list[PretrainedConfig]:
    text = config.get_text_config(decoder=True)
    return [config] if text is config else [config, text]


def switch_off_dropout(config: PretrainedConfig) -> list[dict[str, float]]:
    """Set every dropout probability of `config`, and of its text config, to 0 in place.

    A dropout probability is a float field with "drop" in its name. To be called before the model
    is built: layers copy the values.

    Args:
        config: config of any Hugging Face model.

    Returns:
        The values as they were, for `restore_dropout`.
    """
    originals = []
    for part in _with_text_config(config):
        found = {n: v for n, v in vars(part).items() if "drop" in n and isinstance(v, float)}
        originals.append(found)
        _assign(part, dict.fromkeys(found, 0.0))
    return originals


def restore_dropout(config: PretrainedConfig, originals: list[dict[str, float]]) -> None:
    """Write the values that `switch_off_dropout` returned into `config`, in place."""
    for part, values in zip(_with_text_config(config), originals, strict=True):
        _assign(part, values)


def _assign(config: PretrainedConfig, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(config, name, value)
