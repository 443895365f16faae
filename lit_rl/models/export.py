"""Export to an ordinary Hugging Face folder."""

import copy
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path
) -> None:
    """Write model, generation config and tokenizer as a Hugging Face folder.

    `AutoModelForCausalLM.from_pretrained(folder)` then gives the same logits. The config is the
    original one, dropout probabilities included; only its dtype is that of the weights. `model` is
    left as it is.

    Args:
        model: a Hugging Face causal language model.
        tokenizer: its tokenizer.
        folder: where to write; made if it is not there.
    """
    training_config = model.config
    model.config = copy.deepcopy(training_config)
    originals = getattr(model, _DROPOUT, [])
    try:
        if originals:
            restore_dropout(model.config, originals)
        model.save_pretrained(folder)
    finally:
        model.config = training_config
    tokenizer.save_pretrained(folder)
