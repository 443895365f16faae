"""A resumed run that has no iteration left does what follows the last one."""

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.utilities.rank_zero import rank_zero_warn


class ResumedFitLoop(_FitLoop):
    """Lightning's loop, which begins and ends also where no iteration is left between the two.

    A run that was killed behind its last checkpoint may lack the validation that was due then, its
    export, curve and summary. Lightning's own loop would return at once.
    """

    def run(self) -> None:
        """Train the iterations that are left, if any."""
        self.setup_data()
        if not self.done:
            super().run()
            return
        rank_zero_warn(
            "no iteration is left of those that the settings ask for, so only what follows the "
            "last one is done, such as a validation that is due and the export: raise "
            "--trainer.max_epochs to train on"
        )
        self.on_run_start()
        self.on_run_end()


def take_resumed_loop(trainer: Trainer) -> None:
    """Let a trainer go on where its run was: what was checked at the start is not checked again."""
    loop = ResumedFitLoop(trainer)
    # Its settings and data, which are set up already where a strategy loads weights itself.
    vars(loop).update(vars(trainer.fit_loop))
    trainer.fit_loop = loop
    trainer.num_sanity_val_steps = 0
