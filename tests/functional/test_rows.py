import pytest
import torch

from lit_rl.functional import distinct_rows


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("columns", [1, 3, 9])
def test_each_row_once_in_the_order_of_the_table(rows, columns):
    """By a dictionary, which keeps the order in which its keys came."""
    table = torch.randint(-1, 2, (rows, columns), generator=torch.Generator().manual_seed(rows))
    keys = [tuple(row) for row in table.tolist()]
    expected = list(dict.fromkeys(keys))
    distinct, number = distinct_rows(table)
    assert distinct.tolist() == [list(key) for key in expected]
    assert number.tolist() == [expected.index(key) for key in keys]


def test_rows_that_share_a_hash_are_told_apart(monkeypatch):
    """Law: whatever the hash. With factors of 1 the hash is the sum: 3 of both rows here."""
    monkeypatch.setattr(torch, "randint", lambda high, size, **_: torch.ones(size).long())
    table = torch.tensor([[2, 1], [1, 2], [2, 1]])
    rows, number = distinct_rows(table)
    assert rows.tolist() == [[2, 1], [1, 2]]
    assert number.tolist() == [0, 1, 0]
