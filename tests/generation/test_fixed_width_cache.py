"""A cache of equal shapes; what it computes is compared in test_cached_generator.py."""

import pytest
import torch

from lit_rl.generation.fixed_width_cache import FixedWidthCache
from lit_rl.generation.group_cache import PromptCache
from lit_rl.models.attention import Kernel
from lit_rl.models.packing import PackedSequences

# Two prompts of one token and of two, which have nothing in common, with two responses each.
ROWS = PackedSequences(
    ids=torch.tensor([7, 8, 9]),
    positions=torch.tensor([0, 0, 1]),
    prompt_of_row=torch.tensor([0, 1]),
    prompt_lengths=torch.tensor([1, 2]),
    prompt_tokens=torch.tensor([[0, 0], [1, 2]]),
    num_prompt_tokens=3,
    lengths=torch.tensor([0, 0]),
)
OWNERS = torch.tensor([0, 0, 1, 1])


@pytest.fixture
def cache():
    prompts = PromptCache(ROWS)
    # The values of prompt tokens are 1, of the padding as well.
    prompts.keys[0] = torch.zeros(2, 1, 2, 4)
    prompts.values[0] = torch.ones(2, 1, 2, 4)
    return FixedWidthCache(prompts, OWNERS, max_new_tokens=3)


def test_responses_leave_when_half_have_ended(cache):
    assert not cache.drops(torch.tensor([True, True, True, True]))
    assert not cache.drops(torch.tensor([True, False, True, True]))
    assert cache.drops(torch.tensor([True, False, False, True]))


def test_what_is_not_yet_written_has_no_weight(cache):
    """By hand: all products are 0, so that all tokens so far weigh the same.

    The values are 1 for a prompt token and 4 for the newest: (1 + 4) / 2 and (1 + 1 + 4) / 3.
    """
    cache.step()
    assert cache.positions.tolist() == [1, 1, 2, 2]
    zeros, fours = torch.zeros(4, 1, 4), torch.full((4, 1, 4), 4.0)
    result = cache.attend(0, zeros, zeros, fours, Kernel())
    assert result[:, 0, 0].tolist() == pytest.approx([2.5, 2.5, 2.0, 2.0])


def test_a_pass_may_be_repeated_before_the_next_token_begins(cache):
    """By hand: the second run of the first token writes over the first, see the test above."""
    zeros = torch.zeros(4, 1, 4)
    cache.step()
    cache.attend(0, zeros, zeros, torch.full((4, 1, 4), 100.0), Kernel())
    result = cache.attend(0, zeros, zeros, torch.full((4, 1, 4), 4.0), Kernel())
    assert result[:, 0, 0].tolist() == pytest.approx([2.5, 2.5, 2.0, 2.0])
    cache.step()  # a second token with the value 7: (1 + 4 + 7) / 3 and (1 + 1 + 4 + 7) / 4
    assert cache.positions.tolist() == [2, 2, 3, 3]
    result = cache.attend(0, zeros, zeros, torch.full((4, 1, 4), 7.0), Kernel())
    assert result[:, 0, 0].tolist() == pytest.approx([4.0, 4.0, 3.25, 3.25])
