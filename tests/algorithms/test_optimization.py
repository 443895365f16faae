"""Clipping, the settings that a checkpoint may not change, and trainers that are refused."""

from unittest.mock import MagicMock

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.optim.lr_scheduler import LambdaLR

from lit_rl.algorithms.optimization import (
    check_precision,
    check_strategy,
    check_trainer,
    clip_grad_norms,
    hyperparameters,
    restore_hyperparameters,
)


def optimizer_of(**parameters):
    groups = [{"params": [p], "name": name} for name, p in parameters.items()]
    return torch.optim.SGD(groups, lr=1.0)


def test_groups_are_clipped_apart():
    """Gradients (3, 4) and 0.5 have norms 5 and 0.5; a limit of 1 scales the first by 1/5 only."""
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0, 4.0]), torch.tensor([0.5])
    norms = clip_grad_norms(optimizer_of(actor=a, critic=b), 1.0)
    assert norms == {"actor": pytest.approx(5.0), "critic": pytest.approx(0.5)}
    torch.testing.assert_close(torch.cat([a.grad, b.grad]), torch.tensor([0.6, 0.8, 0.5]))


def test_no_limit_measures_only():
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([7.0])
    assert clip_grad_norms(optimizer_of(actor=parameter), None) == {"actor": 7.0}
    assert parameter.grad == 7.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_norm_that_is_not_finite_is_returned_for_the_loop_to_skip_the_step(value):
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([value])
    norms = clip_grad_norms(optimizer_of(critic=parameter), 1.0)
    assert norms == {"critic": pytest.approx(value, nan_ok=True)}


def test_configured_settings_hold_over_loaded_ones_at_the_loaded_position():
    """Half-way through a linear fall over 4 steps the configured 0.2 stands at 0.1."""

    def build(lr):
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([{"params": [parameter], "name": "actor"}], lr=lr)
        return optimizer, LambdaLR(optimizer, lambda step: 1 - step / 4)

    old_optimizer, old_scheduler = build(1.0)
    for _ in range(2):
        old_optimizer.step()
        old_scheduler.step()
    optimizer, scheduler = build(0.2)
    configured = hyperparameters(optimizer)
    optimizer.load_state_dict(old_optimizer.state_dict())
    scheduler.load_state_dict(old_scheduler.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    restore_hyperparameters(optimizer, scheduler, configured)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize("kind", [DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy])
def test_strategies_that_shard_weights_are_refused_with_those_that_work(kind):
    """Not constructed: that would need their packages."""
    trainer = MagicMock(spec=L.Trainer)
    trainer.strategy, trainer.precision = kind.__new__(kind), "32-true"
    message = rf"trainer.strategy {kind.__name__} is not supported: .* auto \(one device\) or ddp"
    with pytest.raises(ValueError, match=message):
        check_trainer(trainer)


@pytest.mark.parametrize("name", ["auto", "ddp", "ddp_spawn", "ddp_find_unused_parameters_true"])
def test_names_of_supported_strategies(name):
    check_strategy(name)


@pytest.mark.parametrize("name", [None, 32, "32", "32-true", "bf16", "bf16-mixed"])
def test_names_of_supported_precisions(name):
    """The short names are those that the Trainer takes for them."""
    check_precision(name)


@pytest.mark.parametrize("name", [16, "16-mixed", "64", "64-true", "bf16-true"])
def test_names_of_other_precisions_are_refused(name):
    with pytest.raises(ValueError, match=f"trainer.precision {name} is not supported"):
        check_precision(name)
