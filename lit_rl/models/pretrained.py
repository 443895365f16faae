"""A causal language model from the Hugging Face hub, a folder or a GGUF file."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
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
    """

    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    gguf_file: str | None = None

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
            )
        if self.gguf_file is not None:
            _forget_quantization(model)
        return model

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
