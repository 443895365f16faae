"""Some responses of a run, to read."""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from rich.table import Table

from lit_rl.algorithms.hooks import RLCallback
from lit_rl.callbacks.json_lines import append_json_lines
from lit_rl.callbacks.run_folder import run_folder
from lit_rl.callbacks.terminal import cell, console
from lit_rl.evaluation.samples import sample_rows
from lit_rl.types import Experience, ScoredRollout

PROMPT_CHARACTERS = 80
RESPONSE_CHARACTERS = 240


class SampleLog(RLCallback):
    """Writes responses to `samples.jsonl` in the run folder and shows them on the terminal.

    That is done in the first iteration, and in every `every_n_iterations`-th after it. The samples
    are spread over the batch of rank 0, so they answer different prompts.

    Args:
        num_samples: responses each time.
        every_n_iterations: iterations from one time to the next.
    """

    def __init__(self, num_samples: int = 3, every_n_iterations: int = 10) -> None:
        if num_samples < 1 or every_n_iterations < 1:
            raise ValueError(
                f"num_samples is {num_samples} and every_n_iterations {every_n_iterations}: both "
                "must be at least 1; leave the callback out for no samples"
            )
        self.num_samples = num_samples
        self.every_n_iterations = every_n_iterations
        self._path: Path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the file."""
        self._path = run_folder(trainer) / "samples.jsonl"

    def on_rollout(
        self, trainer: Trainer, module: Any, scored: ScoredRollout, experience: Experience
    ) -> None:
        """Write and show some responses."""
        if module.iteration % self.every_n_iterations or not trainer.is_global_zero:
            return
        rows, iteration = sample_rows(scored), module.iteration + 1
        count = min(self.num_samples, len(rows))
        samples = [rows[number * len(rows) // count] for number in range(count)]
        append_json_lines(self._path, ({"iteration": iteration} | row for row in samples))
        console().print(sample_table(f"iteration {iteration}", samples))


def sample_table(title: str, samples: list[dict[str, Any]]) -> Table:
    """Return a table of samples in which each text stays within its cell.

    Args:
        title: what the samples are.
        samples: rows of `lit_rl.evaluation.sample_rows`.
    """
    table = Table(title=title, title_justify="left", min_width=len(title), show_lines=True)
    table.add_column("prompt", overflow="fold")
    table.add_column("response", overflow="fold")
    table.add_column("answer", overflow="fold")
    table.add_column("reward", justify="right")
    for row in samples:
        table.add_row(
            cell(row["prompt"], PROMPT_CHARACTERS),
            cell(row["response"], RESPONSE_CHARACTERS),
            cell(row["answer"], PROMPT_CHARACTERS),
            "missing" if row["reward"] is None else f"{row['reward']:.3g}",
        )
    return table
