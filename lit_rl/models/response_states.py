"""The hidden states of any Hugging Face base model before each token of given responses."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rl.functional import response_hidden
from lit_rl.models.activation_offload import offloaded_activations
from lit_rl.models.attention import AttentionPlan, PlannedAttention
from lit_rl.models.flex_packing import FlexPackedAttention
from lit_rl.models.modes import evaluation_mode
from lit_rl.models.packing import PackedAttention, packed
from lit_rl.types import Sequences

Layout = Literal["packed", "packed_flex", "padded"]
"""How the rows of a pass lie in memory: all tokens in one row without padding, in which each prompt
stands once for all its responses, the same with flex attention, or each row padded to one width."""
PLANS: dict[Layout, type[PackedAttention] | type[FlexPackedAttention] | None] = {
    "packed": PackedAttention,
    "packed_flex": FlexPackedAttention,
    "padded": None,
}
"""What computes the attention of a pass; None: the model itself."""
PACKED_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers, as configs name them, whose attention a plan can compute."""


def response_states(
    base_model: PreTrainedModel,
    sequences: Sequences,
    *,
    layout: Layout,
    with_end: bool = False,
) -> Float[Tensor, "rollouts states hidden"]:
    """Return the last hidden states before each response token, without the head of a task.

    The state before the first token is that of the last prompt token.

    Args:
        base_model: a model without its head, such as `model.base_model`.
        sequences: the rows; see `lit_rl.models.Policy` for what their masks may be.
        layout: how the rows lie in memory.
        with_end: whether one more column follows, with the state behind the last token at
            `lengths`.

    Returns:
        As many columns as response tokens, and one more `with_end`. Any finite number where the
        mask is False.
    """
    num_tokens = sequences.mask.shape[1]
    if (plan := PLANS[layout]) is not None:
        rows = packed(sequences, with_end=with_end)
        hidden = flat_states(base_model, rows.ids, rows.positions, plan(rows))
        return rows.states(hidden, num_tokens + with_end)
    hidden = padded_states(base_model, sequences.ids, sequences.attention_mask)
    return hidden[:, -num_tokens - 1 :] if with_end else response_hidden(hidden, num_tokens)


def flat_states(
    base_model: PreTrainedModel,
    ids: Int[Tensor, " flat"],
    positions: Int[Tensor, " flat"],
    plan: AttentionPlan,
) -> Float[Tensor, "flat hidden"]:
    """Return the hidden states of one row of tokens that attend to each other by a plan.

    Args:
        base_model: a model for which `may_pack` holds.
        ids: token ids.
        positions: position of each token in its own sequence.
        plan: computes the attention.
    """
    config = base_model.config.get_text_config(decoder=True)
    with PlannedAttention(config, plan):
        output: Tensor = base_model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False
        ).last_hidden_state
    return output[0]


def padded_states(
    base_model: PreTrainedModel,
    ids: Int[Tensor, "rollouts positions"],
    mask: Bool[Tensor, "rollouts positions"],
) -> Float[Tensor, "rollouts positions hidden"]:
    """Return the hidden states of a batch of padded rows.

    Args:
        base_model: a model without its head.
        ids: token ids of prompt and response.
        mask: True where a token is attended to; positions count these tokens only.
    """
    inputs = {"input_ids": ids, "attention_mask": mask.long()}
    if takes_position_ids(base_model):
        inputs["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    output: Tensor = base_model(**inputs, use_cache=False).last_hidden_state
    return output


def may_pack(base_model: PreTrainedModel) -> bool:
    """Return whether attention and positions of a model can be given to it at all.

    Models without position embeddings (ALiBi) read positions from the attention mask alone; layers
    that are no attention, or that attend within fixed chunks, need the padded rows.
    """
    config = base_model.config.get_text_config(decoder=True)
    layer_types = set(getattr(config, "layer_types", None) or ())
    return layer_types <= PACKED_LAYERS and takes_position_ids(base_model)


def takes_position_ids(base_model: PreTrainedModel) -> bool:
    """Return whether the forward pass of a model takes the positions of the tokens."""
    return "position_ids" in inspect.signature(type(base_model).forward).parameters


class ResponseReader(nn.Module):
    """A model that reads responses: a policy, or a critic with a backbone of its own.

    Attributes:
        layout: how its passes are laid out.
        offloads: whether what the backward pass needs waits in host memory.
        recomputes: whether gradient checkpointing was enabled.
    """

    layout: Layout = "padded"
    offloads = False
    recomputes = False

    @property
    def base_model(self) -> PreTrainedModel:
        """The Hugging Face model without its head."""
        raise NotImplementedError

    def enable_gradient_checkpointing(self) -> None:
        """Recompute the layers' activations in the backward pass of training mode."""
        raise NotImplementedError

    @property
    def can_pack(self) -> bool:
        """Whether the model can be told positions and attention of packed tokens."""
        return may_pack(self.base_model)

    @property
    def packs(self) -> bool:
        """Whether its passes have no padding."""
        return self.layout != "padded"

    @contextmanager
    def passes(self, layout: Layout) -> Iterator[None]:
        """Let passes be laid out otherwise meanwhile."""
        own, self.layout = self.layout, layout
        try:
            yield
        finally:
            self.layout = own

    @property
    def tolerance(self) -> float:
        """Root of the precision of a pass: a relative difference beyond it is no rounding."""
        weight = next(self.parameters())
        device = weight.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else weight.dtype
        return float(torch.finfo(dtype).eps ** 0.5)

    def states(
        self, sequences: Sequences, *, with_end: bool = False
    ) -> Float[Tensor, "rollouts states hidden"]:
        """Return the base model's last hidden states before each response token.

        Args:
            sequences: prompts with responses. The mask of a row is True up to its last counting
                token and False behind it, or False throughout; a response token is attended to
                where it is True.
            with_end: whether one more column follows, with the state behind the last token.
        """
        offload = self.offloads and torch.is_grad_enabled()
        with offloaded_activations(self) if offload else nullcontext():
            return response_states(
                self.base_model, sequences, layout=self.layout, with_end=with_end
            )


@torch.no_grad()
def packing_fits(reader: ResponseReader, sequences: Sequences) -> bool:
    """Return whether the states of responses, as they are laid out, are the padded ones.

    Up to rounding, relative to the largest state: attention to a wrong token is far beyond it.

    Args:
        reader: the model; stays as it is.
        sequences: rows to compare on.
    """
    states = []
    for layout in (reader.layout, "padded"):
        with evaluation_mode(reader), reader.passes(layout):
            states.append(reader.states(sequences)[sequences.mask])
    packed_states, padded = states
    limit = reader.tolerance * padded.abs().amax(dim=(0, 1), keepdim=True) if len(padded) else 0.0
    return bool(((packed_states - padded).abs() <= limit).all())
