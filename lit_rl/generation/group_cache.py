"""Keys and values while responses grow: those of a prompt stand once for all its responses."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rl.models.attention import Kernel
from lit_rl.models.packing import PackedAttention, PackedSequences


@dataclass
class PromptCache:
    """Attention of the pass over the prompts, which keeps their keys and values.

    Args:
        rows: the different prompts as one row, without responses.

    Attributes:
        keys: by layer, [prompts, key_heads, prompt_tokens, head_dim], right-padded.
        values: by layer, likewise.
    """

    rows: PackedSequences
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._attention = PackedAttention(self.rows)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel
    ) -> Float[Tensor, "flat heads value_dim"]:
        """Return the attention of each prompt token, see `AttentionPlan`."""
        # In the order in which every step reads them: a product would copy them each time.
        self.keys[layer] = self._attention.of_prompts(key).contiguous()
        self.values[layer] = self._attention.of_prompts(value).contiguous()
        return self._attention.attend(layer, query, key, value, kernel)


class GroupCache:
    """Attention of one new token per running response to its prompt and to its tokens so far.

    Memory for the responses' keys and values is allocated once. A response that ends gives its
    place to the last one that runs.

    Args:
        prompts: what the pass over the prompts kept.
        prompt_of_row: for each response its prompt.
        max_new_tokens: tokens of the longest response whose keys are kept.
    """

    def __init__(
        self, prompts: PromptCache, prompt_of_row: Int[Tensor, " rollouts"], max_new_tokens: int
    ) -> None:
        self.prompts = prompts
        self.max_new_tokens = max_new_tokens
        self.prompt_of_place = prompt_of_row.clone()
        self.num_tokens = 0
        self._prompt_width = int(prompts.rows.prompt_lengths.max())
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._arrange()

    def keep(self, places: Int[Tensor, " kept"]) -> Int[Tensor, " kept"]:
        """Drop all responses but some, and return their old places in the order of their new ones.

        Args:
            places: places of the responses that stay, rising.
        """
        count = len(places)
        order = torch.arange(count, device=places.device)
        stays = places < count
        free = torch.ones(count, dtype=torch.bool, device=places.device)
        free[places[stays]] = False
        holes, movers = free.nonzero()[:, 0], places[~stays]
        order[holes] = movers
        for cache in (self.keys, self.values):
            for states in cache.values():
                states[holes, :, : self.num_tokens] = states[movers, :, : self.num_tokens]
        self.prompt_of_place = self.prompt_of_place[order]
        self._arrange()
        return order

    def drops(self, running: Bool[Tensor, " places"]) -> bool:
        """Return whether the responses that have ended are worth dropping.

        Args:
            running: whether the response of each place goes on; that of some place does.
        """
        return not running.all()

    def step(self) -> None:
        """Begin the next token of every response."""
        self.num_tokens += 1
        self.forget_biases()

    def forget_biases(self) -> None:
        """Let biases be made anew: they are kept for the layers of one pass."""
        self._biases: dict[int | None, Tensor] = {}

    @property
    def positions(self) -> Int[Tensor, " running"]:
        """Position of the newest token of each response."""
        lengths = self.prompts.rows.prompt_lengths
        return lengths[self.prompt_of_place] + self.num_tokens - 1

    def _arrange(self) -> None:
        """Lay the responses out in a table of prompts and places within them."""
        owner = self.prompt_of_place
        order = owner.argsort(stable=True)
        count = owner.bincount(minlength=len(self.prompts.rows.prompt_lengths))
        place = (
            torch.arange(len(owner), device=owner.device) - (count.cumsum(0) - count)[owner[order]]
        )
        width = int(count.max())
        in_table = owner[order] * width + place
        self._table = torch.zeros(len(count) * width, dtype=torch.long, device=owner.device)
        self._table[in_table] = order
        self._in_table = torch.empty_like(owner).scatter_(0, order, in_table)
        self._width = width
        identity = torch.arange(len(owner), device=owner.device)
        self._in_order = len(owner) == len(self._table) and bool((self._table == identity).all())

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel
    ) -> Float[Tensor, "running heads value_dim"]:
        """Return the attention of each new token, see `AttentionPlan`.

        One softmax over the products with the keys of the prompt, all its responses at once, and
        with those of each response.
        """
        keys, values = self._with(layer, key, value)
        rows, heads, head_dim = query.shape
        scaling = head_dim**-0.5 if kernel.scaling is None else kernel.scaling
        query = query.reshape(rows, key.shape[1], -1, head_dim) * scaling

        of_prompt = self._by_row(self._by_prompt(query) @ self.prompts.keys[layer].mT)
        of_response = query @ keys.mT
        scores = torch.cat([of_prompt, of_response], dim=-1)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if kernel.softcap is not None:
            scores = kernel.softcap * torch.tanh(scores / kernel.softcap)
        scores = scores + self._scores_bias(kernel.sliding_window)
        weights = scores.softmax(dim=-1).to(value.dtype)
        of_prompt, of_response = weights.split([of_prompt.shape[-1], keys.shape[2]], dim=-1)
        result: Tensor = self._by_row(self._by_prompt(of_prompt) @ self.prompts.values[layer])
        result = result + of_response @ values
        return result.reshape(rows, heads, -1)

    def _with(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add key and value of the newest tokens, and return those of the responses."""
        if layer not in self.keys:
            self.keys[layer] = self._allocated(key)
            self.values[layer] = self._allocated(value)
        now, rows = self.num_tokens, len(key)
        self.keys[layer][:rows, :, now - 1] = key
        self.values[layer][:rows, :, now - 1] = value
        return self.keys[layer][:rows, :, :now], self.values[layer][:rows, :, :now]

    def _allocated(self, states: Float[Tensor, "running heads dim"]) -> Tensor:
        rows, heads, dim = states.shape
        return states.new_empty(rows, heads, self.max_new_tokens, dim)

    def _by_prompt(self, states: Float[Tensor, "running heads group dim"]) -> Tensor:
        """[running, heads, group, dim] -> [prompts, heads, places * group, dim]."""
        if not self._in_order:
            states = states.index_select(0, self._table)
        _, heads, group, dim = states.shape
        table = states.reshape(-1, self._width, heads, group, dim).transpose(1, 2)
        return table.reshape(-1, heads, self._width * group, dim)

    def _by_row(self, states: Float[Tensor, "prompts heads queries dim"]) -> Tensor:
        """[prompts, heads, places * group, dim] -> [running, heads, group, dim]."""
        prompts, heads, _, dim = states.shape
        rows = states.reshape(prompts, heads, self._width, -1, dim).transpose(1, 2)
        rows = rows.reshape(prompts * self._width, heads, -1, dim)
        return rows if self._in_order else rows.index_select(0, self._in_table)

    def _scores_bias(self, window: int | None) -> Float[Tensor, "running 1 1 keys"]:
        if window not in self._biases:
            lengths = self.prompts.rows.prompt_lengths[self.prompt_of_place][:, None]
            columns = torch.arange(self._prompt_width, device=lengths.device)
            columns = columns.expand(len(lengths), -1)
            own_columns, filled = self._own_columns()
            own = lengths + own_columns
            allowed = torch.cat([columns < lengths, filled.expand_as(own)], dim=1)
            if window is not None:
                distance = self.positions[:, None] - torch.cat([columns, own], dim=1)
                allowed &= distance < window
            bias = torch.zeros(allowed.shape, device=lengths.device)
            self._biases[window] = bias.masked_fill_(~allowed, -torch.inf)[:, None, None]
        return self._biases[window]

    def _own_columns(self) -> tuple[Int[Tensor, " columns"], Bool[Tensor, " columns"]]:
        """Return the columns of the responses' keys, and which of them hold one."""
        columns = torch.arange(self.num_tokens, device=self.prompt_of_place.device)
        return columns, torch.ones_like(columns, dtype=torch.bool)
