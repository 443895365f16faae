"""Which of the groups of several rounds of sampling are trained on."""

from typing import NamedTuple

from jaxtyping import Bool
from torch import Tensor


class Group(NamedTuple):
    """A group of responses, on one of the ranks.

    Attributes:
        draw: the round that sampled it, from 0.
        rank: the rank that holds it.
        place: its place among the groups of that rank in that round.
        signal: whether its rewards differ, so that it teaches something.
    """

    draw: int
    rank: int
    place: int
    signal: bool


def gathered_groups(draw: int, signal: Bool[Tensor, "ranks prompts"]) -> list[Group]:
    """Return the groups of a round in the order of its prompts, the same on every rank.

    Args:
        draw: number of the round.
        signal: whether each group teaches something, by the rank that holds it and its place there.
    """
    ranks, places = signal.shape
    flags = signal.tolist()
    return [
        Group(draw, rank, place, flags[rank][place])
        for place in range(places)
        for rank in range(ranks)
    ]


def choose_groups(groups: list[Group], number: int) -> list[Group]:
    """Return the first `number` groups with signal; others fill the places that they leave.

    Args:
        groups: all groups of an iteration, in the order in which they were sampled.
        number: groups of the batch, at most `len(groups)`.

    Example:
        >>> first, second = Group(0, 0, 0, signal=False), Group(0, 0, 1, signal=True)
        >>> third = Group(1, 0, 0, signal=True)
        >>> [group.signal for group in choose_groups([first, second, third], 2)]
        [True, True]
    """
    with_signal = [group for group in groups if group.signal]
    without = [group for group in groups if not group.signal]
    return (with_signal + without)[:number]
