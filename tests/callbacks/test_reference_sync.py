"""What a moving reference refuses; what it does stands in the tests of the loop."""

import pytest

from lit_rl.callbacks import FixedKL, ReferenceSync


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_n_iterations": 0}, "every_n_iterations of ReferenceSync is 0"),
        ({"every_n_iterations": 1, "weight": 0.0}, r"weight of ReferenceSync is 0\.0"),
        ({"every_n_iterations": 1, "weight": 1.5}, r"weight of ReferenceSync is 1\.5"),
    ],
)
def test_settings_that_move_nothing_or_too_far_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ReferenceSync(**settings)


def test_a_reference_that_nothing_reads_is_refused(make, trainer):
    sync = ReferenceSync(1)
    trainer.callbacks = [sync]
    with pytest.raises(ValueError, match="a reference that nothing reads: kl_coef is 0"):
        sync.setup(trainer, make.module(kl_coef=0.0), "fit")
    sync.setup(trainer, make.module(kl_coef=0.1), "fit")
    trainer.callbacks = [sync, FixedKL(0.1)]
    sync.setup(trainer, make.module(kl_coef=0.0), "fit")
