"""What validation measures: each number by hand from rewards chosen for it."""

import math

import pytest
import torch

from lit_rl.evaluation import Evaluation, HeldOutMetrics

CPU = torch.device("cpu")


def measured(evaluation=Evaluation(), greedy=(), sampled=()):
    """The results of batches of greedy and of sampled responses."""
    metrics = HeldOutMetrics(evaluation, CPU)
    for batch in greedy:
        metrics.update_greedy(batch)
    for batch in sampled:
        metrics.update_sampled(batch)
    return metrics.results()


def test_greedy_accuracy_counts_rewards_of_at_least_the_success_reward(scored_of):
    # 0.5 and 0.9 reach 0.5, 0.4 does not: 2 of 3. Sample variance (2/3 x 1/3 x 3) / 2 = 1/3,
    # divided by 3 prompts: a standard error of 1/3. Rewards 0.4 + 0.5 + 0.9 = 1.8 over 3.
    evaluation = Evaluation(num_samples=0, success_reward=0.5)
    results = measured(evaluation, [scored_of([0.4, 0.5, 0.9])])
    assert results == pytest.approx(
        {
            "val/greedy_accuracy": 2 / 3,
            "val/greedy_accuracy_standard_error": 1 / 3,
            "val/reward": 0.6,
            "val/errors": 0.0,
        }
    )


def test_a_prompt_without_reward_is_in_no_denominator(scored_of):
    # The 0 of the missing row would make it 1 of 2 instead of 1 of 1.
    results = measured(Evaluation(num_samples=0), [scored_of([2.0, 0.0], missing=[1])])
    assert results["val/greedy_accuracy"] == 1.0
    assert results["val/reward"] == 2.0


def test_pass_at_k_and_the_accuracy_of_samples(scored_of):
    # 1, 2 and 0 of 2 samples are correct: accuracy (1/2 + 1 + 0) / 3; one of two tries is correct
    # for two of the three prompts. The accuracies 1/2, 1, 0 have sample variance 1/4: the standard
    # error is sqrt(1 / 12).
    evaluation = Evaluation(num_samples=2, pass_at=(1, 2))
    sampled = scored_of([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], group_size=2)
    results = measured(evaluation, sampled=[sampled])
    assert results["val/sampled_accuracy"] == pytest.approx(1 / 2)
    assert results["val/sampled_accuracy_standard_error"] == pytest.approx(math.sqrt(1 / 12))
    assert results["val/pass@1"] == pytest.approx(1 / 2)
    assert results["val/pass@2"] == pytest.approx(2 / 3)


def test_a_prompt_with_a_missing_sample_is_left_out(scored_of):
    # What is left is the first prompt, with 1 of 2 correct.
    evaluation = Evaluation(num_samples=2, pass_at=(2,))
    sampled = scored_of([1.0, 0.0, 0.0, 0.0], group_size=2, missing=[3])
    results = measured(evaluation, sampled=[sampled])
    assert results["val/sampled_accuracy"] == 0.5
    assert results["val/pass@2"] == 1.0


def test_batches_of_unequal_size_weigh_by_their_prompts(scored_of):
    # 1 of 1 and 0 of 3 are 1 of 4; the mean of the means of the batches would be 1/2.
    evaluation = Evaluation(num_samples=2, pass_at=(2,))
    results = measured(
        evaluation,
        [scored_of([1.0]), scored_of([0.0] * 3)],
        [scored_of([1.0, 1.0], group_size=2), scored_of([0.0] * 6, group_size=2)],
    )
    names = ("val/greedy_accuracy", "val/reward", "val/sampled_accuracy", "val/pass@2")
    assert [results[name] for name in names] == [0.25] * 4


def test_the_keys_do_not_depend_on_what_was_seen(scored_of):
    # A rank without a prompt logs the same keys, in the same order; nothing is NaN, not 0.
    empty = measured()
    full = measured(greedy=[scored_of([1.0])], sampled=[scored_of([1.0] * 4, group_size=4)])
    assert list(empty) == list(full)
    assert empty.pop("val/errors") == 0
    assert all(math.isnan(value) for value in empty.values())


def test_responses_that_judging_failed_on_are_counted(scored_of):
    """Two greedy ones in two batches, and one sampled; a missing one has not failed."""
    greedy = [
        scored_of([0.0, 0.0], missing=[0, 1], failed=torch.tensor([True, False])),
        scored_of([0.0], missing=[0], failed=torch.tensor([True])),
    ]
    failed = torch.tensor([False, False, True, False])
    sampled = [scored_of([1.0] * 4, group_size=4, missing=[2], failed=failed)]
    assert measured(greedy=greedy, sampled=sampled)["val/errors"] == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_samples": -1}, r"evaluation.num_samples is -1, must be 0 or more"),
        ({"num_samples": 4, "pass_at": (8,)}, r"pass_at has 8, .* between 1 and num_samples 4"),
        ({"num_samples": 4, "pass_at": (0,)}, r"pass_at has 0, .* between 1 and num_samples 4"),
        ({"pass_at": (4, 1, 4)}, r"pass_at \(4, 1, 4\) names a k twice"),
    ],
)
def test_impossible_measures_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Evaluation(**settings)
