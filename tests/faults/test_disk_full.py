"""A full disk ends a run with a clear error and whole checkpoints, and space lets it go on.

The limit of the size of a file stands for the disk: the system refuses the same write, with the
error of a file that is too large in the place of that of a full disk.
"""

import errno
import resource
from pathlib import Path

import pytest
import torch
import yaml

from lit_rl.callbacks import RLCallback
from lit_rl.cli import RLCLI

ROOT = Path(__file__).parent.parent.parent
GRPO = ["--config", str(ROOT / "configs" / "algorithm" / "grpo.yaml"), "--config", "job.yaml"]

pytestmark = pytest.mark.slow


class Disk(RLCallback):
    """Lets no file grow beyond a size from the end of an iteration on."""

    def __init__(self, iteration: int, size: int):
        self.iteration, self.size = iteration, size

    def on_iteration_end(self, trainer, module):
        if module.iteration == self.iteration:
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, most))


@pytest.fixture(autouse=True)
def disk(tmp_path, monkeypatch):
    """Run in a folder of this test; make space again after it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.chdir(tmp_path)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run(*arguments, callbacks=()):
    job = {
        "trainer": {
            "accelerator": "cpu",
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            "limit_train_batches": 4,
            "max_epochs": 1,
            "enable_progress_bar": False,
            "callbacks": [
                {"class_path": "lit_rl.callbacks.RewardMetrics"},
                {
                    "class_path": "lit_rl.callbacks.SampleLog",
                    "init_args": {"every_n_iterations": 1},
                },
                {"class_path": "lit_rl.callbacks.IterationCheckpoint"},
            ],
        },
        "data": {"init_args": {"batch_size": 4}},
    }
    Path("job.yaml").write_text(yaml.safe_dump(job))

    class CommandLine(RLCLI):
        def instantiate_trainer(self, **kwargs):
            self._get(self.config_init, "trainer")["callbacks"].extend(callbacks)
            return super().instantiate_trainer(**kwargs)

    return CommandLine(ROOT / "configs" / "base.yaml", ["fit", *GRPO, *arguments])


# A checkpoint of this model has some 100 kB, the first rows of metrics and samples some 100 bytes.
@pytest.mark.parametrize(
    ("size", "file"),
    [(20_000, r"iteration=2\.ckpt"), (100, r"metrics\.csv")],
)
def test_saving_and_logging(size, file, disk, tmp_path):
    with pytest.raises(OSError, match=rf"{file} could not be written: File too large") as full:
        run(callbacks=[Disk(2, size)])
    assert full.value.errno == errno.EFBIG
    (last,) = tmp_path.glob("runs/*/checkpoints/last.ckpt")
    assert {path.name for path in last.parent.iterdir()} == {"last.ckpt", "iteration=1.ckpt"}
    assert torch.load(last, weights_only=True)["lit_rl"]["iteration"] == 1

    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert run("--ckpt_path", "last").model.iteration == 4
