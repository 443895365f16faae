"""What a checkpoint belongs to, so that another run does not go on from it by mistake."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

OPTIONAL = ("reference", "reward model")
"""Kinds that a run may have or not: compared where both have them."""


def model_name(model: PreTrainedModel) -> str:
    """Return the architecture of a model with its sizes."""
    config = model.config.get_text_config(decoder=True)
    return (
        f"{type(model).__name__} of {config.num_hidden_layers} layers, hidden size "
        f"{config.hidden_size}, vocabulary {config.vocab_size}"
    )


def tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the size of a vocabulary and a hash of its tokens and their numbers."""
    entries = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.all_special_ids])
    return f"{len(tokenizer)} tokens, {hashlib.sha256(entries.encode()).hexdigest()[:16]}"


def check_identity(stored: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Compare what a checkpoint belongs to with what reads it.

    Args:
        stored: by kind, such as model, what a checkpoint is of.
        own: the same of this run, for the kinds that have to agree.

    Raises:
        ValueError: for the first that differs.
    """
    for kind, name in own.items():
        if stored.get(kind) != name and (kind in stored or kind not in OPTIONAL):
            raise ValueError(
                f"the checkpoint does not fit the {kind} of this configuration: its {kind} is "
                f"{stored.get(kind)}, that of this run {name}. Give the --config files of the run "
                "that wrote it, or another checkpoint"
            )
