"""What devices.py says of seconds that are known."""

import devices
from devices import ALONE, report


def test_a_ratio_is_the_seconds_of_one_process_over_those_of_two():
    """By hand: medians 4 and 2.5 seconds of an update, 4 / 2.5 = 1.6."""
    one = [{"rollout": 3.0, "update": value, "iteration": 9.0} for value in (4.0, 3.0, 8.0)]
    two = [{"rollout": 1.5, "update": value, "iteration": 4.5} for value in (2.5, 9.0, 2.0)]
    head, _, alone, both = report({ALONE: one, "ddp": two}).splitlines()
    assert head == ("|  | rollout (s) | ratio | update (s) | ratio | iteration (s) | ratio |")
    assert alone == "| one process | 3.000 | 1.00 | 4.000 | 1.00 | 9.000 | 1.00 |"
    assert both == "| ddp | 1.500 | 2.00 | 2.500 | 1.60 | 4.500 | 2.00 |"


def test_the_limit_of_the_machine_is_the_slower_of_two_runs_of_half_the_prompts(monkeypatch):
    """By hand: half of 32 prompts is 16."""
    asked, left = [], [(1.0, 2.0, 3.0), (2.0, 1.0, 3.5)]

    def seconds(*arguments):
        asked.append(arguments)
        return dict(zip(devices.STAGES, left.pop(), strict=True))

    monkeypatch.setattr(devices, "seconds", seconds)
    assert devices.slower_of_two(5) == {"rollout": 2.0, "update": 2.0, "iteration": 3.5}
    assert asked == [(ALONE, 5, "16")] * 2
