"""The metrics of a run as a file that a killed run leaves whole."""

import csv
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment

from lit_rl.callbacks.run_folder import naming_file


class MetricsFile(CSVLogger):
    """`metrics.csv` in a folder, to which each row is written at once.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder, name="", version="", flush_logs_every_n_steps=1)
        self._experiment: _Writer | None = None

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """What writes the file."""
        if self._experiment is None:
            self._experiment = _Writer(log_dir=self.log_dir)
        return self._experiment


class _Writer(ExperimentWriter):
    def save(self) -> None:
        with naming_file(Path(self.metrics_file_path)):
            super().save()

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        # A run that is killed meanwhile leaves the file of before.
        path = Path(self.metrics_file_path)
        part = path.with_name(f".{path.name}.part")
        with path.open(newline="") as old, part.open("w", newline="") as new:
            writer = csv.DictWriter(new, fieldnames=fieldnames)
            writer.writeheader()
            writer.writerows(csv.DictReader(old))
        part.replace(path)
