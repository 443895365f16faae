"""DeepSpeed without a GPU, to see that a run works before it moves to one."""

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy

from lit_rl.strategies.zero import DeepSpeed


class DeepSpeedOnCPU(DeepSpeed):
    """The strategy `DeepSpeed` on CPU processes, for tests; the same arguments.

    DeepSpeed is told of the CPU by `DS_ACCELERATOR`, before its first import.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        super().__init__(*arguments, **settings)

    def setup_environment(self) -> None:
        """Set the processes up without asking for a GPU."""
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Connect the processes without asking for the index of a GPU."""
        import deepspeed

        # An operator for inference, which the first run on a machine would compile for a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, *arguments: Any) -> Any:
        with self._rank_in_place_of_index():
            return super()._setup_model_and_optimizer(*arguments)

    def _initialize_deepspeed_inference(self, model: Any) -> None:
        with self._rank_in_place_of_index():
            super()._initialize_deepspeed_inference(model)

    @contextmanager
    def _rank_in_place_of_index(self) -> Iterator[None]:
        # An engine wants a number for its device, which a CPU does not have.
        import deepspeed

        initialize = deepspeed.initialize
        deepspeed.initialize = lambda args, **settings: initialize(
            args=Namespace(device_rank=self.local_rank), **settings
        )
        try:
            yield
        finally:
            deepspeed.initialize = initialize
