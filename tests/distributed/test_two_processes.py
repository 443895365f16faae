"""Law: the number of processes and the size of micro-batches change no result.

Two processes that take their rows in many small micro-batches are compared with one process that
takes each minibatch whole.
"""

import math

import pytest
import torch

pytestmark = pytest.mark.slow

SCENARIOS = [
    "grpo",
    "token_mean",
    "dr_grpo",
    "kl_in_reward",
    "skip_zero_advantages",
    "reward_parts",
    "ppo",
    "ppo_resumed",
    "ppo_shared_trunk",
    "ppo_lora",
    "ppo_stopped",
    "dapo",
    "trpo",
    "trpo_penalty",
    "reinforce_plus_plus",
    "reinforce",
    "same_prompt",
    "one_and_three_tokens",
    "resumed",
]
ONLY_TWO = ["grpo again", "odd batch", "two samplers"]
PROMPTS = {"same_prompt": 6, "one_and_three_tokens": 2}
TIMES = ("time/", "throughput/", "total/seconds")


@pytest.fixture(scope="module")
def results(run_scenarios):
    names = [f"ddp/{name}" for name in (*SCENARIOS, "predict")]
    return run_scenarios([*names, *(f"ddp/{name}" for name in ONLY_TWO)], names)


def counts(result):
    return [count for count, _ in result["updates"]]


def groups(rows, number):
    """Cut the rows of an iteration into those of each prompt."""
    size = len(rows) // number
    return [tuple(rows[i * size : (i + 1) * size]) for i in range(number)]


def merged(first, second):
    """Global prompt i lies on rank i % 2 as local prompt i // 2."""
    return [group for pair in zip(first, second, strict=True) for group in pair]


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes_train_the_weights_of_one(results, name):
    one, first, second = results.one[name], *(result[name] for result in results.two)
    assert torch.equal(first["initial"], one["initial"])
    assert torch.equal(first["weights"], second["weights"])
    torch.testing.assert_close(first["weights"], one["weights"], rtol=0, atol=1e-6)
    assert (one["weights"] - one["initial"]).abs().max() > 0.01


@pytest.mark.parametrize("name", SCENARIOS)
def test_weights_agree_after_every_optimizer_step(results, name):
    first, second = (result[name]["updates"] for result in results.two)
    fingerprints = [value for _, value in first]
    assert fingerprints == [value for _, value in second]
    assert len(set(fingerprints)) == len(fingerprints) == len(results.one[name]["updates"])


def test_processes_run_different_numbers_of_micro_batches(results):
    """What the laws above are about: without it they would say little."""
    first, second = (counts(result["grpo"]) for result in results.two)
    assert counts(results.one["grpo"]) == [1] * 12
    assert min(first + second) > 1
    assert any(a != b for a, b in zip(first, second, strict=True))


def test_process_without_a_row_to_train_joins_the_others(results):
    first, second = (counts(result["skip_zero_advantages"]) for result in results.two)
    assert any(a == 0 and b > 0 for a, b in zip(first, second, strict=True))
    assert any(b == 0 and a > 0 for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", SCENARIOS)
def test_rollouts_of_two_processes_are_those_of_one(results, name):
    one, first, second = results.one[name], *(result[name] for result in results.two)
    number = PROMPTS.get(name, 6)
    for field in ("prompts", "responses"):
        assert len(one[field]) == len(first[field]) == len(second[field])
        for whole, *halves in zip(one[field], first[field], second[field], strict=True):
            if name == "dapo":  # the groups with signal stay where they were sampled
                parts = [groups(half, len(half) // 4) for half in halves]
                assert sorted(parts[0] + parts[1]) == sorted(groups(whole, number))
            else:
                parts = [groups(half, number // 2) for half in halves]
                assert merged(*parts) == groups(whole, number)


def test_processes_answer_the_same_prompt_differently(results):
    """Six rows of one prompt, a group of four responses each: no two of the groups are equal."""
    first, second = (groups(r["same_prompt"]["responses"][0], 3) for r in results.two)
    assert len({*first, *second}) == 6


def test_run_of_two_processes_repeats_bit_for_bit(results):
    for result in results.two:
        once, again = result["grpo"], result["grpo again"]
        assert once["responses"] == again["responses"]
        assert torch.equal(once["weights"], again["weights"])


@pytest.mark.parametrize("name", SCENARIOS)
def test_metrics_of_two_processes_are_those_of_one(results, name):
    """1e-5 relative; 2e-6 nats absolute, for differences of log-probs of a few nats in float32."""
    one, *two = (result[name]["metrics"] for result in (results.one, *results.two))
    for ranks in two:
        for mine, expected in zip(ranks, one, strict=True):
            assert list(mine) == list(expected)
            for metric, value in mine.items():
                if not metric.startswith(TIMES):
                    right = pytest.approx(expected[metric], rel=1e-5, abs=2e-6, nan_ok=True)
                    assert value == right, metric


def test_all_kinds_of_metrics_are_compared(results):
    names = list(results.one["grpo"]["metrics"][0])
    kinds = {name.split("/")[0] for name in names}
    assert kinds >= {"reward", "response", "policy", "ratio", "kl", "val", "loss", "grad_norm"}
    assert results.one["grpo"]["metrics"][0]["val/sampled_accuracy"] > 0
    assert results.one["token_mean"]["metrics"][0]["reward/missing_fraction"] > 0


def test_part_that_applies_to_rows_of_one_process_has_the_mean_of_one_process(results):
    """One prompt in twelve has the part: four rows of one rank in an iteration, or none at all."""
    applies = [
        tuple(int((~parts["rare"].isnan()).sum()) for parts in iteration)
        for iteration in zip(*(r["reward_parts"]["parts"] for r in results.two), strict=True)
    ]
    assert set(applies) >= {(0, 0)}
    assert set(applies) & {(0, 4), (4, 0)}
    for result in (results.one, *results.two):
        means = [metrics["reward/rare"] for metrics in result["reward_parts"]["metrics"]]
        assert [math.isnan(mean) for mean in means] == [sum(rows) == 0 for rows in applies]


def test_token_mean_counts_the_tokens_of_all_processes(results):
    """By hand: losses [4] and [1, 1, 1] on two ranks, 4 tokens in all.

    A rank's loss is its sum x ranks / tokens: 4 x 2 / 4 = 2.0 and 3 x 2 / 4 = 1.5. Their average,
    of which the gradient is taken, is 7 / 4 = 1.75; a mean of the ranks' means would be 2.5.
    """
    name = "one_and_three_tokens"
    first, second = (result[name] for result in results.two)
    assert [first["backward"], second["backward"]] == [[2.0], [1.5]]
    assert results.one[name]["backward"] == [1.75]
    for result in (first, second, results.one[name]):
        assert result["metrics"][0]["loss"] == 1.75


def test_resumed_run_is_the_uninterrupted_one(results):
    """The checkpoint was written after one of three iterations, within an epoch of two."""
    for result in results.two:
        assert result["resumed"]["responses"] == result["grpo"]["responses"][1:]
        assert torch.equal(result["resumed"]["weights"], result["grpo"]["weights"])


def test_resumed_run_with_critic_and_controller_is_the_uninterrupted_one(results):
    for result in results.two:
        assert result["ppo_resumed"]["responses"] == result["ppo"]["responses"][1:]
        assert torch.equal(result["ppo_resumed"]["weights"], result["ppo"]["weights"])
        coefficients = [metrics["kl_coef"] for metrics in result["ppo"]["metrics"]]
        # It waits for the critic, which is alone in the first iteration.
        assert coefficients[0] == coefficients[1] != coefficients[2]
        assert [m["kl_coef"] for m in result["ppo_resumed"]["metrics"]] == coefficients[1:]


def test_processes_stop_the_updates_of_an_iteration_together(results):
    """The first minibatch has ratio 1, the second shows a KL and is the last of four."""
    for result in (results.one, *results.two):
        assert [metrics["num_updates"] for metrics in result["ppo_stopped"]["metrics"]] == [2.0] * 3


def test_processes_hold_different_numbers_of_groups_with_signal(results):
    """What the laws above are about in the scenario of dynamic sampling."""
    first, second = (result["dapo"] for result in results.two)
    sizes = [
        tuple(len(rows) for rows in rounds)
        for rounds in zip(first["responses"], second["responses"], strict=True)
    ]
    assert any(a != b for a, b in sizes)
    assert any(metrics["dynamic_sampling/rounds"] > 1 for metrics in first["metrics"])


def test_one_process_continues_what_two_began(results):
    resumed, whole = results.one["resumed"], results.one["grpo"]
    assert resumed["responses"] == whole["responses"][1:]
    torch.testing.assert_close(resumed["weights"], whole["weights"], rtol=0, atol=1e-6)


def test_predictions_of_two_processes_are_those_of_one(results):
    """Five held-out prompts, each answered once."""
    first, second = (result["predict"] for result in results.two)
    assert first
    assert second
    assert sorted(first + second) == sorted(results.one["predict"])
    assert len({prompt for prompt, _ in first + second}) == len(first + second) == 5


def test_batch_that_two_processes_cannot_share_is_refused(results):
    for result in results.two:
        assert "batch_size 5 does not divide among 2 ranks; 6 would" in result["odd batch"]


def test_second_sampler_is_refused(results):
    for result in results.two:
        assert "set trainer.use_distributed_sampler to false" in result["two samplers"]
