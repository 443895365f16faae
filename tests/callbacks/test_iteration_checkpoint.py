"""Checkpoints at the iterations that were asked for."""

import pytest
import torch

from lit_rl.callbacks import IterationCheckpoint


def files(tmp_path):
    return sorted(path.stem for path in (tmp_path / "checkpoints").iterdir())


def stored(path):
    """The iteration and the weight in a checkpoint; a module's weight falls by 2 per iteration."""
    checkpoint = torch.load(path, weights_only=True)
    return checkpoint["iteration"], checkpoint["state_dict"]["weight"].item()


def test_every_nth_iteration_and_the_end(fit, tiny_module, tmp_path):
    trainer = fit(
        tiny_module(), IterationCheckpoint(3, save_top_k=-1), iterations=7, limit_val_batches=0
    )
    assert trainer.global_step == 14
    assert files(tmp_path) == ["iteration=3", "iteration=6", "iteration=7", "last"]
    for name, iteration in (("iteration=3", 3), ("iteration=6", 6), ("last", 7)):
        path = tmp_path / "checkpoints" / f"{name}.ckpt"
        assert stored(path) == (iteration, -2.0 * iteration)


def test_only_the_newest_stays_by_default(fit, tiny_module, tmp_path):
    fit(tiny_module(), IterationCheckpoint(2), iterations=4, limit_val_batches=0)
    assert files(tmp_path) == ["iteration=4", "last"]


def test_epochs_do_not_matter(fit, tiny_module, tmp_path):
    callback = IterationCheckpoint(3, save_top_k=-1)
    fit(tiny_module(), callback, iterations=2, max_epochs=3, limit_val_batches=0)
    assert files(tmp_path) == ["iteration=3", "iteration=6", "last"]


def test_no_checkpoint_when_nothing_was_learnt(fit, tiny_module, tmp_path):
    fit(tiny_module(), IterationCheckpoint(1), iterations=0, num_sanity_val_steps=-1)
    assert not (tmp_path / "checkpoints").exists()


def test_monitored_checkpoint_holds_the_weights_that_were_measured(fit, tiny_module, tmp_path):
    # Validations after iterations 2, 4, 6; the best is the second.
    callback = IterationCheckpoint(1, monitor="val/greedy_accuracy")
    fit(tiny_module(accuracies=[0.1, 0.9, 0.3]), callback, iterations=6)
    assert files(tmp_path) == ["iteration=4", "last"]
    assert stored(callback.best_model_path) == (4, -8.0)
    assert callback.best_model_score.item() == pytest.approx(0.9)
    assert stored(tmp_path / "checkpoints" / "last.ckpt") == (6, -12.0)


def test_due_checkpoint_waits_for_the_next_validation(fit, tiny_module, tmp_path):
    # Due after iterations 3 and 6; validations after 2, 4 and 6.
    callback = IterationCheckpoint(3, monitor="val/greedy_accuracy", save_top_k=-1)
    fit(tiny_module(), callback, iterations=6)
    assert files(tmp_path) == ["iteration=4", "iteration=6", "last"]


def test_validation_at_the_end_counts_although_nothing_is_due(fit, tiny_module, tmp_path):
    callback = IterationCheckpoint(3, monitor="val/greedy_accuracy", save_top_k=1)
    fit(tiny_module(accuracies=[0.1, 0.2, 0.3, 0.9]), callback, iterations=8)
    assert files(tmp_path) == ["iteration=8", "last"]


def test_stale_metric_ranks_nothing_at_the_end(fit, tiny_module, tmp_path):
    # The last validation is after iteration 4, training ends after 5.
    callback = IterationCheckpoint(2, monitor="val/greedy_accuracy", save_top_k=-1)
    fit(tiny_module(accuracies=[0.1, 0.9]), callback, iterations=5)
    assert files(tmp_path) == ["iteration=2", "iteration=4", "last"]
    assert stored(tmp_path / "checkpoints" / "last.ckpt")[0] == 5


def test_the_measure_before_training_saves_nothing(fit, tiny_module, tmp_path):
    callback = IterationCheckpoint(1, monitor="val/greedy_accuracy", save_top_k=-1)
    fit(tiny_module(), callback, iterations=2, num_sanity_val_steps=-1)
    assert files(tmp_path) == ["iteration=2", "last"]


def test_resume_goes_on_counting(fit, tiny_module, tmp_path):
    fit(tiny_module(), IterationCheckpoint(2, save_top_k=-1), iterations=4, limit_val_batches=0)
    module, callback = tiny_module(), IterationCheckpoint(2, save_top_k=-1)
    fit(
        module,
        callback,
        iterations=4,
        max_epochs=2,
        ckpt_path=tmp_path / "checkpoints" / "last.ckpt",
        default_root_dir=tmp_path / "resumed",
        limit_val_batches=0,
    )
    assert module.iteration == 8
    assert files(tmp_path / "resumed") == ["iteration=6", "iteration=8", "last"]


def test_it_knows_which_files_are_there_to_stay(fit, tiny_module, tmp_path):
    """Neither what it removed nor last.ckpt; and those of the run that is gone on from."""
    newest = IterationCheckpoint(2)
    fit(tiny_module(), newest, iterations=4, limit_val_batches=0)
    folder = tmp_path / "checkpoints"
    assert newest.kept == {str(folder / "iteration=4.ckpt"): 4}

    settings = {"monitor": "val/greedy_accuracy", "save_top_k": -1}
    first = IterationCheckpoint(2, dirpath=str(tmp_path / "first"), **settings)
    fit(tiny_module(), first, iterations=4)
    files = {tmp_path / "first" / f"iteration={n}.ckpt": n for n in (2, 4)}
    assert first.kept == {str(path): number for path, number in files.items()}
    second = IterationCheckpoint(2, dirpath=str(tmp_path / "second"), **settings)
    last = tmp_path / "first" / "last.ckpt"
    fit(tiny_module(), second, iterations=2, max_epochs=2, ckpt_path=last)
    files |= {tmp_path / "second" / "iteration=6.ckpt": 6}
    assert second.kept == {str(path): number for path, number in files.items()}


def test_best_of_the_folder_is_kept_over_a_resume_in_it(fit, tiny_module, tmp_path):
    settings = {"monitor": "val/greedy_accuracy"}
    fit(tiny_module(accuracies=[0.9, 0.1]), IterationCheckpoint(2, **settings), iterations=4)
    callback = IterationCheckpoint(2, **settings)
    last = tmp_path / "checkpoints" / "last.ckpt"
    fit(tiny_module(accuracies=[0.2]), callback, iterations=2, max_epochs=2, ckpt_path=last)
    assert callback.best_model_score.item() == pytest.approx(0.9)
    assert files(tmp_path) == ["iteration=2", "last"]


def test_unknown_metric_is_an_error(fit, tiny_module):
    callback = IterationCheckpoint(1, monitor="val/accuracy")
    with pytest.raises(Exception, match="val/accuracy"):
        fit(tiny_module(), callback, iterations=2)


def test_interval_below_one_is_refused():
    with pytest.raises(ValueError, match="every_n_iterations is 0"):
        IterationCheckpoint(0)
