"""What differs between one device and many: strategies, and what each of them asks of the loop."""

from lit_rl.strategies.choice import check_strategy, parallelism_of
from lit_rl.strategies.fsdp2 import FSDP2
from lit_rl.strategies.parallelism import Parallelism
from lit_rl.strategies.zero import DeepSpeed
from lit_rl.strategies.zero_on_cpu import DeepSpeedOnCPU

__all__ = [
    "FSDP2",
    "DeepSpeed",
    "DeepSpeedOnCPU",
    "Parallelism",
    "check_strategy",
    "parallelism_of",
]
