"""Strategies that are supported, and what is said of the others."""

import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from lit_rl.strategies import FSDP2, check_strategy


@pytest.mark.parametrize("name", ["auto", "ddp", "ddp_spawn", "ddp_find_unused_parameters_true"])
def test_names_of_supported_strategies(name):
    check_strategy(name)


def test_a_strategy_of_our_own_is_supported():
    check_strategy(FSDP2())


@pytest.mark.parametrize("name", ["fsdp", "fsdp_cpu_offload", FSDPStrategy])
def test_the_first_fsdp_is_refused_with_the_second(name):
    strategy = name if isinstance(name, str) else name.__new__(name)
    with pytest.raises(ValueError, match=r"(?i)fsdp.* is not supported: .*strategy/fsdp2\.yaml"):
        check_strategy(strategy)


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_stage_3", DeepSpeedStrategy])
def test_deepspeed_with_settings_of_lightning_is_refused_with_ours(name):
    strategy = name if isinstance(name, str) else name.__new__(name)
    with pytest.raises(ValueError, match=r"not supported: .*strategy/deepspeed_2\.yaml"):
        check_strategy(strategy)


def test_other_strategies_are_refused_with_those_that_work():
    kind = ModelParallelStrategy
    with pytest.raises(ValueError, match=r"ModelParallelStrategy is not supported: .* auto .* ddp"):
        check_strategy(kind.__new__(kind))
