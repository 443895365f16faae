"""Attention of our own within Hugging Face models: who attends to whom is given by a plan."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

NAME = "lit_rl"
"""Of the attention implementation, in the register of transformers."""


class Kernel(NamedTuple):
    """What a layer asks of its attention beside queries, keys and values.

    Attributes:
        scaling: factor of the products of queries and keys; None: 1 / sqrt(head_dim).
        softcap: limit of the scaled products, by tanh; None for none.
        sliding_window: positions that a query looks back on, its own included; None for all.
        dropout: probability of dropping a weight.
    """

    scaling: float | None = None
    softcap: float | None = None
    sliding_window: int | None = None
    dropout: float = 0.0


@runtime_checkable
class AttentionPlan(Protocol):
    """Computes the attention of a flat pass: one row that holds all tokens, without padding."""

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "flat heads head_dim"],
        key: Float[Tensor, "flat key_heads head_dim"],
        value: Float[Tensor, "flat key_heads value_dim"],
        kernel: Kernel,
    ) -> Float[Tensor, "flat heads value_dim"]:
        """Return the attention of each token.

        Args:
            layer: number of the layer.
            query: queries of the tokens, with their positions applied.
            key: their keys, fewer heads where several heads of queries share one.
            value: their values.
            kernel: what else the layer asks for.
        """


_PLAN: ContextVar[AttentionPlan | None] = ContextVar("attention_plan", default=None)


def _planned_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    plan = _PLAN.get()
    assert plan is not None
    assert attention_mask is None
    kernel = Kernel(scaling, options.get("softcap"), options.get("sliding_window"), dropout)
    layer: Any = module.layer_idx
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    return plan.attend(layer, query, key, value, kernel)[None], None


AttentionInterface.register(NAME, _planned_attention)


class PlannedAttention(AbstractContextManager[None]):
    """Let the models of a config compute their attention by a plan; may be entered repeatedly.

    Args:
        config: config of the model; its text config where it has one.
        plan: computes the attention; None: as the model is set.
    """

    def __init__(self, config: PretrainedConfig, plan: AttentionPlan | None) -> None:
        self.config = config
        self.plan = plan
        self._outside: list[tuple[str | None, AttentionPlan | None]] = []

    def __enter__(self) -> None:
        if self.plan is not None:
            self._outside.append((self.config._attn_implementation, _PLAN.get()))
            self.config._attn_implementation = NAME
            _PLAN.set(self.plan)

    def __exit__(self, *exception: object) -> None:
        if self.plan is not None:
            self.config._attn_implementation, plan = self._outside.pop()
            _PLAN.set(plan)


def same_attention(
    config: PretrainedConfig,
) -> Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]:
    """Return the `context_fn` of a checkpoint: recomputation has the plan of its forward pass."""
    return partial(_same_attention, config)


def _same_attention(
    config: PretrainedConfig,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), PlannedAttention(config, _PLAN.get())


def attention(
    query: Float[Tensor, "rows heads queries head_dim"],
    key: Float[Tensor, "rows key_heads keys head_dim"],
    value: Float[Tensor, "rows key_heads keys value_dim"],
    bias: Float[Tensor, "rows 1 group_queries keys"],
    kernel: Kernel,
) -> Float[Tensor, "rows heads queries value_dim"]:
    """softmax(softcap(scaling * query key^T) + bias) value, keys shared by groups of heads.

    Args:
        query: the queries; each group of heads / key_heads of them has the same keys.
        key: the keys.
        value: the values.
        bias: 0 where a query attends to a key, else -inf; every query attends to some key. Once
            for each of the heads that share their keys, one after another.
        kernel: scaling, soft cap and dropout; windows are a part of the bias.
    """
    rows, heads, queries, head_dim = query.shape
    key_heads = key.shape[1]
    # The heads that share their keys are further queries: nothing is repeated.
    query = query.reshape(rows, key_heads, -1, head_dim)
    if kernel.softcap is None:
        result = scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=kernel.dropout, scale=kernel.scaling
        )
    else:
        scaling = head_dim**-0.5 if kernel.scaling is None else kernel.scaling
        scores = kernel.softcap * torch.tanh(query @ key.mT * (scaling / kernel.softcap))
        weights = (scores.float() + bias).softmax(dim=-1).to(value.dtype)
        result = nn.functional.dropout(weights, kernel.dropout) @ value
    return result.reshape(rows, heads, queries, -1)
