"""What a run is, in a few lines before it begins."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich.table import Table

from lit_rl.algorithms.hooks import callbacks_of
from lit_rl.callbacks.batch_ledger import BatchLedger
from lit_rl.callbacks.footprint import footprint, strategy_of, unit_of
from lit_rl.callbacks.formula import algorithm_formulas
from lit_rl.callbacks.kl_controllers import KLController
from lit_rl.callbacks.suspicious_settings import suspicious_settings
from lit_rl.callbacks.terminal import cell, console
from lit_rl.data import PromptDataModule, prompt_data

CHARACTERS = 400


class RunPlan(Callback):
    """Prints the algorithm as formulas with its numbers, the batch ledger and the memory needed.

    The formulas are those of the docstrings of the choices, and the memory is the estimate of
    `python -m lit_rl.memory` for the strategy and the devices of the run. A combination of settings
    that is allowed, but as a rule not meant, is warned of in one sentence; docs/health.md lists
    them.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Say what begins."""
        if trainer.is_global_zero:
            formulas = algorithm_formulas(pl_module, first_kl_coef(trainer, pl_module))
            console().print(plan_table(type(pl_module).__name__, formulas))
            if (data := prompt_data(trainer)) is not None:
                ledger = batch_ledger(trainer, pl_module, data)
                console().print(plan_table("batches", ledger.lines()))
                console().print(plan_table("memory", memory_lines(trainer, pl_module, data)))
        for sentence in suspicious_settings(trainer, pl_module):
            rank_zero_warn(sentence)


def first_kl_coef(trainer: Trainer, module: Any) -> float:
    """Return the weight of the KL in the first iteration, which a controller may set."""
    controllers = callbacks_of(trainer, KLController)
    return float(controllers[0].coefficient(module.iteration) if controllers else module.kl_coef)


def batch_ledger(trainer: Trainer, module: Any, data: PromptDataModule) -> BatchLedger:
    """Return the counts of a run."""
    return BatchLedger(
        prompts=data.batch_size,
        group_size=module.group_size,
        epochs=module.update_epochs,
        minibatches=module.num_minibatches,
        ranks=trainer.world_size,
        longest_row=data.max_prompt_tokens + module.sampling.max_new_tokens,
        micro_batch_tokens=module.micro_batch_tokens,
        iterations=module.num_iterations,
        rounds=getattr(module, "max_rounds", 1),
    )


def memory_lines(trainer: Trainer, module: Any, data: PromptDataModule) -> dict[str, str]:
    """Return what a run needs of the memory of each device, by `footprint`, or why that is open."""
    if module.source.quantized or not module.policy.can_pack:
        return {"estimate": "none, for 4-bit weights or for this architecture"}
    devices = trainer.world_size
    held = footprint(module, data, devices)
    strategy = strategy_of(trainer.strategy)
    stages = held.stages(strategy, devices)
    stage = max(stages, key=lambda name: stages[name])
    parts = held.parts(strategy, devices).items()
    unit, size_of_unit = unit_of(stages[stage])
    return {
        "peak": f"{stages[stage] / size_of_unit:.3g} {unit} per device, when it is to {stage}",
        "parts": ", ".join(f"{name} {size / size_of_unit:.3g}" for name, size in parts if size),
    }


def plan_table(title: str, lines: Mapping[str, str]) -> Table:
    """Return named lines as a table without a head.

    Args:
        title: what they are of.
        lines: texts by name.
    """
    table = Table(title=title, title_justify="left", show_header=False, min_width=len(title))
    table.add_column("name", no_wrap=True)
    table.add_column("text", overflow="fold")
    for name, text in lines.items():
        table.add_row(cell(name, CHARACTERS), cell(text, CHARACTERS))
    return table
