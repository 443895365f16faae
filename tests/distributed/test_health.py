"""HealthMonitor in two processes: both read the metrics of all responses, and act together."""

import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("health_worker.py")


@pytest.fixture
def scenarios(run_alone, tmp_path):
    run_alone(sys.executable, WORKER, tmp_path)
    return tuple(torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))


def test_alarms_and_actions_are_those_of_all_ranks(scenarios):
    first, second = scenarios
    for name, seen in first.items():
        other = second[name]
        assert seen["monitor"] == other["monitor"], name
        assert seen["iterations"] == other["iterations"], name
        assert seen["rates"] == other["rates"], name
        assert all(map(torch.equal, seen["weights"], other["weights"])), name

    # The alarm rings at the end of the second iteration.
    assert first["stop"]["iterations"] == 2
    assert first["stop"]["monitor"]["rung"] == ["update_kl"]

    # Halved behind each second iteration.
    assert first["lower"]["rates"] == [0.01 * 0.5 ** (n // 2) for n in range(8)]

    # The reward tells the responses of the other rank apart, so there is something to learn.
    assert first["one_rank"]["iterations"] == 8
    assert first["one_rank"]["monitor"]["rung"] == []

    # Wrong in 5 and 6: the weights behind 3 are the last that no wrong iteration saw.
    seen = first["roll_back"]
    assert seen["monitor"]["roll_backs"] == 1
    assert torch.equal(seen["weights"][6], seen["weights"][3])
    assert seen["rates"] == [0.01] * 6 + [0.005] * 2
    resumed = first["resumed"]
    assert len(resumed["weights"]) == 3
    assert all(map(torch.equal, resumed["weights"], seen["weights"][5:]))
    assert resumed["monitor"] == seen["monitor"]
