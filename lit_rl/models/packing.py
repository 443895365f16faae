"""Prompts and responses in one row without padding; what rows begin with in common stands once."""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lit_rl.functional import distinct_rows
from lit_rl.models.attention import Kernel, attention
from lit_rl.types import Sequences

KEY_COST = 32
"""What a key of a block costs beside its products, in queries: it is gathered and kept."""


@dataclass(frozen=True, kw_only=True)
class PackedSequences:
    """A batch as one row: what all prompts begin with, the rest of each prompt, all responses.

    Made by `packed`.

    Attributes:
        ids: token ids.
        positions: position of each token in its own sequence.
        prompt_of_row: for each row of the batch its prompt.
        prompt_lengths: tokens of each prompt.
        prompt_tokens: where in the row the tokens of each prompt stand, the common ones included;
            behind the last one, that again.
        num_prompt_tokens: tokens of the row that stand before the responses.
        lengths: tokens of each row's response that are read.
    """

    ids: Int[Tensor, " flat"]
    positions: Int[Tensor, " flat"]
    prompt_of_row: Int[Tensor, " rollouts"]
    prompt_lengths: Int[Tensor, " prompts"]
    prompt_tokens: Int[Tensor, "prompts prompt_tokens"]
    num_prompt_tokens: int
    lengths: Int[Tensor, " rollouts"]

    @property
    def response_starts(self) -> Int[Tensor, " rollouts"]:
        """Where each response begins in the row."""
        return self.num_prompt_tokens + self.lengths.cumsum(0) - self.lengths

    def states(
        self, hidden: Float[Tensor, "flat hidden"], num_states: int
    ) -> Float[Tensor, "rollouts {num_states} hidden"]:
        """Return the state before each response token, and behind the last where it was read.

        Args:
            hidden: states of the tokens of the row.
            num_states: number of columns; those without a state repeat the last one.
        """
        last_of_prompt = self.prompt_tokens[self.prompt_of_row, -1]
        columns = torch.arange(num_states, device=hidden.device)
        columns = columns.minimum(self.lengths[:, None])
        within = self.response_starts[:, None] + columns - 1
        places = torch.where(columns == 0, last_of_prompt[:, None], within)
        return hidden.index_select(0, places.flatten()).view(*places.shape, -1)


def packed(sequences: Sequences, *, with_end: bool) -> PackedSequences:
    """Pack sequences; rows with equal prompts share one, and all what their prompts begin with.

    Args:
        sequences: rows whose mask is True up to the last counting token, or False throughout.
        with_end: whether the last token of each response is read, too: nothing but the state
            behind the response depends on it.
    """
    masked_ids = torch.where(sequences.prompt_mask, sequences.prompt_ids, -1)
    prompts, prompt_of_row = distinct_rows(masked_ids)
    prompt_lengths = (prompts >= 0).sum(1)
    # From left-padded to right-padded, where the last token is repeated.
    columns = torch.arange(int(prompt_lengths.max()), device=prompts.device)
    columns = columns.minimum(prompt_lengths[:, None] - 1)
    prompts = prompts.gather(1, prompts.shape[1] - prompt_lengths[:, None] + columns)
    prompt_tokens = _places_in_row(prompts, prompt_lengths, columns)
    prompt_ids, prompt_positions = (
        prompts.new_zeros(int(prompt_tokens.max()) + 1).index_put((prompt_tokens,), values)
        for values in (prompts, columns)
    )

    lengths = sequences.mask.sum(1)
    if not with_end:
        lengths = (lengths - 1).clamp(min=0)
    columns = torch.arange(sequences.mask.shape[1], device=lengths.device)
    read = columns < lengths[:, None]
    positions = prompt_lengths[prompt_of_row][:, None] + columns
    return PackedSequences(
        ids=torch.cat([prompt_ids, sequences.response_ids[read]]),
        positions=torch.cat([prompt_positions, positions[read]]),
        prompt_of_row=prompt_of_row,
        prompt_lengths=prompt_lengths,
        prompt_tokens=prompt_tokens,
        num_prompt_tokens=len(prompt_ids),
        lengths=lengths,
    )


def _places_in_row(
    prompts: Int[Tensor, "prompts prompt_tokens"],
    lengths: Int[Tensor, " prompts"],
    columns: Int[Tensor, "prompts prompt_tokens"],
) -> Int[Tensor, "prompts prompt_tokens"]:
    """Lay out what all prompts begin with, and then the rest of each."""
    num_common = int((prompts == prompts[0]).all(dim=0).long().cumprod(0).sum())
    num_common = min(num_common, int(lengths.min()))
    own = lengths - num_common
    starts = num_common + own.cumsum(0) - own
    return torch.where(columns < num_common, columns, starts[:, None] + columns - num_common)


@dataclass(frozen=True)
class Blocks:
    """Queries with the keys that they may attend to, in a table without waste beyond its padding.

    Attributes:
        queries: for each block and query the token; anything where there is none.
        keys: for each block and key the token; anything where there is none.
        places: for each token that is a query, in the order of the tokens, its place among all
            queries of the table.
        query_rows: the row of each query.
        key_rows: the row of each key; -1 for a token of the prompt, -2 where there is none.
        query_positions: position of each query in its sequence.
        key_positions: position of each key in its sequence.
    """

    queries: Int[Tensor, "blocks queries"]
    keys: Int[Tensor, "blocks keys"]
    places: Int[Tensor, " tokens"]
    query_rows: Int[Tensor, "blocks queries"]
    key_rows: Int[Tensor, "blocks keys"]
    query_positions: Int[Tensor, "blocks queries"]
    key_positions: Int[Tensor, "blocks keys"]

    def attends(self, window: int | None) -> Bool[Tensor, "blocks queries keys"]:
        """Return which query attends to which key; every query attends to one at least."""
        distance = self.query_positions[:, :, None] - self.key_positions[:, None, :]
        of_prompt = self.key_rows[:, None, :] == -1
        same_row = self.key_rows[:, None, :] == self.query_rows[:, :, None]
        allowed = (of_prompt | same_row) & (distance >= 0)
        if window is not None:
            allowed &= distance < window
        # A place without a query, or one whose window holds nothing of the table, reads key 0.
        nothing = ~allowed.any(dim=2)
        allowed[..., 0] |= nothing
        return allowed


def _tables(
    block: Int[Tensor, " tokens"], place: Int[Tensor, " tokens"], num_blocks: int, *columns: Any
) -> list[Tensor]:
    """Return one table [blocks, widest block] per column: its values at the tokens' places."""
    width = int(place.max()) + 1 if len(place) else 1
    tables = []
    for values, filling in columns:
        table = torch.full((num_blocks, width), filling, dtype=torch.long, device=block.device)
        table[block, place] = values
        tables.append(table)
    return tables


def _rows_of_blocks(
    packed: PackedSequences, rows_per_block: int
) -> tuple[
    Int[Tensor, " rollouts"],
    Bool[Tensor, " rollouts"],
    Int[Tensor, " rollouts"],
]:
    """Return the rows in the order of their prompts, which of them begin a block, and the block."""
    order = packed.prompt_of_row.argsort(stable=True)
    prompt = packed.prompt_of_row[order]
    first = torch.searchsorted(prompt, prompt)  # of the rows of the same prompt
    leads = (torch.arange(len(order), device=order.device) - first) % rows_per_block == 0
    return order, leads, leads.cumsum(0) - 1


def blocks_cost(packed: PackedSequences, rows_per_block: int) -> int:
    """Return what the attention of response blocks costs, in products of a query and a key.

    Args:
        packed: the tokens.
        rows_per_block: as in `response_blocks`.
    """
    order, leads, block = _rows_of_blocks(packed, rows_per_block)
    prompt_lengths = packed.prompt_lengths[packed.prompt_of_row[order[leads]]]
    queries = torch.zeros_like(prompt_lengths).index_add(0, block, packed.lengths[order])
    keys = int((prompt_lengths + queries).max())
    return len(queries) * keys * (max(1, int(queries.max())) + KEY_COST)


def response_blocks(packed: PackedSequences, rows_per_block: int) -> Blocks:
    """Return blocks of some responses of one prompt: their tokens ask the prompt and themselves.

    Args:
        packed: the tokens.
        rows_per_block: responses of a block; the last block of a prompt may have fewer.
    """
    device = packed.ids.device
    order, leads, block = _rows_of_blocks(packed, rows_per_block)
    prompt, lengths = packed.prompt_of_row[order], packed.lengths[order]
    number = torch.arange(len(order), device=device)
    num_blocks = int(block[-1]) + 1
    before = lengths.cumsum(0) - lengths
    offset = before - before[leads][block]

    row = number.repeat_interleave(lengths)
    column = torch.arange(len(row), device=device) - before[row]
    token = packed.response_starts[order][row] + column
    prompt_length = packed.prompt_lengths[prompt][row]
    place, position = offset[row] + column, prompt_length + column

    prompt_of_block = prompt[leads]
    widths = packed.prompt_lengths[prompt_of_block]
    prompt_block = torch.arange(num_blocks, device=device).repeat_interleave(widths)
    within = torch.arange(len(prompt_block), device=device)
    within = within - (widths.cumsum(0) - widths)[prompt_block]
    prompt_token = packed.prompt_tokens[prompt_of_block[prompt_block], within]

    queries, query_rows, query_positions = _tables(
        block[row], place, num_blocks, (token, 0), (row, -3), (position, -1)
    )
    keys, key_rows, key_positions = _tables(
        torch.cat([prompt_block, block[row]]),
        torch.cat([within, prompt_length + place]),
        num_blocks,
        (torch.cat([prompt_token, token]), 0),
        (torch.cat([torch.full_like(within, -1), row]), -2),
        (torch.cat([within, position]), 0),
    )
    in_table = block[row] * queries.shape[1] + place
    return Blocks(
        queries=queries,
        keys=keys,
        places=in_table[token.argsort()],
        query_rows=query_rows,
        key_rows=key_rows,
        query_positions=query_positions,
        key_positions=key_positions,
    )


def cheapest_blocks(packed: PackedSequences) -> Blocks:
    """Return the response blocks of least cost: of 1, 2, 4, ... responses each.

    Many responses in one block gather the prompt's keys once, but ask each other's in vain.
    """
    most = int(packed.prompt_of_row.bincount().max())
    powers = (2**exponent for exponent in range(most.bit_length() + 1))
    candidates = sorted({min(rows, most) for rows in powers})
    return response_blocks(packed, min(candidates, key=lambda rows: blocks_cost(packed, rows)))


@dataclass
class PackedAttention:
    """Attention of packed sequences: causal within the prompts, then that of the responses.

    Args:
        packed: the tokens.
    """

    packed: PackedSequences
    _biases: dict[Any, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        table = self.prompt_table = self.packed.prompt_tokens
        columns = torch.arange(table.shape[1], device=table.device)
        has_token = columns < self.packed.prompt_lengths[:, None]
        places = torch.arange(table.numel(), device=table.device).view(table.shape)
        # A token that several prompts have in common is taken from the first of them.
        self.prompt_places = (
            torch.full_like(table[0, :1], table.numel())
            .repeat(self.packed.num_prompt_tokens)
            .scatter_reduce(0, table[has_token], places[has_token], "amin")
        )
        self.blocks = cheapest_blocks(self.packed) if self.packed.lengths.any() else None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel
    ) -> Float[Tensor, "flat heads value_dim"]:
        """Return the attention of each token, see `AttentionPlan`."""
        prompts = self._prompts(query, key, value, kernel)
        if self.blocks is None:
            return prompts
        group = query.shape[1] // key.shape[1]
        responses = attention(
            _rows(query, self.blocks.queries),
            _rows(key, self.blocks.keys),
            _rows(value, self.blocks.keys),
            self._response_bias(kernel.sliding_window, group, query.dtype),
            kernel,
        )
        responses = responses.transpose(1, 2).flatten(0, 1)
        return torch.cat([prompts, responses.index_select(0, self.blocks.places)])

    def of_prompts(
        self, states: Float[Tensor, "flat heads dim"]
    ) -> Float[Tensor, "prompts heads prompt_tokens dim"]:
        """Return the states of the prompts' tokens, right-padded with that of the last one."""
        return _rows(states, self.prompt_table)

    def _prompts(self, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel) -> Tensor:
        query, key, value = (self.of_prompts(part) for part in (query, key, value))
        window = kernel.sliding_window
        if kernel.softcap is None and (window is None or window >= self.prompt_table.shape[1]):
            result = scaled_dot_product_attention(
                query,
                key,
                value,
                is_causal=True,
                dropout_p=kernel.dropout,
                scale=kernel.scaling,
                enable_gqa=True,
            )
        else:
            bias = self._causal_bias(window, query.shape[1] // key.shape[1], query.dtype)
            result = attention(query, key, value, bias, kernel)
        return result.transpose(1, 2).flatten(0, 1).index_select(0, self.prompt_places)

    def _causal_bias(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        if ("prompts", window, group, dtype) not in self._biases:
            prompts, width = self.prompt_table.shape
            positions = torch.arange(width, device=self.prompt_table.device)
            distance = positions[:, None] - positions
            allowed = (distance >= 0) & (distance < (width if window is None else window))
            bias = _bias(allowed, group, dtype).expand(prompts, 1, -1, -1)
            self._biases["prompts", window, group, dtype] = bias
        return self._biases["prompts", window, group, dtype]

    def _response_bias(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        if ("responses", window, group, dtype) not in self._biases:
            assert self.blocks is not None
            bias = _bias(self.blocks.attends(window)[:, None], group, dtype)
            self._biases["responses", window, group, dtype] = bias
        return self._biases["responses", window, group, dtype]


def _bias(allowed: Bool[Tensor, "*rows queries keys"], group: int, dtype: torch.dtype) -> Tensor:
    """Return 0 where allowed, else -inf, once for each of a group of heads."""
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    bias = bias.masked_fill_(~allowed, -torch.inf)
    return torch.cat([bias] * group, dim=-2)


def _rows(
    states: Float[Tensor, "flat heads dim"], table: Int[Tensor, "rows places"]
) -> Float[Tensor, "rows heads places dim"]:
    rows = states.index_select(0, table.flatten())
    return rows.view(*table.shape, *states.shape[1:]).transpose(1, 2)
