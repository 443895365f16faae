"""The strategies with which the loop is right."""

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from lit_rl.strategies.fsdp2 import FSDP2, FullySharded
from lit_rl.strategies.parallelism import Parallelism
from lit_rl.strategies.zero import DeepSpeed, ZeRO
from lit_rl.strategies.zero_on_cpu import DeepSpeedOnCPU

NAMES = ("auto", "ddp")
"""Of strategies that the Trainer knows by name; ddp_spawn is a kind of ddp."""

PARALLELISMS: dict[type[Strategy], type[Parallelism]] = {
    SingleDeviceStrategy: Parallelism,
    DDPStrategy: Parallelism,
    FSDP2: FullySharded,
    DeepSpeed: ZeRO,
    DeepSpeedOnCPU: ZeRO,
}
"""What each strategy means for the loop."""


def check_strategy(strategy: str | Strategy) -> None:
    """Refuse a strategy, given itself or by its name, with which the loop would be wrong.

    Raises:
        ValueError: with the configuration to use instead.
    """
    if isinstance(strategy, str):
        name, supported = strategy, strategy.startswith(NAMES)
    else:  # Lightning derives DeepSpeed's strategy from that of DDP
        name, supported = type(strategy).__name__, type(strategy) in PARALLELISMS
    if not supported:
        raise ValueError(f"trainer.strategy {name} is not supported: {_advice(name.lower())}")


def _advice(name: str) -> str:
    if "fsdp" in name:
        return (
            "its wrapping of the whole module forbids several updates per training step. FSDP2 "
            "does not: use --config configs/strategy/fsdp2.yaml"
        )
    if "deepspeed" in name:
        return (
            "its own settings would clip and accumulate in the loop's place. Use --config "
            "configs/strategy/deepspeed_2.yaml, or another stage"
        )
    return (
        "gradients and generation need an adapter of their own. Use --trainer.strategy auto (one "
        "device) or ddp, or --config configs/strategy/fsdp2.yaml or deepspeed_2.yaml"
    )


def parallelism_of(strategy: Strategy) -> Parallelism:
    """Return what a supported strategy means for the loop."""
    return PARALLELISMS[type(strategy)](strategy)
