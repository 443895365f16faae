"""Law: what two processes share is what one process that has all rows gets."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_rl.functional import (
    gather_over_ranks,
    maximum_over_ranks,
    minimum_over_ranks,
    sum_over_ranks,
)

SHARED = ["sum", "minimum", "maximum", "gathered", "gathered numbers", "batch mean", "average"]
PER_ROW = ["whitened", "top", "whitened return", "normalized parts"]


def test_a_process_on_its_own_keeps_its_numbers():
    values = torch.tensor([1.0, 2.0])
    for reduction in (sum_over_ranks, minimum_over_ranks, maximum_over_ranks, gather_over_ranks):
        assert torch.equal(reduction(values), values)


def test_a_sum_is_a_new_tensor_without_gradient():
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    total = sum_over_ranks(values)
    total += 1
    assert values.tolist() == [1.0, 2.0]
    assert not total.requires_grad


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """What one process got, and each of two."""
    folder = tmp_path_factory.mktemp("ranks")
    worker = Path(__file__).with_name("two_ranks.py")
    subprocess.run([sys.executable, str(worker), str(folder)], check=True, timeout=800)
    return [torch.load(folder / f"{name}.pt") for name in ("alone", "0", "1")]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_both_processes_get_the_numbers_of_the_whole(stored, name):
    alone, first, second = stored
    assert torch.equal(first["shared"][name], alone[name])
    assert torch.equal(second["shared"][name], alone[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", PER_ROW)
def test_each_process_gets_its_rows_of_the_whole(stored, name):
    alone, first, second = stored
    rows = torch.cat([first["shared"][name], second["shared"][name]])
    torch.testing.assert_close(rows, alone[name])


@pytest.mark.slow
def test_a_process_without_tokens_joins_in_and_changes_nothing(stored):
    alone, first, second = stored
    for name in ("whitened", "top"):
        torch.testing.assert_close(first["one-sided"][name], alone[name])
        assert second["one-sided"][name].eq(0).all()


@pytest.mark.slow
def test_rows_of_different_number_are_gathered(stored):
    alone, first, second = stored
    for each in (first, second):
        assert torch.equal(each["one-sided"]["gathered"], alone["gathered"])
