"""Callbacks that see the parts of an iteration."""

import lightning as L

from lit_rl.algorithms.hooks import RLCallback, call_hooks, callbacks_of


def test_calls_every_rl_callback_in_order_and_no_other():
    calls = []

    class Recording(RLCallback):
        def __init__(self, name):
            self.name = name

        def on_minibatch(self, trainer, module, update):
            calls.append((self.name, trainer, module, update))

    class Other(L.Callback):
        def on_minibatch(self, trainer, module, update):
            raise AssertionError("not an RLCallback")

    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Recording("first"), Other(), Recording("second")],
    )
    assert [callback.name for callback in callbacks_of(trainer, Recording)] == ["first", "second"]
    assert callbacks_of(trainer, L.Callback) == trainer.callbacks
    call_hooks(trainer, "on_minibatch", "module", "update")
    assert calls == [
        ("first", trainer, "module", "update"),
        ("second", trainer, "module", "update"),
    ]


def test_every_hook_has_a_default_that_does_nothing():
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[RLCallback()],
    )
    call_hooks(trainer, "on_iteration_end", "module")
