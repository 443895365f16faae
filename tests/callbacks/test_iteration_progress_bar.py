"""Progress on a terminal, in a log file, and on other ranks."""

import io

import pytest
from rich.console import Console

from lit_rl.callbacks import IterationProgressBar, RewardMetrics, Throughput, iteration_progress_bar
from lit_rl.callbacks.iteration_progress_bar import metric_texts


@pytest.fixture
def bounded(tiny_module):
    """A module that knows the number of its iterations."""

    class Bounded(tiny_module):
        num_iterations = 6

    return Bounded


def test_plain_lines_without_control_characters_in_a_file(fit, bounded, capsys):
    bar = IterationProgressBar(seconds_between_lines=1e6)
    fit(bounded(), RewardMetrics(), Throughput(), bar, iterations=6, limit_val_batches=0)
    lines = [line for line in capsys.readouterr().out.splitlines() if "iteration" in line]
    assert len(lines) == 2
    assert lines[0].startswith("iteration 1/6: reward 0.500, tokens/s ")
    assert lines[1].endswith("0:00:00 left")
    assert all(line.isprintable() for line in lines)


def test_a_line_per_iteration_when_enough_time_has_passed(fit, bounded, capsys):
    fit(bounded(), IterationProgressBar(0.0), iterations=6, limit_val_batches=0)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration")]
    assert [line.split(":")[0] for line in lines] == [f"iteration {n}/6" for n in range(1, 7)]


def test_validations_are_reported_with_the_iteration_they_follow(fit, bounded, capsys):
    bar = IterationProgressBar(seconds_between_lines=1e6)
    module = bounded(accuracies=[0.04, 0.5, 0.75, 0.975])
    fit(module, bar, iterations=6, num_sanity_val_steps=-1)
    lines = [line for line in capsys.readouterr().out.splitlines() if "after iteration" in line]
    assert lines == [
        f"validation after iteration {iteration}: greedy_accuracy {accuracy} ± 0.050"
        for iteration, accuracy in ((0, "0.040"), (2, "0.500"), (4, "0.750"), (6, "0.975"))
    ]


def test_a_run_without_an_end_has_no_total_and_no_time_left(fit, tiny_module, capsys):
    fit(tiny_module(), IterationProgressBar(0.0), iterations=2, limit_val_batches=0)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration")]
    assert lines == ["iteration 1", "iteration 2"]


def test_time_left_counts_from_where_a_run_was_resumed(trainer, bounded, monkeypatch, capsys):
    # Resumed after iteration 2 of 6. Iteration 3 takes 10 seconds, so the other three take 30.
    times = iter([100.0, 110.0, 110.0, 110.0])
    monkeypatch.setattr(iteration_progress_bar, "perf_counter", lambda: next(times))
    bar, module = IterationProgressBar(), bounded()
    module.iteration = 2
    bar.on_train_start(trainer, module)
    module.iteration = 3
    bar.on_train_batch_end(trainer, module, None, None, 0)
    assert capsys.readouterr().out == "iteration 3/6: 0:00:30 left\n"


def test_bar_on_a_terminal_covers_the_whole_run(fit, bounded, monkeypatch):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, force_interactive=True, width=120)
    monkeypatch.setattr(iteration_progress_bar, "console", lambda: console)
    bar = IterationProgressBar()
    fit(bounded(), RewardMetrics(), bar, iterations=3, max_epochs=2)
    shown = screen.getvalue()
    assert "6/6" in shown
    assert "reward 0.500" in shown
    # Results of validations stand above the bar.
    assert "validation after iteration 2" in shown
    # The terminal has its cursor back.
    assert shown.rstrip().endswith("\x1b[?25h")


def test_an_error_gives_the_terminal_back(fit, bounded, monkeypatch):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, force_interactive=True, width=120)
    monkeypatch.setattr(iteration_progress_bar, "console", lambda: console)

    class Failing(bounded):
        def training_step(self, batch, batch_idx):
            if self.iteration == 1:
                raise RuntimeError("broken")
            super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="broken"):
        fit(Failing(), IterationProgressBar(), iterations=3, limit_val_batches=0)
    assert screen.getvalue().rstrip().endswith("\x1b[?25h")


def test_other_ranks_print_nothing(trainer, bounded, monkeypatch, capsys):
    monkeypatch.setattr(type(trainer), "is_global_zero", False)
    bar, module = IterationProgressBar(0.0), bounded()
    bar.setup(trainer, module, "fit")
    bar.on_train_start(trainer, module)
    module.iteration = 1
    bar.on_train_batch_end(trainer, module, None, None, 0)
    bar.on_validation_end(trainer, module)
    assert capsys.readouterr().out == ""


def test_prediction_is_shown(fit, tiny_module, capsys):
    fit(tiny_module(), IterationProgressBar(0.0), predict=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("prediction")]
    assert lines == ["prediction 1/3", "prediction 2/3", "prediction 3/3"]


def test_module_print_does_not_obey_markup(fit, tiny_module, capsys):
    class Printing(tiny_module):
        def on_train_start(self):
            self.print("[bold]7[/bold]")

    fit(Printing(), IterationProgressBar(), iterations=1, limit_val_batches=0)
    assert "[bold]7[/bold]\n" in capsys.readouterr().out


def test_metrics_that_are_not_logged_are_left_out():
    assert metric_texts({}) == []
