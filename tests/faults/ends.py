"""Runs a job whole, and killed behind an iteration, in a validation or the export, and resumed.

python ends.py PHASE:TIMES:INTERVAL ... prints as JSON, by moment, in what the two differ. The
moment is the so many-th time in that phase, with a validation behind each INTERVAL iterations.
"""

from pathlib import Path

from kills import Kill, difference, main

ITERATIONS = 8


def of_moment(moment: str, folder: Path) -> list[str]:
    phase, times, interval = moment.split(":")
    iteration = int(times) * int(interval) if phase == "validation" else ITERATIONS
    due = iteration % int(interval) == 0
    return difference(
        folder,
        Kill(phase, int(times)),
        stored={"iteration": iteration, "validation_due": due},
        iterations=ITERATIONS,
        options=["--trainer.val_check_interval", interval],
    )


if __name__ == "__main__":
    main(of_moment)
