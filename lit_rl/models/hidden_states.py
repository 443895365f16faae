"""The last hidden states of any Hugging Face base model on prompts with responses."""

import inspect
from functools import lru_cache
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel


def hidden_states(
    base_model: PreTrainedModel,
    ids: Int[Tensor, "rollouts positions"],
    mask: Bool[Tensor, "rollouts positions"],
) -> Float[Tensor, "rollouts positions hidden"]:
    """Return the last hidden states of a base model, without the head of a task.

    Args:
        base_model: a model without its head, such as `model.base_model`.
        ids: token ids of prompt and response.
        mask: True where a token is attended to; positions count these tokens only.
    """
    inputs = {"input_ids": ids, "attention_mask": mask.long()}
    if _takes_position_ids(type(base_model)):  # type: ignore[arg-type]
        inputs["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    output: Tensor = base_model(**inputs, use_cache=False).last_hidden_state
    return output


@lru_cache
def _takes_position_ids(kind: type[Any]) -> bool:
    # Models without position embeddings (ALiBi) read positions from the attention mask alone.
    return "position_ids" in inspect.signature(kind.forward).parameters
