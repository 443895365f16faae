"""Keys and values whose passes a CUDA graph can repeat: what changes stands on the device."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lit_rl.generation.group_cache import GroupCache, PromptCache


class FixedWidthCache(GroupCache):
    """A cache whose passes are the same operations on the same memory at every step.

    What changes from one token to the next stands on the device: the column of the newest token. A
    query is multiplied with the keys of all columns, those not yet written included, which have no
    weight. Responses leave when half of the places are theirs: until then they grow on unread.

    Args:
        prompts: what the pass over the prompts kept.
        prompt_of_row: for each response its prompt.
        max_new_tokens: tokens of the longest response whose keys are kept.
    """

    def __init__(
        self, prompts: PromptCache, prompt_of_row: Int[Tensor, " rollouts"], max_new_tokens: int
    ) -> None:
        super().__init__(prompts, prompt_of_row, max_new_tokens)
        self._newest = torch.full((1,), -1, device=prompt_of_row.device)
        for own, of_prompts in ((self.keys, prompts.keys), (self.values, prompts.values)):
            for layer, states in of_prompts.items():
                _, heads, _, dim = states.shape
                # Zeros: a weight of 0 would not take away what is not finite.
                own[layer] = states.new_zeros(len(prompt_of_row), heads, max_new_tokens, dim)

    def drops(self, running: Bool[Tensor, " places"]) -> bool:
        """Return whether half of the responses have ended: the graph is captured anew then."""
        return 2 * int(running.sum()) <= len(running)

    def step(self) -> None:
        """Begin the next token of every response."""
        super().step()
        self._newest += 1

    @property
    def positions(self) -> Int[Tensor, " running"]:
        """Position of the newest token of each response."""
        return self.prompts.rows.prompt_lengths[self.prompt_of_place] + self._newest

    def _with(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer][: len(key)], self.values[layer][: len(value)]
        keys.index_copy_(2, self._newest, key[:, :, None])
        values.index_copy_(2, self._newest, value[:, :, None])
        return keys, values

    def _own_columns(self) -> tuple[Int[Tensor, " columns"], Bool[Tensor, " columns"]]:
        columns = torch.arange(self.max_new_tokens, device=self._newest.device)
        return columns, columns <= self._newest
