"""Which rows make a batch, and which of them a rank gets."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from torch.utils.data import Sampler


class EpochBatches(Sampler[list[int]]):
    """Batches of row numbers, shuffled anew in each epoch; a batch sampler.

    The order depends on seed and epoch alone: not on the global random state, nor on the number of
    ranks, which share each batch. Rows that do not fill a batch wait for another epoch.

    Args:
        num_rows: how many rows there are.
        batch_size: rows per batch, over all ranks.
        seed: seed of the order.
        rank: number of this rank, which gets every `world_size`-th row of a batch.
        world_size: number of ranks.
    """

    def __init__(
        self, num_rows: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.first_batch = 0

    @property
    def sampler(self) -> "EpochBatches":
        """This object: Lightning tells the epoch to the sampler of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless it is already under way."""
        if epoch != self.epoch:
            self.resume(epoch, first_batch=0)

    def resume(self, epoch: int, first_batch: int) -> None:
        """Go to a batch of an epoch, where the next iteration begins."""
        self.epoch, self.first_batch = epoch, first_batch

    def __len__(self) -> int:
        return self.num_rows // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_rows).tolist()
        for start in range(self.first_batch * self.batch_size, self.num_rows, self.batch_size):
            batch = order[start : start + self.batch_size]
            if len(batch) == self.batch_size:
                yield batch[self.rank :: self.world_size]


class OrderedBatches(Sampler[list[int]]):
    """Batches of row numbers in order, each row once over all ranks; a batch sampler.

    The batches over all ranks are as equal as can be, so that each rank has the same number of
    batches and none of them is empty.

    Args:
        num_rows: how many rows there are.
        batch_size: rows per batch over all ranks, at most.
        rank: number of this rank, which gets every `world_size`-th row of a batch.
        world_size: number of ranks.

    Raises:
        ValueError: if a batch has fewer rows than there are ranks.

    Example:
        >>> list(OrderedBatches(7, batch_size=4, rank=0, world_size=2))
        [[0, 2], [3, 5]]
        >>> list(OrderedBatches(7, batch_size=4, rank=1, world_size=2))
        [[1], [4, 6]]
    """

    def __init__(self, num_rows: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        num_batches = -(-num_rows // batch_size)
        bounds = [num_rows * number // num_batches for number in range(num_batches + 1)]
        if bounds[1] < world_size:
            raise ValueError(
                f"{num_rows} held-out prompts in {num_batches} batches of at most eval_batch_size "
                f"{batch_size} leave some of the {world_size} ranks without a prompt; "
                f"{2 * world_size} prompts with eval_batch_size {2 * world_size} would do"
            )
        self.batches = [list(range(s + rank, e, world_size)) for s, e in pairwise(bounds)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)
