import pytest
import torch

from lit_rl.functional import distinct_rows


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("columns", [1, 3, 9])
def test_as_unique_of_torch(rows, columns):
    table = torch.randint(-1, 2, (rows, columns), generator=torch.Generator().manual_seed(rows))
    expected = table.unique(dim=0, return_inverse=True)
    for found, right in zip(distinct_rows(table), expected, strict=True):
        assert torch.equal(found, right)


def test_rows_that_share_a_hash_are_told_apart(monkeypatch):
    """Law: whatever the hash. With factors of 1 the hash is the sum: 3 of both rows here."""
    monkeypatch.setattr(torch, "randint", lambda high, size, **_: torch.ones(size).long())
    table = torch.tensor([[2, 1], [1, 2], [2, 1]])
    rows, number = distinct_rows(table)
    assert rows.tolist() == [[1, 2], [2, 1]]
    assert number.tolist() == [1, 0, 1]
