"""First and last values of metrics."""

import math

import pytest

from lit_rl.callbacks.metric_history import MetricHistory


@pytest.fixture
def history():
    def after(*values, num_first=2, num_last=3):
        history = MetricHistory(("a",), num_first=num_first, num_last=num_last)
        for value in values:
            history.add({"a": value, "b": 7.0})
        return history

    return after


def test_start_is_the_median_of_the_first_values_and_stays(history):
    assert math.isnan(history(1.0).start("a"))
    assert history(1.0, 2.0).start("a") == 1.5
    assert history(1.0, 2.0, 50.0, 60.0).start("a") == 1.5


def test_usual_is_the_median_of_the_last_values(history):
    assert math.isnan(history(1.0, 2.0).usual("a"))
    assert history(1.0, 2.0, 9.0).usual("a") == 2.0
    assert history(1.0, 2.0, 9.0, 10.0).usual("a") == 9.0


def test_has_risen_compares_the_mean_of_the_newest_with_each_of_the_first(history):
    assert not history().has_risen("a")
    assert not history(1.0, 3.0).has_risen("a")
    # The newest two: (3 + 3) / 2 is not above 3; (3 + 4) / 2 is.
    assert not history(1.0, 3.0, 3.0).has_risen("a")
    assert history(1.0, 3.0, 3.0, 4.0).has_risen("a")


def test_what_is_no_number_is_left_out(history):
    skipped = history(1.0, math.nan, math.inf, 2.0)
    skipped.add({"b": 3.0})
    assert skipped.first == skipped.last == {"a": [1.0, 2.0]}


def test_a_checkpoint_restores_it(history):
    first, resumed = history(1.0, 2.0, 3.0), history()
    resumed.load_state_dict(first.state_dict())
    for course in (first, resumed):
        course.add({"a": 4.0})
    assert (
        resumed.state_dict()
        == first.state_dict()
        == {
            "first": {"a": [1.0, 2.0]},
            "last": {"a": [2.0, 3.0, 4.0]},
        }
    )
