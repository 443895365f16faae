import pytest

from lit_rl.rewards import Length


def test_length_is_counted_in_tokens_and_falls_linearly_outside_the_range(rollout_of):
    rollout = rollout_of(["x"] * 7, lengths=[1, 2, 4, 8, 10, 12, 20])
    # minimum 4: 1/4, 2/4; maximum 8: 2 - 10/8, 2 - 12/8, and never below 0.
    expected = [0.25, 0.5, 1.0, 1.0, 0.75, 0.5, 0.0]
    assert Length(maximum=8, minimum=4).values(rollout) == expected


@pytest.mark.parametrize(("minimum", "maximum"), [(0, 4), (5, 4)])
def test_an_impossible_range_is_refused(minimum, maximum):
    with pytest.raises(ValueError, match=rf"minimum is {minimum} and maximum is {maximum}"):
        Length(maximum=maximum, minimum=minimum)
