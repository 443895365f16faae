"""The settings that a checkpoint may not change, and precisions that are refused."""

import lightning as L
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from lit_rl.algorithms.optimization import (
    check_precision,
    check_trainer,
    hyperparameters,
    restore_hyperparameters,
)


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


@pytest.mark.parametrize("name", [None, 32, "32", "32-true", "bf16", "bf16-mixed"])
def test_names_of_supported_precisions(name):
    """The short names are those that the Trainer takes for them."""
    check_precision(name)


@pytest.mark.parametrize("name", [16, "16-mixed", "64", "64-true", "bf16-true"])
def test_names_of_other_precisions_are_refused(name):
    with pytest.raises(ValueError, match=f"trainer.precision {name} is not supported"):
        check_precision(name)


def test_validations_after_every_0_iterations_are_refused():
    trainer = L.Trainer(accelerator="cpu", logger=False, val_check_interval=0)
    with pytest.raises(
        ValueError, match=r"trainer\.val_check_interval is 0, must be above 0, such"
    ):
        check_trainer(trainer)
