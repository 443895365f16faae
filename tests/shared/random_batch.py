"""Random prompts with random responses to each, as packed passes read them."""

from collections.abc import Sequence

import torch

from lit_rl.types import Sequences


def random_batch(
    rows_of_prompt: Sequence[int] = (3, 1, 4),
    longest: int = 9,
    vocab: int = 14,
    seed: int = 0,
    begin: int | None = None,
) -> Sequences:
    """So many rows of each prompt, all shorter than `longest`; `begin` is their common first id."""
    generator = torch.Generator().manual_seed(seed)
    number, shortest = len(rows_of_prompt), 1 if begin is None else 2
    lengths = torch.randint(shortest, longest, (number,), generator=generator)
    prompt_mask = torch.arange(longest) >= longest - lengths[:, None]
    prompt_ids = torch.randint(3, vocab, (number, longest), generator=generator) * prompt_mask
    if begin is not None:
        prompt_ids[torch.arange(number), longest - lengths] = begin
    owner = torch.arange(number).repeat_interleave(torch.tensor(rows_of_prompt))
    widths = torch.randint(1, longest, (len(owner),), generator=generator)
    mask = torch.arange(longest) < widths[:, None]
    response_ids = torch.randint(3, vocab, mask.shape, generator=generator) * mask
    return Sequences(
        prompt_ids=prompt_ids[owner],
        prompt_mask=prompt_mask[owner],
        response_ids=response_ids,
        mask=mask,
    )
