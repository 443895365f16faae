"""Formulas of the docstrings with the numbers of a run."""

import dataclasses
import inspect
import re
from types import SimpleNamespace

import pytest

import lit_rl.advantages
import lit_rl.aggregations
import lit_rl.policy_losses
from lit_rl.advantages import GAE, BatchMean, GroupNormalized, ReturnToGo
from lit_rl.aggregations import FixedLength, SequenceMean
from lit_rl.callbacks.formula import algorithm_formulas, formula
from lit_rl.kl_penalties import KLInLoss, KLInReward
from lit_rl.policy_losses import (
    ClippedSurrogate,
    GeometricMeanClipped,
    OffPolicySequenceMask,
    SequenceClipped,
)
from lit_rl.reward_shaping import ClipReward
from lit_rl.value_losses import ClippedSquaredError


def test_numbers_stand_in_the_place_of_settings():
    assert formula(GroupNormalized(epsilon=1e-4)) == (
        "A_i = (r_i - mean(r)) / (std(r) + 0.0001), over the valid rollouts of one prompt"
    )
    assert formula(SequenceClipped()) == (
        "sequence_clipped = -min(s_t * A, clip(s_t, 1 - 0.0003, 1 + 0.0004) * A)"
    )
    assert formula(FixedLength(length=8)).startswith("sum over tokens / (sequences * 8)")
    assert formula(ClipReward(-1.0, 1.0)).startswith("reward = min(max(reward, -1), 1)")


def test_a_function_of_the_name_of_a_setting_stays_one():
    text = formula(ClippedSquaredError(clip=0.3))
    assert text.startswith("clipped_value_loss = 0.5 * max((V - R)^2, (clip(V, V_old - 0.3, ")


def test_settings_that_the_equation_does_not_name_follow_and_unset_ones_do_not():
    assert formula(ClippedSurrogate(dual_clip=3.0)).endswith(" * A) (dual_clip = 3)")
    assert "dual_clip" not in formula(ClippedSurrogate())
    assert formula(GeometricMeanClipped()).endswith("(clip_low = 0.4, clip_high = 0.4)")
    assert formula(GAE(lam=0.9)).startswith("A_t = delta_t + 1 * 0.9 * A_(t+1)")
    assert formula(GAE(lam=0.9)).endswith("(bootstrap_truncated = False, whiten = True)")


def test_a_choice_within_a_choice_is_a_formula_too():
    text = formula(OffPolicySequenceMask(ClippedSurrogate(), max_kl=0.1))
    assert "mean(old_log_probs - log_probs) > 0.1" in text
    assert "(loss = clipped_surrogate = -min(ratio * A, clip(ratio, 1 - 0.2, 1 + 0.2) * A))" in text
    assert "baseline = The mean return of all tokens" in formula(ReturnToGo(baseline=BatchMean()))


def test_a_choice_of_ones_own_is_its_summary_or_its_name():
    @dataclasses.dataclass(frozen=True)
    class Own:
        """Twice the factor. Or so."""

        factor: float

    class Plain:
        pass

    assert formula(Own(2.0)) == "Twice the 2. Or so"
    assert formula(Plain()) == "Plain"


def choices():
    for package in (lit_rl.advantages, lit_rl.policy_losses, lit_rl.aggregations):
        for name, kind in vars(package).items():
            if dataclasses.is_dataclass(kind) and not inspect.isabstract(kind):
                fields = [f for f in dataclasses.fields(kind) if f.init]
                if all(f.default is not dataclasses.MISSING for f in fields):
                    yield pytest.param(kind, id=name)


@pytest.mark.parametrize("kind", choices())
def test_every_choice_has_one_line_in_which_no_setting_is_left_open(kind):
    choice = kind()
    text = formula(choice)
    assert len(text) > 15
    assert "\n" not in text
    for field in dataclasses.fields(choice):
        value = getattr(choice, field.name)
        # It is named only where its value is given.
        assert not re.search(rf"\b{field.name}\b(?! = )", text) or value is None


def algorithm(**settings):
    """What the formulas read of an algorithm."""
    defaults = {
        "reward": SimpleNamespace(),
        "reward_shaping": (),
        "advantage": GroupNormalized(),
        "policy_loss": ClippedSurrogate(),
        "aggregation": SequenceMean(),
        "kl": KLInLoss(),
        "entropy_coef": 0.0,
        "old_log_probs": SimpleNamespace(),
        "sampler_correction": None,
    }
    return SimpleNamespace(**{**defaults, **settings})


def test_the_loss_has_its_kl_and_its_entropy():
    surrogate = "clipped_surrogate = -min(ratio * A, clip(ratio, 1 - 0.2, 1 + 0.2) * A)"
    assert algorithm_formulas(algorithm(), 0.0)["loss per token"] == surrogate
    lines = algorithm_formulas(algorithm(entropy_coef=0.01), 0.04)
    assert lines["loss per token"] == f"{surrogate} + 0.04 * k3(policy, reference) - 0.01 * entropy"
    assert "reference" not in lines["reward"]


def test_a_kl_in_the_reward_stands_there():
    lines = algorithm_formulas(algorithm(kl=KLInReward()), 0.05)
    assert lines["reward"] == "SimpleNamespace, less 0.05 * k1(policy, reference) per token"
    assert "reference" not in lines["loss per token"]
