"""What a run needs of the memory of each device, by strategy: an estimate before anything is run.

python -m lit_rl.memory --config configs/algorithm/grpo.yaml --devices 1,8
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import lit_rl
from lit_rl.algorithms import PolicyGradient
from lit_rl.callbacks.footprint import ALONE, STRATEGIES, footprint, unit_of
from lit_rl.callbacks.terminal import console
from lit_rl.cli import RLCLI
from lit_rl.data import PromptDataModule

WIDTH = 140
"""Letters of a line; a narrower screen breaks lines, and no number is cut."""


class Planned(RLCLI):
    """The command line, which reads a configuration and runs nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def planned(arguments: Sequence[str]) -> tuple[PolicyGradient, PromptDataModule]:
    """Return the algorithm and the data of the options of `train.py fit`.

    Args:
        arguments: the options.
    """
    base = Path(lit_rl.__file__).parents[1] / "configs" / "base.yaml"
    cli = Planned(base, ["fit", *arguments])
    cli.model._trainer = cli.trainer
    return cli.model, cli.datamodule


def table(module: PolicyGradient, data: PromptDataModule, devices: Sequence[int]) -> Table:
    """Return the memory per device by strategy and number of devices, in GiB or MiB."""
    rows = []
    for number in devices:
        held = footprint(module, data, number)
        for strategy in [ALONE] if number == 1 else STRATEGIES:
            parts = held.parts(strategy, number)
            stages = held.stages(strategy, number)
            stage = max(stages, key=lambda name: stages[name])
            rows.append((strategy.name, str(number), [*parts.values(), stages[stage]], stage))
    unit, size = unit_of(rows[0][2][-1])
    result = Table("strategy", "devices", *parts, "peak", "in", title=f"{unit} per device")
    for name, count, numbers, stage in rows:
        result.add_row(name, count, *(f"{value / size:.3g}" for value in numbers), stage)
    return result


def numbers_of_devices(text: str) -> list[int]:
    """Return the numbers of devices of a text such as 1,2,8; exit with 2 for any other text."""
    numbers = text.split(",")
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        sys.stderr.write(
            f"error: devices {text!r} must be numbers of at least 1, such as --devices 1,2,8\n"
        )
        sys.exit(2)
    return [int(number) for number in numbers]


def main(arguments: Sequence[str]) -> None:
    """Print the table of a configuration.

    Args:
        arguments: the options of `train.py fit`, and `--devices` with numbers, such as 1,2,8.
    """
    rest, devices = [*arguments], [1, 2, 4, 8]
    if "--devices" in rest:
        place = rest.index("--devices")
        devices = numbers_of_devices(",".join(rest[place + 1 : place + 2]))
        del rest[place : place + 2]
    Console(width=max(console().width, WIDTH)).print(table(*planned(rest), devices))


if __name__ == "__main__":
    main(sys.argv[1:])
