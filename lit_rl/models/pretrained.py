"""A causal language model from the Hugging Face hub, a folder or a GGUF file."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lit_rl.models.base import DTYPES, CausalLMSource


@dataclass(frozen=True)
class PretrainedCausalLM(CausalLMSource):
    """Weights, config and tokenizer by name.

    Args:
        name: name on the Hugging Face hub, such as "HuggingFaceTB/SmolLM2-135M", or path of a
            folder.
        revision: branch, tag or commit on the hub; None: its main branch.
        trust_remote_code: whether code that comes with the model may run on this machine.
        gguf_file: name of a GGUF file in the repository or folder; its weights are dequantized to
            `dtype`. Needs the packages gguf and accelerate.
        load_in_4bit: whether linear layers are quantized to 4 bits when they are loaded (NF4 with
            double quantization, arXiv:2305.14314, section 3), for an adapter to be trained upon
            them in `dtype`. Needs an accelerator and the package bitsandbytes.

    Raises:
        ModuleNotFoundError: if bitsandbytes is needed and not installed.
    """

    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    gguf_file: str | None = None
    load_in_4bit: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.load_in_4bit and importlib.util.find_spec("bitsandbytes") is None:
            raise ModuleNotFoundError(
                "load_in_4bit needs the package bitsandbytes: pip install bitsandbytes accelerate"
            )

    @property
    def quantized(self) -> bool:
        """Whether the weights are in 4 bits."""
        return self.load_in_4bit

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer that lies beside the weights."""
        with self._named_errors():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**self._where())
        return tokenizer

    def load_config(self) -> PretrainedConfig:
        """Return the config that lies beside the weights."""
        with self._named_errors():
            config: PretrainedConfig = AutoConfig.from_pretrained(**self._where())
        return config

    def load_model(self, config: PretrainedConfig) -> PreTrainedModel:
        """Return the model with its pretrained weights."""
        with self._named_errors():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                **self._where(),
                config=config,
                dtype=DTYPES[self.dtype],
                attn_implementation=self.attn_implementation,
                quantization_config=self._four_bits() if self.load_in_4bit else None,
            )
        if self.gguf_file is not None:
            _forget_quantization(model)
        return model

    def _four_bits(self) -> BitsAndBytesConfig:
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=DTYPES[self.dtype],
        )

    def _where(self) -> dict[str, Any]:
        folder = Path(self.name).expanduser()
        where = {
            "pretrained_model_name_or_path": str(folder) if folder.is_dir() else self.name,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
        }
        return where if self.gguf_file is None else {**where, "gguf_file": self.gguf_file}

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = self.name if self.gguf_file is None else f"{self.name} ({self.gguf_file})"
            raise ValueError(
                f"no model to load at {what!r}: neither a folder with one, nor the name of a "
                f"repository that the Hugging Face hub or its cache on this machine gives: {error}"
            ) from error


def _forget_quantization(model: Any) -> None:
    # The weights are plain numbers now; with the marks of quantization left they could not be saved
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
