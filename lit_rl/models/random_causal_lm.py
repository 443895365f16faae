"""A causal language model with random weights over the characters of an alphabet."""

import difflib
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lit_rl.models.base import DTYPES, CausalLMSource
from lit_rl.models.character_tokenizer import character_tokenizer

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
"""Fields that count something of which every architecture needs one at least."""


@dataclass(frozen=True)
class RandomCausalLM(CausalLMSource):
    """Random weights in any architecture of transformers, one token per character.

    The vocabulary is `<pad>`, `<bos>`, `<eos>` and the alphabet; its size and the ids of the three
    come from the tokenizer.

    Args:
        config: `model_type` and fields of that architecture's config, such as `{"model_type":
            "llama", "hidden_size": 64, "num_hidden_layers": 2, ...}`.
        alphabet: the characters that texts may hold, each once.
    """

    config: dict[str, Any]
    alphabet: str

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the alphabet."""
        return character_tokenizer(self.alphabet)

    def load_config(self) -> PretrainedConfig:
        """Return the config, whose every key the architecture knows."""
        if "model_type" not in self.config:
            raise ValueError(
                f"config needs a model_type, such as 'llama'; it has {sorted(self.config)}"
            )
        model_type = self.config["model_type"]
        if model_type not in CONFIG_MAPPING:
            near = difflib.get_close_matches(str(model_type), CONFIG_MAPPING, n=1) or ["llama"]
            raise ValueError(
                f"config model_type is {model_type!r}, unknown to transformers, such as {near[0]!r}"
            )
        tokenizer = self.tokenizer()
        from_tokenizer = {
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }
        if clash := sorted(from_tokenizer.keys() & self.config.keys()):
            raise ValueError(f"config sets {clash}, which come from the alphabet: remove them")
        self._refuse_sizes_below_1()
        try:
            config = AutoConfig.for_model(**self.config, **from_tokenizer)
        except StrictDataclassError as error:
            raise ValueError(self._refusal(error)) from error
        self._refuse_unknown_keys(config)
        self._refuse_heads_that_do_not_divide(config)
        return config

    def _default(self) -> PretrainedConfig:
        return AutoConfig.for_model(self.config["model_type"])

    def _refuse_sizes_below_1(self) -> None:
        default = self._default()
        common = {own: name for name, own in default.attribute_map.items()}
        for key, value in self.config.items():
            if common.get(key, key) in SIZES and isinstance(value, int) and value < 1:
                example = getattr(default, key) or 2
                raise ValueError(f"config {key} is {value}, must be at least 1, such as {example}")

    def _refusal(self, error: StrictDataclassError) -> str:
        """Return what is wrong with the config, from the words of transformers."""
        reason = str(error).split("\n", 1)[-1].strip().partition(": ")[2].rstrip(".")
        words = reason.lower().replace("_", " ")
        default = self._default()
        names = {key: key.replace("_", " ").removeprefix("num ") for key in self.config}
        wrong = [key for key, name in names.items() if name in words and hasattr(default, key)]
        if not wrong:
            return f"config of model_type {default.model_type!r} is refused: {reason}"
        given = ", ".join(f"{key} {self.config[key]!r}" for key in wrong)
        valid = ", ".join(f"{key} {getattr(default, key)!r}" for key in wrong)
        return f"config {given} is refused: {reason}; an example is {valid}"

    def _refuse_heads_that_do_not_divide(self, config: PretrainedConfig) -> None:
        heads = getattr(config, "num_attention_heads", None)
        groups = getattr(config, "num_key_value_heads", None)
        if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
            raise ValueError(
                f"config num_key_value_heads is {groups}, must divide num_attention_heads {heads}, "
                f"such as {heads}"
            )

    def _refuse_unknown_keys(self, config: PretrainedConfig) -> None:
        # A config keeps any key as an attribute; one that its defaults lack has no effect.
        default = self._default()
        unknown = [key for key in self.config if hasattr(config, key) and not hasattr(default, key)]
        for key in unknown:
            near = difflib.get_close_matches(key, vars(default), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"config key {key!r} is unknown to model_type {config.model_type!r}{hint}"
            )

    def load_model(self, config: PretrainedConfig) -> PreTrainedModel:
        """Return a model with random weights."""
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[self.dtype], attn_implementation=self.attn_implementation
        )
        return model
