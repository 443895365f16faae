"""Attention of packed sequences by flex attention, which leaves out what no token attends to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, no_type_check

import torch
import torch._dynamo.config as compiler_settings
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import PretrainedConfig

from lit_rl.models.attention import Kernel
from lit_rl.models.packing import PackedSequences

BLOCK = 128
"""Queries and keys of a block of the mask: of those in which no query attends, none is computed."""
BLOCKS_AT_ONCE = 16
"""Blocks of queries whose mask is written out at a time."""
SMALLEST_HEAD = 16
"""Numbers of a head below which the kernel does not compile."""
VARIANTS = 64
"""Most versions that are compiled: with and without gradient, by kind of layer and of model."""


def flex_refusal(config: PretrainedConfig) -> str | None:
    """Return why flex attention cannot compute the attention of a model; None: it can.

    Args:
        config: config of the model.
    """
    config = config.get_text_config(decoder=True)
    dropouts = {
        name: value
        for name, value in vars(config).items()
        if "att" in name and "drop" in name and isinstance(value, float) and value > 0
    }
    if dropouts:
        return (
            f"layout packed_flex drops no weights, and this model asks for {dropouts}: "
            "use source.dropout: false, or layout: packed"
        )
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head < SMALLEST_HEAD:
        return (
            f"layout packed_flex needs heads of at least {SMALLEST_HEAD} numbers, and those of "
            f"this model have {head}: use layout: packed"
        )
    return None


@dataclass
class FlexPackedAttention:
    """Attention of packed sequences in one operation, of which no table of scores is made.

    A token attends to those that are not behind it in what all prompts have in common, in its own
    prompt and in its own response.

    Args:
        packed: the tokens.
    """

    packed: PackedSequences
    _masks: dict[int | None, BlockMask] = field(default_factory=dict)

    def __post_init__(self) -> None:
        owner, prompt = _owners(self.packed)
        self.owner, self.prompt = _filled(owner, -1), _filled(prompt, -1)
        self.position = _filled(self.packed.positions, 0)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel
    ) -> Float[Tensor, "flat heads value_dim"]:
        """Return the attention of each token, see `AttentionPlan`."""
        assert not kernel.dropout  # see `flex_refusal`
        # Under autocast rotated queries and keys may be wider than values.
        states = (part.to(value.dtype).transpose(0, 1)[None] for part in (query, key, value))
        # A number of another model makes another version: the kernel wants it fixed.
        with compiler_settings.patch(specialize_float=True, recompile_limit=VARIANTS):
            result: Tensor = compiled()(
                *states,
                score_mod=None if kernel.softcap is None else _soft_cap(kernel.softcap),
                block_mask=self.mask(kernel.sliding_window),
                scale=kernel.scaling,
                enable_gqa=True,
                kernel_options={"FORCE_USE_FLEX_ATTENTION": True},  # not the kernel for decoding
            )
        return result[0].transpose(0, 1)

    def mask(self, window: int | None) -> BlockMask:
        """Return who attends to whom, with the blocks of the row in which nobody or everybody does.

        Args:
            window: positions that a query looks back on, its own included; None for all.
        """
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        return self._masks[window]

    def _mask(self, window: int | None) -> BlockMask:
        position, owner, prompt, flat = self.position, self.owner, self.prompt, len(self.packed.ids)
        earliest = torch.zeros_like(position) if window is None else position - (window - 1)
        earliest[flat:] = torch.iinfo(earliest.dtype).max  # no token: it attends to none

        @no_type_check  # a check around it could not be compiled
        def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            place, whose = position[key], owner[key]
            seen = (place <= position[query]) & (place >= earliest[query])
            own = (whose == 0) | (whose == prompt[query]) | (whose == owner[query])
            return seen & own

        places = torch.arange(len(position), device=position.device)
        some, every = [], []
        for queries in places.split(BLOCKS_AT_ONCE * BLOCK):
            tiles = attends(places, places, queries[:, None], places)
            tiles = tiles.view(-1, BLOCK, len(places) // BLOCK, BLOCK)
            some.append(tiles.any(3).any(1))
            every.append(tiles.all(3).all(1))
        full = torch.cat(every)
        return BlockMask.from_kv_blocks(
            *_listed(torch.cat(some) & ~full),
            *_listed(full),
            BLOCK_SIZE=BLOCK,
            mask_mod=attends,
            seq_lengths=(flat, flat),
        )


@cache
def compiled() -> Callable[..., Any]:
    """Return flex attention, compiled for rows of any length; once per process."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


@cache
def _soft_cap(limit: float) -> Any:
    @no_type_check  # a check around it could not be compiled
    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return capped


def _owners(packed: PackedSequences) -> tuple[Int[Tensor, " flat"], Int[Tensor, " flat"]]:
    """Return whose each token is, 0 for all, and the prompt of that, numbered likewise."""
    table, lengths = packed.prompt_tokens, packed.prompt_lengths
    columns = torch.arange(table.shape[1], device=table.device)
    common = (table == table[0]).all(0).long().cumprod(0).bool()
    is_own = ~common & (columns < lengths[:, None])
    numbers = torch.arange(1, len(table) + 1, device=table.device)
    of_prompts = torch.zeros_like(packed.ids[: packed.num_prompt_tokens])
    of_prompts[table[is_own]] = numbers[:, None].expand_as(table)[is_own]
    rows = torch.arange(len(packed.lengths), device=table.device)
    row = rows.repeat_interleave(packed.lengths)
    owner = torch.cat([of_prompts, row + 1 + len(table)])
    prompt = torch.cat([of_prompts, packed.prompt_of_row[row] + 1])
    return owner, prompt


def _filled(values: Int[Tensor, " flat"], filling: int) -> Int[Tensor, " padded"]:
    """Return values of whole blocks."""
    return torch.nn.functional.pad(values.int(), (0, -len(values) % BLOCK), value=filling)


def _listed(
    blocks: Bool[Tensor, "queries keys"],
) -> tuple[Int[Tensor, "1 1 queries"], Int[Tensor, "1 1 queries keys"]]:
    """Return for each block of queries the number of its blocks of keys, and these first."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1).int()[None, None], order.int()[None, None]
