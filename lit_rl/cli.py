"""The command line: LightningCLI with a base configuration, run folders and readable errors."""

import logging
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from transformers.utils.logging import disable_progress_bar

from lit_rl.algorithms import RLModule
from lit_rl.algorithms.hooks import callbacks_of
from lit_rl.algorithms.optimization import check_precision
from lit_rl.callbacks import EndTogether, IterationProgressBar, StopOnInterrupt
from lit_rl.callbacks.metrics_file import MetricsFile
from lit_rl.callbacks.stop_on_interrupt import EXIT_CODE
from lit_rl.checkpoints import VerifiedCheckpointIO, newest_valid
from lit_rl.config_choices import with_own_defaults
from lit_rl.config_errors import details, explain
from lit_rl.rewards.checked_scores import WrongValueError
from lit_rl.strategies import check_strategy, parallelism_of


class RLArgumentParser(LightningArgumentParser):
    """A parser that takes no abbreviated key and whose errors begin with the key that is wrong."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the wrong key and what would be right, else all that is known; exit with 2."""
        if not self.exit_on_error:  # one of several attempts to read a value
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        known = [action.dest for action in parser._actions]
        sys.stderr.write("\n".join([f"error: {explain(message, known)}", *details(message), ""]))
        self.exit(2)


def run_seed(seed_everything: bool | int) -> int:
    """Return the one seed of a run, which the model and the data receive.

    Raises:
        ValueError: for a seed that not every library takes.
    """
    if isinstance(seed_everything, bool) or not 0 <= seed_everything < 2**32:
        raise ValueError(
            f"seed_everything is {seed_everything}, must be a number from 0 to {2**32 - 1}, such "
            "as 0"
        )
    return seed_everything


class RLCLI(LightningCLI):
    """LightningCLI for algorithms of lit_rl.

    - `base_config` is read before every other `--config`, so a configuration holds only what
      differs from it. A class that replaces another, such as an advantage estimator, begins with
      its own defaults.
    - `seed_everything` is the one seed: the model and the data receive it.
    - Every run has its own folder below `trainer.default_root_dir` (`runs`), which holds the
      resolved configuration and everything that the run writes.
    - `--ckpt_path last` is the newest whole checkpoint of the runs of the same algorithm. What the
      configuration and the command line say holds over what a checkpoint stores.
    - Of two callbacks of one class that a checkpoint cannot tell apart, the later one holds, so one
      that is added with `--trainer.callbacks+` replaces that of `base_config`.
    - Checkpoints are written and read by `VerifiedCheckpointIO`, unless `trainer.plugins` is set.
    """

    def __init__(self, base_config: Path, args: ArgsType = None) -> None:
        self.base_config = base_config
        silence_libraries()
        super().__init__(
            RLModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=RLArgumentParser,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            args=args,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The Trainer's methods that make sense here: held-out prompts are for `validate`."""
        subcommands = LightningCLI.subcommands()
        del subcommands["test"]
        return subcommands

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Give the seed of the run to whoever draws random numbers."""
        for target in ("model.init_args.seed", "data.init_args.seed"):
            parser.link_arguments("seed_everything", target, compute_fn=run_seed)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse with the base configuration before all others."""
        given = list(sys.argv[1:] if args is None else args)
        if given and given[0] in self.subcommands():
            given[1:] = with_own_defaults(["--config", str(self.base_config), *given[1:]])
        self.config = parser.parse_args(given)

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration alone: a checkpoint stores weights and state, not settings."""

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        """Make what a check or a constructor refuses an error of the configuration."""
        try:
            yield
        except (ValueError, OSError, ImportError, MisconfigurationException) as error:
            self._parser(self.subcommand).error(str(error))

    def before_instantiate_classes(self) -> None:
        """Choose the folder of this run, and the run that `--ckpt_path last` means."""
        config = self.config[self.subcommand]
        root = outside_of_runs(Path(config.trainer.default_root_dir or "runs"))
        algorithm = config.model.class_path.rpartition(".")[2].lower()
        name = algorithm if self.subcommand == "fit" else f"{algorithm}-{self.subcommand}"
        with self._readable_errors():
            check_trainer_settings(config.trainer)
            if config.ckpt_path is not None:
                config.ckpt_path = str(checkpoint_path(config.ckpt_path, root, algorithm))
                rank_zero_info(f"Weights and state from {config.ckpt_path}")
        config.trainer.default_root_dir = str(new_folder(root, name))

    def instantiate_classes(self) -> None:
        """Instantiate the model, the data and the trainer."""
        with self._readable_errors():
            super().instantiate_classes()

    def _run_subcommand(self, subcommand: str) -> None:
        """Run; what the set-up refuses, before anything is trained, is a configuration's error.

        So is a reward that gives what is no reward, whenever it does.

        A run that a signal stopped ends with `EXIT_CODE`, on the rank that started the others.
        """
        try:
            if path := self.config[subcommand].ckpt_path:
                parallelism_of(self.trainer.strategy).check_checkpoint(Path(path))
            super()._run_subcommand(subcommand)
            stopped = any(c.stopped for c in callbacks_of(self.trainer, StopOnInterrupt))
            if stopped and self.trainer.local_rank == 0:
                sys.exit(EXIT_CODE)
        except (ValueError, OSError, EOFError, ImportError, MisconfigurationException) as error:
            if self.model.training_begun and not isinstance(error, WrongValueError):
                raise
            self._leave_no_folder()
            text = str(error) or f"{type(error).__name__} while reading {self._ckpt_path}"
            self._parser(subcommand).error(text)
        except RuntimeError as error:
            if self.model.training_begun or "loading state_dict" not in str(error):
                raise
            self._leave_no_folder()
            self._parser(subcommand).error(
                f"{self._ckpt_path} does not fit the model of this configuration; give the "
                f"--config files of the run that wrote it\n{error}"
            )

    def _leave_no_folder(self) -> None:
        """Remove the folder of a run that was refused, unless there is something in it to read."""
        folder = Path(self.config[self.subcommand].trainer.default_root_dir)
        files = [path for path in folder.rglob("*") if path.is_file()]
        unread = [path for path in files if path.name.startswith(("config.yaml", "events."))]
        if self.trainer.is_global_zero and files == unread:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def _ckpt_path(self) -> str:
        return str(self.config[self.subcommand].ckpt_path)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add the loggers of the run folder, the progress bar, and an end of all processes."""
        settings = self._get(self.config_init, "trainer")
        folder = settings["default_root_dir"]
        if settings["logger"] in (None, True):
            kwargs["logger"] = [
                MetricsFile(folder),
                TensorBoardLogger(folder, name="", version=""),
            ]
        callbacks = settings["callbacks"] = without_replaced(settings["callbacks"] or [])
        callbacks += [StopOnInterrupt(), EndTogether()]
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if settings["enable_progress_bar"] in (None, True) and not has_bar:
            callbacks.append(IterationProgressBar())
        trainer: Trainer = super().instantiate_trainer(**kwargs)
        if not settings["plugins"]:
            trainer.strategy.checkpoint_io = VerifiedCheckpointIO()
        return trainer


def without_replaced(callbacks: Sequence[Callback]) -> list[Callback]:
    """Leave out a callback that a later one of its class replaces: a checkpoint has room for one.

    Args:
        callbacks: those of the base configuration and those added to them.
    """
    stateful = [c for c in callbacks if type(c).state_dict is not Callback.state_dict]
    last = {callback.state_key: callback for callback in stateful}
    kept = [c for c in callbacks if last.get(c.state_key, c) is c]
    for callback in callbacks:
        if callback not in kept:
            rank_zero_info(f"Of several {type(callback).__name__} the one given last holds")
    return kept


def silence_libraries() -> None:
    """Leave out what libraries print on every run and what says nothing about this one."""
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated")
    tips = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    tips.addFilter(lambda record: "litlogger" not in record.getMessage())
    no_gpu = logging.getLogger("DeepSpeed")  # which transformers imports where it is installed
    no_gpu.addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    disable_progress_bar()  # of reading and writing weights


def check_trainer_settings(trainer: Namespace) -> None:
    """Refuse the Trainer's options that the module has of its own, or cannot honour.

    Args:
        trainer: the arguments of the Trainer.

    Raises:
        ValueError: naming the option to use instead.
    """
    if trainer.gradient_clip_val is not None:
        raise ValueError(
            f"trainer.gradient_clip_val {trainer.gradient_clip_val} has no effect on manual "
            f"optimization; use --model.max_grad_norm {trainer.gradient_clip_val}"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"trainer.accumulate_grad_batches {trainer.accumulate_grad_batches} has no effect "
            "on manual optimization; micro-batches follow from --model.micro_batch_tokens"
        )
    if trainer.max_steps != -1:
        raise ValueError(
            f"trainer.max_steps {trainer.max_steps} would count optimizer steps, of which an "
            "iteration has several; bound a run by --trainer.max_epochs and "
            "--trainer.limit_train_batches, the iterations of an epoch"
        )
    # The Trainer itself would put another precision in the place of one that a CPU lacks, or look
    # for packages that a strategy needs.
    check_precision(trainer.precision)
    if isinstance(trainer.strategy, str):
        check_strategy(trainer.strategy)


def checkpoint_path(path: str, root: Path, algorithm: str) -> Path:
    """Return the checkpoint that `--ckpt_path` means: a file, or `last`.

    Raises:
        ValueError: if there is none.
    """
    if path == "last":
        return last_checkpoint(root, algorithm)
    if not Path(path).exists():
        raise ValueError(
            f"ckpt_path: there is no {path}; name a file such as "
            f"{root}/.../checkpoints/last.ckpt, or last for the newest run of {algorithm}"
        )
    return Path(path)


def outside_of_runs(root: Path) -> Path:
    """Return the folder of the runs where `root` is that of one, as in the `config.yaml` of a run.

    Args:
        root: the folder that a configuration names.
    """
    is_run = re.match(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-", root.name)  # as `new_folder` names them
    return root.parent if is_run and (root / "config.yaml").is_file() else root


def new_folder(root: Path, name: str) -> Path:
    """Return a path below `root` that does not exist yet, named by the time and `name`."""
    stem = f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{name}"
    candidates = (root / (stem if n == 1 else f"{stem}-{n}") for n in range(1, 1000))
    return next(path for path in candidates if not path.exists())


def last_checkpoint(root: Path, algorithm: str) -> Path:
    """Return the newest checkpoint of the runs of an algorithm that is whole.

    A broken one is skipped with a warning.

    Raises:
        ValueError: if there is none.
    """
    own_runs = re.compile(rf"-{re.escape(algorithm)}(-\d+)?$")  # as `new_folder` names them
    checkpoints = root.glob(f"*-{algorithm}*/checkpoints/*.ckpt")
    newest = newest_valid([path for path in checkpoints if own_runs.search(path.parents[1].name)])
    if newest is None:
        raise ValueError(
            f"--ckpt_path last: no run of {algorithm} below {root} has a whole checkpoint, such as "
            "checkpoints/last.ckpt; name a checkpoint file, or start without --ckpt_path"
        )
    return newest
