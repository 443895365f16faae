"""Rewards, lengths, entropy, the KL to the reference, and warnings of runs that learn nothing."""

import math

import pytest
import torch

from lit_rl.callbacks import RewardMetrics
from lit_rl.callbacks.reward_metrics import zero_std_groups

NAN = float("nan")


def messages(recwarn):
    return [str(warning.message) for warning in recwarn.list]


def test_mean_and_std_leave_missing_rewards_out(iterate, make):
    # Rewards 1, 2, 6 count, the 0 of the missing row does not: mean 3, sample variance 14 / 2.
    scored = make.scored([1.0, 2.0, 6.0, 0.0], missing=[3])
    logged = iterate(RewardMetrics(), scored=scored)
    assert logged["reward/mean"] == 3.0
    assert logged["reward/std"] == pytest.approx(math.sqrt(7))
    assert logged["reward/missing_fraction"] == 0.25


def test_responses_that_judging_failed_on_are_counted_and_left_out(iterate, make):
    # Of 4 responses, 2 have no reward, 1 of them because judging failed; the mean is of 1 and 3.
    failed = torch.tensor([False, True, False, False])
    scored = make.scored([1.0, 0.0, 3.0, 0.0], missing=[1, 3], failed=failed)
    logged = iterate(RewardMetrics(), scored=scored)
    assert logged["reward/errors"] == 1.0
    assert logged["reward/missing_fraction"] == 0.5
    assert logged["reward/mean"] == 2.0
    assert iterate(RewardMetrics(), scored=make.scored([1.0, 0.0]))["reward/errors"] == 0.0


def test_parts_average_over_the_rows_to_which_they_apply(iterate, make):
    parts = {"maths": [1.0, NAN, 0.0, NAN], "code": [NAN] * 4}
    logged = iterate(RewardMetrics(), scored=make.scored([1.0, 0.0, 0.0, 0.0], parts=parts))
    assert logged["reward/maths"] == 0.5
    # The key of a part that applies nowhere is there: another rank may have rows for it.
    assert math.isnan(logged["reward/code"])


def test_group_is_without_signal_when_its_valid_rewards_are_equal(make):
    # Groups: equal; different; one missing, so one reward is left; different only by a response
    # without tokens; all missing.
    scored = make.scored(
        [3.0, 3.0, 1.0, 0.0, 5.0, 0.0, 2.0, 7.0, 0.0, 0.0],
        lengths=[2, 2, 2, 2, 2, 2, 2, 0, 2, 2],
        missing=[5, 8, 9],
    )
    assert zero_std_groups(scored).tolist() == [True, False, True, True, True]


def test_zero_std_is_within_groups_where_the_std_of_the_batch_is_not_zero(iterate, make):
    # Over all rewards the sample std is sqrt(4 / 3); within each group it is 0.
    logged = iterate(RewardMetrics(), scored=make.scored([3.0, 3.0, 5.0, 5.0]))
    assert logged["reward/std"] == pytest.approx(math.sqrt(4 / 3))
    assert logged["reward/zero_std_group_fraction"] == 1.0


def test_lengths_and_truncation(iterate, make):
    scored = make.scored(
        [0.0, 1.0, 0.0, 1.0],
        lengths=[1, 4, 2, 2],
        finished=torch.tensor([True, False, True, True]),
    )
    logged = iterate(RewardMetrics(), scored=scored)
    assert logged["response/length_mean"] == 9 / 4
    assert (logged["response/length_min"], logged["response/length_max"]) == (1, 4)
    assert logged["response/truncated_fraction"] == 0.25


def test_kl_to_the_reference_is_averaged_over_tokens_that_count(iterate, make):
    # KL of the tokens 1 and 9, mask 1 and 0: mean 1, not 5.
    experience = make.experience([[1, 0]], old=[[-1.0, -1.0]], ref=[[-2.0, -10.0]])
    logged = iterate(
        RewardMetrics(), experience=experience, module=make.module(uses_reference=True)
    )
    assert logged["kl/reference_k1"] == 1.0
    # exp(-1) - 1 + 1.
    assert logged["kl/reference_k3"] == pytest.approx(math.exp(-1))


def test_kl_is_that_of_the_policy_that_sampled(iterate, make):
    # The policy is still the reference; the update then moves it, on tokens of the policy before.
    experience = make.experience([[1]], old=[[-1.0]], ref=[[-1.0]])
    update = make.update((experience, [[-2.0]]))
    module = make.module(uses_reference=True)
    logged = iterate(RewardMetrics(), update, experience=experience, module=module)
    assert logged["kl/reference_k1"] == logged["kl/reference_k3"] == 0.0


def test_kl_reads_the_sampler_where_there_are_no_old_log_probs(iterate, make):
    experience = make.experience([[1, 1]], sampler=[[-1.0, -2.0]], ref=[[-2.0, -2.0]])
    module = make.module(uses_reference=True)
    logged = iterate(RewardMetrics(), experience=experience, module=module)
    assert logged["kl/reference_k1"] == 0.5


def test_entropy_is_over_all_updates_and_any_split(iterate, make):
    rows = [
        (make.experience([[1, 1]]), ([[0.0, 0.0]], [[1.0, 2.0]])),
        (make.experience([[1, 0]]), ([[0.0, NAN]], [[0.5, NAN]])),
    ]
    split = iterate(RewardMetrics(), make.update(rows[0], rows[1]))
    steps = iterate(RewardMetrics(), make.update(rows[0]), make.update(rows[1], index=1))
    # Three tokens, in rows of two and one: not the mean of 1.5 and 0.5.
    assert split["policy/entropy"] == steps["policy/entropy"] == pytest.approx(3.5 / 3)


def test_no_reference_no_kl_keys(iterate, make):
    update = make.update((make.experience([[1]]), [[-1.0]]))
    assert not [name for name in iterate(RewardMetrics(), update) if name.startswith("kl/")]


def test_every_sampled_response_counts_whichever_round_sampled_it(iterate, make):
    """Dynamic sampling trains on the last rollout only; the first one was sampled all the same."""
    given_up = make.scored([1.0, 1.0], lengths=[5, 7], parts={"exact": [1.0, 1.0]})
    trained = make.scored(
        [0.0, 2.0],
        lengths=[1, 3],
        parts={"exact": [0.0, NAN]},
        finished=torch.tensor([True, False]),
    )
    logged = iterate(RewardMetrics(), scored=[given_up, trained])
    # Rewards 1, 1, 0, 2: mean 1, sample variance 2 / 3.
    assert logged["reward/mean"] == 1.0
    assert logged["reward/std"] == pytest.approx(math.sqrt(2 / 3))
    assert logged["reward/exact"] == pytest.approx(2 / 3)
    assert logged["reward/zero_std_group_fraction"] == 0.5
    assert logged["response/length_mean"] == 16 / 4
    assert (logged["response/length_min"], logged["response/length_max"]) == (1, 7)
    assert logged["response/truncated_fraction"] == 0.25


def test_iterations_do_not_mix(iterate, make):
    callback = RewardMetrics()
    iterate(callback, scored=make.scored([5.0, 5.0], lengths=[9, 9]))
    logged = iterate(callback, scored=make.scored([0.0, 1.0], lengths=[1, 2]))
    assert (logged["reward/mean"], logged["response/length_max"]) == (0.5, 2)


def test_warns_when_the_kl_is_clearly_negative(iterate, make, recwarn):
    module = make.module(uses_reference=True)
    callback = RewardMetrics()

    def run(old):
        experience = make.experience([[1] * 100], old=[old], ref=[[-1.0] * 100])
        iterate(callback, experience=experience, module=module)

    run([-1.0] * 100)
    # Mean -0.06, std 1.5: three standard errors of 100 tokens are 0.45.
    run([-1.0 - 0.06 + 1.5, -1.0 - 0.06 - 1.5] * 50)
    assert not recwarn.list
    run([-1.1] * 100)
    run([-1.1] * 100)
    (message,) = messages(recwarn)
    assert "-0.1 nats per token" in message
    assert "top-p" in message


def test_a_reward_that_hides_a_metric_is_refused(iterate, make):
    scored = make.scored([0.0, 1.0], parts={"mean": [0.0, 1.0]})
    with pytest.raises(ValueError, match="such as mean_reward"):
        iterate(RewardMetrics(), scored=scored)
