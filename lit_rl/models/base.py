"""Where a causal language model and its tokenizer come from."""

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lit_rl.models.dropout import switch_off_dropout
from lit_rl.models.export import remember_dropout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def warn_of_vanishing_updates(dtype: str) -> None:
    """Warn where weights that are to be trained are in a format that loses small updates.

    Args:
        dtype: number format of the weights, one of `DTYPES`.
    """
    if dtype == "bfloat16":
        warnings.warn(
            "weights in bfloat16: near 1.0 they are 0.0078 apart, so that most AdamW updates "
            "at a small learning rate vanish in rounding. To train them, use dtype: float32 "
            "with trainer.precision: bf16-mixed",
            stacklevel=3,
        )


def context_limit(config: PretrainedConfig) -> int | None:
    """Return the number of positions that a model of `config` has; None: any."""
    limit: int | None = getattr(
        config.get_text_config(decoder=True), "max_position_embeddings", None
    )
    return limit


@dataclass(frozen=True, kw_only=True)
class CausalLMSource(ABC):
    """A tokenizer and a causal language model of the Hugging Face kind.

    Args:
        dtype: number format of the weights: "float32", or "bfloat16" at half the memory, in which
            small updates vanish (a warning says so).
        attn_implementation: "sdpa", "eager", "flash_attention_2", or None: chosen by transformers.
        dropout: False builds the model with all its dropout probabilities at 0, so that training
            mode, which gradient checkpointing needs, stays deterministic. An export carries the
            original probabilities either way.
    """

    dtype: str = "float32"
    attn_implementation: str | None = None
    dropout: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(
                f"dtype {self.dtype!r} is not one of {sorted(DTYPES)}. For 16-bit computation use "
                "dtype: float32 with trainer.precision: bf16-mixed (float16 weights underflow)"
            )

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer, the same object at every call.

        Its pad token is defined: where the tokenizer has none, it is the end token, and no token
        is added to the vocabulary.
        """
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = self.load_tokenizer()
        if tokenizer.pad_token_id is None:
            if tokenizer.eos_token_id is None:
                raise ValueError(f"the tokenizer of {self} has neither a pad nor an end token")
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def model(self, seed: int, *, frozen: bool = False) -> PreTrainedModel:
        """Return a new model on the CPU, in training mode; the global random state stays as it is.

        Args:
            seed: seed of the weights that are drawn at random.
            frozen: whether the weights stay as they are, as those beneath an adapter do.

        Returns:
            The model, equal for equal seeds.
        """
        if not frozen:
            warn_of_vanishing_updates(self.dtype)
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs too
            config = self.load_config()
            originals = [] if self.dropout else switch_off_dropout(config)
            model = self.load_model(config)
        remember_dropout(model, originals)
        model.train()
        return model

    def max_context_tokens(self) -> int | None:
        """Return the tokens of prompt and response that the model has positions for; None: any."""
        return context_limit(self.load_config())

    @property
    def quantized(self) -> bool:
        """Whether the weights are in a format that nothing can train, but an adapter upon them."""
        return False

    @abstractmethod
    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer as its source has it; called once."""

    @abstractmethod
    def load_config(self) -> PretrainedConfig:
        """Return a new config of the model."""

    @abstractmethod
    def load_model(self, config: PretrainedConfig) -> PreTrainedModel:
        """Return a new model of `config`; random weights come from torch's global CPU generator."""
