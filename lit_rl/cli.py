"""The command line: LightningCLI with a base configuration, run folders and readable errors."""

import difflib
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from pydoc import locate
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from transformers.utils.logging import disable_progress_bar

from lit_rl.algorithms import RLModule
from lit_rl.callbacks import IterationProgressBar


class RLArgumentParser(LightningArgumentParser):
    """A parser that takes no abbreviated key and whose errors begin with the key that is wrong."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the wrong key with the nearest right one, then all that is known; exit with 2."""
        if not self.exit_on_error:  # one of several attempts to read a value
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        known = [action.dest for action in parser._actions]
        sys.stderr.write(f"error: {explain(message, known)}\n\n{message}\n")
        self.exit(2)


def explain(message: str, known: Iterable[str]) -> str:
    """Return a line that begins with the wrong key of a parser's message and names a near one.

    Args:
        message: what jsonargparse says.
        known: the keys of the parser.

    Example:
        >>> explain("unrecognized arguments: --trainr.max_epochs=3", ["trainer.max_epochs"])
        'trainr.max_epochs is not a key; the nearest is trainer.max_epochs'
    """
    classes = re.findall(r"Problem with given class_path '([\w.]+)'", message)
    if wrong := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        module, name = wrong.groups()
        return _nearest(f"{module}.{name}", name, dir(locate(module)), "in " + module)
    patterns = (
        r"unrecognized arguments: -*([\w.]+)",
        r"does not accept option '([\w.]+)'",
        r"Option '([\w.]+)' is not accepted",
    )
    for pattern in patterns:
        if wrong := re.search(pattern, message):
            key = wrong.group(1)
            if not classes:
                return _nearest(key, key, known, "")
            options = _parameters(locate(classes[-1]))
            return _nearest(key, key.split(".")[0], options, "of " + classes[-1])
    return _refused_value(message)


def _refused_value(message: str) -> str:
    """Return the path of the key whose value was refused, and the innermost reason."""
    path = ".".join(re.findall(r'Parser key "([\w.]+)"', message))
    frame = (
        r"Parser key .*:$|Problem with given|Does not validate|Subtypes:|Expected a <class 'None"
    )
    lines = [line.strip(" -") for line in message.split("Errors:")[-1].strip().splitlines()]
    reason = next(line for line in lines if not re.match(frame, line))
    reason = re.sub(r'^Parser key "[\w.]+": ', "", reason)
    return f"{path}: {reason}" if path else reason


def _parameters(kind: Any) -> list[str]:
    """Return the constructor's parameters of a class, those taken through `**kwargs` included."""
    constructors = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
    return [name for init in constructors for name in inspect.signature(init).parameters]


def _nearest(shown: str, key: str, options: Iterable[str], where: str) -> str:
    near = difflib.get_close_matches(key, [o for o in options if o != "self"], n=1, cutoff=0.4)
    text = f"{shown} is not a key {where}".rstrip()
    return f"{text}; the nearest is {near[0]}" if near else text


def run_seed(seed_everything: bool | int) -> int:
    """Return the one seed of a run, which the model and the data receive."""
    if isinstance(seed_everything, bool):
        raise ValueError(f"seed_everything is {seed_everything}, must be a number such as 0")
    return seed_everything


class RLCLI(LightningCLI):
    """LightningCLI for algorithms of lit_rl.

    - `base_config` is read before every other `--config`, so a configuration holds only what
      differs from it.
    - `seed_everything` is the one seed: the model and the data receive it.
    - Every run has its own folder below `trainer.default_root_dir` (`runs`), which holds the
      resolved configuration and everything that the run writes.
    - `--ckpt_path last` is the last checkpoint of the newest run of the same algorithm. What the
      configuration and the command line say holds over what a checkpoint stores.
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
            given[1:1] = ["--config", str(self.base_config)]
        self.config = parser.parse_args(given)

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration alone: a checkpoint stores weights and state, not settings."""

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        """Make what a check or a constructor refuses an error of the configuration."""
        try:
            yield
        except ValueError as error:
            self._parser(self.subcommand).error(str(error))

    def before_instantiate_classes(self) -> None:
        """Choose the folder of this run, and the run that `--ckpt_path last` means."""
        config = self.config[self.subcommand]
        root = Path(config.trainer.default_root_dir or "runs")
        algorithm = config.model.class_path.rpartition(".")[2].lower()
        name = algorithm if self.subcommand == "fit" else f"{algorithm}-{self.subcommand}"
        with self._readable_errors():
            check_manual_optimization(config.trainer)
            if config.ckpt_path == "last":
                config.ckpt_path = str(last_checkpoint(root, algorithm))
        if config.ckpt_path is not None:
            rank_zero_info(f"The run continues from {config.ckpt_path}")
        config.trainer.default_root_dir = str(new_folder(root, name))

    def instantiate_classes(self) -> None:
        """Instantiate the model, the data and the trainer."""
        with self._readable_errors():
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add the loggers of the run folder and the progress bar, unless others were asked for."""
        settings = self._get(self.config_init, "trainer")
        folder = settings["default_root_dir"]
        if settings["logger"] in (None, True):
            kwargs["logger"] = [
                CSVLogger(folder, name="", version=""),
                TensorBoardLogger(folder, name="", version=""),
            ]
        callbacks = settings["callbacks"] = list(settings["callbacks"] or [])
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if settings["enable_progress_bar"] in (None, True) and not has_bar:
            callbacks.append(IterationProgressBar())
        return super().instantiate_trainer(**kwargs)


def silence_libraries() -> None:
    """Leave out what libraries print on every run and what says nothing about this one."""
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
    tips = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    tips.addFilter(lambda record: "litlogger" not in record.getMessage())
    disable_progress_bar()  # of reading and writing weights


def check_manual_optimization(trainer: Namespace) -> None:
    """Refuse the Trainer's options that the module has of its own.

    Args:
        trainer: the arguments of the Trainer.

    Raises:
        ValueError: naming the module's option.
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


def new_folder(root: Path, name: str) -> Path:
    """Return a path below `root` that does not exist yet, named by the time and `name`."""
    stem = f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{name}"
    candidates = (root / (stem if n == 1 else f"{stem}-{n}") for n in range(1, 1000))
    return next(path for path in candidates if not path.exists())


def last_checkpoint(root: Path, algorithm: str) -> Path:
    """Return the last checkpoint of the newest run of an algorithm.

    Raises:
        ValueError: if there is none.
    """
    found = list(root.glob(f"*-{algorithm}*/checkpoints/last.ckpt"))
    if not found:
        raise ValueError(
            f"--ckpt_path last: no run of {algorithm} below {root} has checkpoints/last.ckpt; "
            "name a checkpoint file, or start without --ckpt_path"
        )
    return max(found, key=lambda path: path.stat().st_mtime)
