"""Export to an ordinary Hugging Face folder."""

import copy
from pathlib import Path

from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rl.models.adapters import ADAPTER, PREFIX, adapter_layers, merged, peft_package
from lit_rl.models.dropout import restore_dropout

_DROPOUT = "_dropout_before_training"


def remember_dropout(model: PreTrainedModel, originals: list[dict[str, float]]) -> None:
    """Keep the dropout probabilities that an export of `model` carries; copies inherit them.

    Args:
        model: a model whose config had its dropout switched off.
        originals: what `switch_off_dropout` returned; empty where it stayed on.
    """
    setattr(model, _DROPOUT, originals)


def save_pretrained(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    adapter_only: bool = False,
) -> None:
    """Write model, generation config and tokenizer as a Hugging Face folder.

    `AutoModelForCausalLM.from_pretrained(folder)` then gives the same logits. The config is the
    original one, dropout probabilities included; only its dtype is that of the weights. `model` is
    left as it is. An adapter is merged into the weights of what is written; in a format coarser
    than float32 that rounds, which `adapter_only` does not. Into quantized weights it cannot be
    merged: then the adapter alone is written.

    Args:
        model: a Hugging Face causal language model.
        tokenizer: its tokenizer.
        folder: where to write; made if it is not there.
        adapter_only: write a folder of peft with the adapter alone:
            `peft.PeftModel.from_pretrained(base, folder)` then gives the same logits.
    """
    tokenizer.save_pretrained(folder)
    if adapter_only or getattr(model, "is_quantized", False):
        _save_adapter(model, Path(folder))
    else:
        _save_model(merged(model) if adapter_layers(model) else model, folder)


def _save_adapter(model: PreTrainedModel, folder: Path) -> None:
    functional = peft_package().functional
    weights = functional.get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file(
        {f"{PREFIX}{name}": weight.contiguous() for name, weight in weights.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    model.peft_config[ADAPTER].save_pretrained(folder)


def _save_model(model: PreTrainedModel, folder: str | Path) -> None:
    training_config = model.config
    model.config = copy.deepcopy(training_config)
    originals = getattr(model, _DROPOUT, [])
    try:
        if originals:
            restore_dropout(model.config, originals)
        model.save_pretrained(folder)
    finally:
        model.config = training_config
