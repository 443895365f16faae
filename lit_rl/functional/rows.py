"""Which rows of a table are equal."""

import torch
from jaxtyping import Int
from torch import Tensor


def distinct_rows(
    table: Int[Tensor, "rows columns"],
) -> tuple[Int[Tensor, "distinct columns"], Int[Tensor, " rows"]]:
    """Return the different rows of a table as they first appear, and for each row its number.

    Rows are not compared with each other, as `torch.unique` does: they are told apart by a random
    linear hash of 64 bits. Rows that share a hash and differ, which nobody will see, are found by a
    comparison at the end, and only then compared.

    Args:
        table: any numbers, at least one row.

    Example:
        >>> rows, number = distinct_rows(torch.tensor([[7, 8], [1, 2], [7, 8]]))
        >>> rows.tolist(), number.tolist()
        ([[7, 8], [1, 2]], [0, 1, 0])
    """
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(2**62, (table.shape[1],), generator=generator).to(table.device) | 1
    distinct, number = _numbered(table, (table * factors).sum(1).unique(return_inverse=True)[1])
    if not torch.equal(distinct[number], table):
        distinct, number = _numbered(table, table.unique(dim=0, return_inverse=True)[1])
    return distinct, number


def _numbered(
    table: Int[Tensor, "rows columns"], label: Int[Tensor, " rows"]
) -> tuple[Int[Tensor, "distinct columns"], Int[Tensor, " rows"]]:
    """Return the first row of each label in the order of the table, and for each row its number."""
    rows = torch.arange(len(label), device=label.device)
    first = rows.new_full((int(label.max()) + 1,), len(label))
    first, order = first.scatter_reduce(0, label, rows, "amin").sort()
    return table[first], order.argsort()[label]
