"""The last lines of a run."""

from lit_rl.callbacks import IterationCheckpoint, LearningCurve, RunSummary

SAMPLE = {"prompt": "482>", "response": "8\x1b[2J", "answer": "8", "reward": 1.0}


def module_with_samples(tiny_module, accuracies):
    module = tiny_module(accuracies=accuracies)
    module.validation_samples = [SAMPLE | {"prompt": f"{row}82>"} for row in range(5)]
    return module


def test_before_and_after_samples_and_paths(fit, tiny_module, tmp_path, capsys):
    module = module_with_samples(tiny_module, [0.04, 0.5, 0.975])
    callbacks = [LearningCurve(), IterationCheckpoint(2), RunSummary()]
    fit(module, *callbacks, iterations=4, num_sanity_val_steps=-1)
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if "val/greedy_accuracy" in line)
    assert "0.040 ± 0.050" in row
    assert "0.975 ± 0.050" in row
    assert "iteration 0" in shown
    assert "iteration 4" in shown
    assert [f"{row}82>" in shown for row in range(5)] == [True, True, True, False, False]
    assert "\x1b" not in shown
    assert "iterations: 4\n" in shown
    assert "seconds: " in shown
    # Paths are neither cut nor wrapped, however long they are.
    assert f"curve: {tmp_path}/curve.png\n" in shown
    assert f"checkpoint: {tmp_path}/checkpoints/last.ckpt\n" in shown


def test_before_is_the_first_of_resumed_runs(fit, tiny_module, tmp_path, capsys):
    trainer = fit(
        tiny_module(accuracies=[0.04, 0.5]), RunSummary(), iterations=2, num_sanity_val_steps=-1
    )
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    capsys.readouterr()
    resumed = tiny_module(accuracies=[0.875])
    settings = {"iterations": 2, "max_epochs": 2, "ckpt_path": tmp_path / "run.ckpt"}
    fit(resumed, RunSummary(), **settings)
    shown = capsys.readouterr().out
    assert "0.040 ± 0.050" in shown
    assert "0.875 ± 0.050" in shown
    assert "iterations: 4\n" in shown


def test_a_run_without_validation_has_no_table(fit, tiny_module, capsys):
    fit(tiny_module(), RunSummary(), iterations=1, limit_val_batches=0)
    shown = capsys.readouterr().out
    assert "held-out" not in shown
    assert "iterations: 1\n" in shown
