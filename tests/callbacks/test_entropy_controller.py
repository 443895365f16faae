"""The weight of the entropy bonus follows the entropy."""

import pytest

from lit_rl.callbacks import EntropyController

NAN = float("nan")


def controller(target=0.5, step=0.25, minimum=0.0, maximum=1.0):
    return EntropyController(target, step, minimum, maximum)


def updates(make, *entropies):
    """One minibatch of one row for each list of entropies; NaN stands at a padded position."""
    return [
        make.update((make.experience([[value == value for value in row]]), ([row], [row])), index=n)
        for n, row in enumerate(entropies)
    ]


@pytest.fixture
def run(make, iterate):
    """Run iterations, each given by the entropies of its minibatches; return the weights after."""

    def iterations(callback, *rows, entropy_coef=0.5):
        module, course = make.module(entropy_coef=entropy_coef), []
        for row in rows:
            iterate(callback, *updates(make, *row), module=module)
            course.append(module.entropy_coef)
        return course

    return iterations


def test_up_below_the_target_down_above_it_and_still_on_it(run):
    assert run(controller(), [[0.4]], [[0.6]], [[0.5]]) == [0.75, 0.5, 0.5]


def test_the_bounds_hold(run):
    assert run(controller(), *[[[0.1]]] * 3) == [0.75, 1.0, 1.0]
    assert run(controller(minimum=0.125), *[[[0.9]]] * 3) == [0.25, 0.125, 0.125]
    # A weight below 0 presses the entropy down, where that is allowed.
    assert run(controller(minimum=-0.25), *[[[0.9]]] * 4) == [0.25, 0.0, -0.25, -0.25]


def test_the_entropy_is_a_mean_over_the_tokens_of_all_updates(run):
    # Tokens 0.25, 0.25, 0.25 and 1.5: mean 0.5625. The means of the updates have mean 0.875; with
    # the padded position as 0 the mean would be 0.45.
    row = [[0.25, 0.25, 0.25], [1.5, NAN]]
    assert run(controller(target=0.55), row) == [0.25]
    assert run(controller(target=0.57), row) == [0.75]


def test_an_iteration_without_tokens_changes_nothing(run):
    assert run(controller(), []) == [0.5]


def test_a_checkpoint_restores_the_weight(make, trainer, run):
    first = controller()
    run(first, [[0.1]])
    resumed, module = controller(), make.module(entropy_coef=0.5)
    resumed.load_state_dict(first.state_dict())
    resumed.on_train_start(trainer, module)
    assert module.entropy_coef == 0.75


def test_bounds_of_the_configuration_hold_over_a_checkpoint(make, trainer, run):
    first = controller()
    run(first, [[0.1]])
    resumed, module = controller(maximum=0.625), make.module(entropy_coef=0.5)
    resumed.load_state_dict(first.state_dict())
    resumed.on_train_start(trainer, module)
    assert module.entropy_coef == 0.625


def test_the_first_weight_is_that_of_the_algorithm(make, trainer):
    module = make.module(entropy_coef=0.375)
    controller().on_train_start(trainer, module)
    assert module.entropy_coef == 0.375


@pytest.mark.parametrize(("name", "value"), [("target", 0.0), ("step", -0.1)])
def test_numbers_that_hold_no_entropy_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} of EntropyController is {value}, must be above"):
        controller(**{name: value})


def test_bounds_the_wrong_way_round_are_refused():
    with pytest.raises(
        ValueError, match=r"minimum 0\.5 of EntropyController must be below maximum"
    ):
        controller(minimum=0.5, maximum=0.25)


def test_a_first_weight_out_of_bounds_is_refused(make, trainer):
    module = make.module(entropy_coef=2.0, skip_zero_advantages=False)
    with pytest.raises(ValueError, match=r"entropy_coef 2\.0 of the algorithm"):
        controller().setup(trainer, module, "fit")


def test_rows_that_are_left_out_of_the_updates_are_refused(make, trainer):
    module = make.module(entropy_coef=0.0, skip_zero_advantages=True)
    with pytest.raises(ValueError, match="skip_zero_advantages leaves out rows that the entropy"):
        controller().setup(trainer, module, "fit")
