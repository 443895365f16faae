"""The unbiased estimate of pass@k."""

from itertools import combinations
from math import comb

import pytest
import torch

from lit_rl.evaluation import pass_at_k


def estimate(num_correct, num_samples, k):
    return pass_at_k(torch.tensor([num_correct]), num_samples, k).item()


def test_share_of_the_subsets_that_hold_a_correct_response():
    # The definition itself: count subsets of k out of n responses, the first c of them correct.
    n = 6
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations(range(n), k))
            hits = sum(min(subset) < c for subset in subsets)
            assert estimate(c, n, k) == pytest.approx(hits / len(subsets), abs=1e-15)


def test_ends_are_exact():
    assert estimate(0, 8, 4) == 0.0
    assert estimate(8, 8, 1) == 1.0
    # 3 wrong responses cannot fill 4 tries.
    assert estimate(5, 8, 4) == 1.0


def test_pass_at_one_is_the_share_of_correct_responses():
    torch.testing.assert_close(
        pass_at_k(torch.tensor([0, 1, 3]), 4, 1), torch.tensor([0.0, 0.25, 0.75]).double()
    )


def test_many_samples_neither_overflow_nor_lose_digits():
    # C(1000, 500) is about 1e299 and C(2000, 1000) beyond float64; exact value from integers.
    exact = 1 - comb(1990, 1000) / comb(2000, 1000)
    assert estimate(10, 2000, 1000) == pytest.approx(exact, rel=1e-12)
    # One correct of n: the chance to draw it is k / n.
    assert estimate(1, 10**6, 10**3) == pytest.approx(1e-3, rel=1e-10)


def test_counts_may_be_floats():
    assert pass_at_k(torch.tensor([1.0]), 4, 2).item() == 0.5


@pytest.mark.parametrize("k", [0, 5])
def test_k_outside_the_number_of_samples_is_refused(k):
    with pytest.raises(ValueError, match=f"k is {k} but 4 responses were drawn"):
        estimate(1, 4, k)


@pytest.mark.parametrize("num_correct", [-1, 5])
def test_impossible_count_is_refused(num_correct):
    with pytest.raises(ValueError, match=rf"num_correct \[{num_correct}\].*num_samples 4"):
        estimate(num_correct, 4, 1)
