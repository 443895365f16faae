"""Recomputing activations in the backward pass, to save memory."""

from transformers import PreTrainedModel

from lit_rl.models.attention import same_attention


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Recompute the layers' activations in the backward pass of training mode.

    Passes in evaluation mode or without gradient are not affected.

    Args:
        model: any Hugging Face model, with or without a head; changed in place.
    """
    # One method under two names: early releases of transformers 5 have the second one only.
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    config = model.config.get_text_config(decoder=True)
    enable({"use_reentrant": False, "context_fn": same_attention(config)})
