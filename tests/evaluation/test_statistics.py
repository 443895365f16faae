"""Summaries of named quantities."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from lit_rl.evaluation import Statistics

CPU = torch.device("cpu")


def summary(*batches):
    statistics = Statistics(("value",), CPU)
    for batch in batches:
        statistics.update("value", torch.tensor(batch))
    return statistics.compute()["value"]


def test_summary_by_hand():
    # Values 1, 2, 6: sum 9, mean 3, squared deviations 4 + 1 + 9 = 14, 14 / (3 - 1) = 7.
    result = summary([1.0, 2.0, 6.0])
    assert (result.num_values, result.total, result.mean) == (3, 9.0, 3.0)
    assert result.std == pytest.approx(math.sqrt(7), rel=1e-15)
    assert result.standard_error == pytest.approx(math.sqrt(7 / 3), rel=1e-15)
    assert (result.minimum, result.maximum) == (1.0, 6.0)


def test_any_split_into_batches_gives_the_summary_of_the_whole():
    whole = summary([1.0, 2.0, 6.0, -3.0])
    for split in ([[1.0], [2.0, 6.0], [-3.0]], [[], [1.0, 2.0, 6.0, -3.0], []]):
        assert summary(*split) == pytest.approx(whole, rel=1e-15)


def test_equal_values_have_a_spread_of_exactly_zero():
    # 0.1 has no exact float: sum of squares minus squared sum would leave a rest.
    assert summary([0.1] * 7).std == 0.0
    assert summary([0.1]).std == 0.0


def test_no_value_gives_nan_and_does_not_crash():
    result = summary([])
    assert result.num_values == 0
    assert all(
        math.isnan(value)
        for value in (result.mean, result.std, result.minimum, result.standard_error)
    )


def test_a_nan_is_not_hidden():
    result = summary([1.0, math.nan])
    assert math.isnan(result.mean)
    assert math.isnan(result.std)
    assert math.isnan(result.maximum)


def test_counts_beyond_the_precision_of_float32():
    # 2**24 + 1 is no float32.
    assert summary([2.0**24, 1.0]).total == 2**24 + 1


def test_booleans_and_integers_count_as_numbers():
    assert summary([True, False, False, False]).mean == 0.25
    assert summary([3, 4]).mean == 3.5


def test_quantities_do_not_mix():
    statistics = Statistics(("first", "second"), CPU)
    statistics.update("second", torch.tensor([[1.0], [3.0]]))
    result = statistics.compute()
    assert list(result) == ["first", "second"]
    assert (result["first"].num_values, result["second"].mean) == (0, 2.0)


def summarise_part(rank, folder):
    """Two ranks with unequal numbers of values: rank 0 has three, rank 1 has one or none."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    statistics = Statistics(("value", "only rank 0"), CPU)
    if rank == 0:
        statistics.update("value", torch.tensor([1.0, 2.0, 6.0]))
        statistics.update("only rank 0", torch.tensor([5.0]))
    else:
        statistics.update("value", torch.tensor([-3.0]))
    torch.save(statistics.compute(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_give_the_summary_of_the_whole(tmp_path):
    start_processes(summarise_part, (str(tmp_path),), nprocs=2, start_method="spawn")
    whole = summary([1.0, 2.0, 6.0, -3.0])
    for rank in range(2):
        result = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        # Mean of rank means would be (3 - 3) / 2 = 0; the mean of the four values is 1.5.
        assert result["value"].mean == 1.5
        assert result["value"] == pytest.approx(whole, rel=1e-15)
        assert result["only rank 0"] == (1, 5.0, 0.0, 5.0, 5.0)
