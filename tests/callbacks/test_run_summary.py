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
    assert "last validation" not in shown
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


def test_a_run_that_ends_before_its_first_validation_shows_the_one_before_training(
    fit, tiny_module, capsys
):
    settings = {"val_check_interval": 4, "check_val_every_n_epoch": None}
    module = tiny_module(accuracies=[0.25])
    fit(module, RunSummary(), iterations=3, num_sanity_val_steps=-1, **settings)
    shown = capsys.readouterr().out
    assert shown.count("iteration 0 ") == 1
    assert shown.count("0.250 ± 0.050") == 1
    assert "last validation: iteration 0; the weights of the end were not validated\n" in shown


def test_a_resumed_run_without_validation_shows_those_of_the_runs_before(
    fit, tiny_module, tmp_path, capsys
):
    first = tiny_module(accuracies=[0.04, 0.5])
    trainer = fit(first, RunSummary(), iterations=2, num_sanity_val_steps=-1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    capsys.readouterr()
    settings = {"max_epochs": 2, "limit_val_batches": 0, "ckpt_path": tmp_path / "run.ckpt"}
    fit(tiny_module(), RunSummary(), iterations=2, **settings)
    shown = capsys.readouterr().out
    assert "0.040 ± 0.050" in shown
    assert "0.500 ± 0.050" in shown
    assert "last validation: iteration 2; the weights of the end were not validated\n" in shown
