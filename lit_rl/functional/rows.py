"""Which rows of a table are equal."""

import torch
from jaxtyping import Int
from torch import Tensor


def distinct_rows(
    table: Int[Tensor, "rows columns"],
) -> tuple[Int[Tensor, "distinct columns"], Int[Tensor, " rows"]]:
    """Return the different rows of a table in lexicographic order, and for each row its number.

    What `torch.unique(dim=0, return_inverse=True)` returns, without comparing rows with each other:
    they are told apart by a random linear hash of 64 bits. Rows that share a hash and differ, which
    nobody will see, are found by a comparison at the end, and then compared as `torch.unique` does.

    Args:
        table: any numbers, at least one row.

    Example:
        >>> rows, number = distinct_rows(torch.tensor([[7, 8], [1, 2], [7, 8]]))
        >>> rows.tolist(), number.tolist()
        ([[1, 2], [7, 8]], [1, 0, 1])
    """
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(2**62, (table.shape[1],), generator=generator).to(table.device) | 1
    hashes, by_hash = (table * factors).sum(1).unique(return_inverse=True)
    some_row = torch.zeros_like(hashes).scatter_(
        0, by_hash, torch.arange(len(table), device=table.device)
    )
    distinct, order = table[some_row].unique(dim=0, return_inverse=True)
    number = order[by_hash]
    if not torch.equal(distinct[number], table):
        distinct, number = table.unique(dim=0, return_inverse=True)
    return distinct, number
