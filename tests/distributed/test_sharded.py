"""Law: shards of weights, gradients and optimizer state change no result.

Two processes under each strategy that keeps a part of the state per process are compared with one
process that has all of it and takes each minibatch whole.
"""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_rl.checkpoints import verify

pytestmark = pytest.mark.slow

EVERYWHERE = ["grpo", "uneven", "skip_zero_advantages", "ppo", "ppo_resumed", "ppo_lora"]
WEIGHTS_IN_SHARDS = [
    "dr_grpo",
    "ppo_validated",
    "ppo_shared_trunk",
    "ppo_stopped",
    "dapo",
    "reference_sync",
    "reference_sync_resumed",
    "tied",
    "pretrained",
    "built_before",
]
WITH_RANK_0 = ["fsdp2", "deepspeed_3"]
BUILDING = ["built", "adapter refused", "critic refused"]
STRATEGIES = {
    "fsdp2": [*EVERYWHERE, *WEIGHTS_IN_SHARDS],
    "deepspeed_1": EVERYWHERE,
    "deepspeed_2": EVERYWHERE,
    "deepspeed_3": [*EVERYWHERE, *WEIGHTS_IN_SHARDS],
}
CASES = [f"{strategy}/{name}" for strategy, names in STRATEGIES.items() for name in names]
TIMES = ("time/", "throughput/", "total/seconds")


# DeepSpeed reads a checkpoint of stage 3 only to train on.
ANSWERED = [f"{strategy}/predict_resumed" for strategy in ("fsdp2", "deepspeed_1", "deepspeed_2")]
WITH_ADAM = ["fsdp2/ppo_adamw", "deepspeed_3/ppo_adamw"]
IN_BFLOAT16 = ["fsdp2/bfloat16", "deepspeed_2/bfloat16", "deepspeed_3/bfloat16"]
SKIPPING = ["skipped_loss", "skipped_gradient", "nothing_skipped"]
SKIPPING_IN_BFLOAT16 = ["deepspeed_2/skipped_in_bfloat16", "deepspeed_3/skipped_in_bfloat16"]
RESUMED = ["ddp", "fsdp2", "fsdp2_file", "deepspeed_3"]
BIT_FOR_BIT = [
    f"{strategy}/ppo_adamw{suffix}"
    for strategy in RESUMED
    for suffix in ("", "_resumed_1", "_resumed_2", "_over")
    if f"{strategy}/ppo_adamw{suffix}" not in WITH_ADAM
]
DAMAGED = [f"{strategy}/damaged" for strategy in RESUMED]
REFUSING = ["fsdp2/trpo refused", "deepspeed_2/trpo refused"]


@pytest.fixture(scope="module")
def results(run_scenarios):
    """All strategies in one launch of two processes; then one process reads what they wrote."""
    compared = (*EVERYWHERE, *WEIGHTS_IN_SHARDS, "ppo_adamw", "predict", "built")
    alone = [f"ddp/{name}" for name in compared]
    written = ["fsdp2/resumed", "ddp/predict_resumed"]
    return run_scenarios(
        [
            *CASES,
            *WITH_ADAM,
            *ANSWERED,
            *REFUSING,
            *IN_BFLOAT16,
            *(f"{strategy}/{name}" for strategy in ("ddp", *STRATEGIES) for name in SKIPPING),
            *SKIPPING_IN_BFLOAT16,
            *BIT_FOR_BIT,
            *DAMAGED,
            "ddp/ppo",  # whose checkpoints one process reads as usual
            "ddp/reference_sync",
            *(f"{strategy}/{name}" for strategy in WITH_RANK_0 for name in BUILDING),
        ],
        [*alone, *written, "deepspeed_2/resume refused"],
    )


def of_one(results, case):
    return results.one[case.partition("/")[2]]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_the_weights_of_one(results, case):
    one, first, second = of_one(results, case), *(result[case] for result in results.two)
    assert torch.equal(first["initial"], one["initial"])
    assert torch.equal(first["weights"], second["weights"])
    torch.testing.assert_close(first["weights"], one["weights"], rtol=0, atol=1e-6)
    assert (one["weights"] - one["initial"]).abs().max() > 0.01


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_stage_3_knows_in_which_order_weights_are_needed(results, name):
    """So it gathers them ahead, once for both passes; else each when it is needed, and again."""
    assert [result[f"deepspeed_3/{name}"]["knows_order"] for result in results.two] == [[True]] * 2


@pytest.mark.parametrize("strategy", WITH_RANK_0)
def test_rank_0_alone_builds_models_whole(results, strategy):
    """Policy, critic and reference: the other rank has their numbers, but never room for all.

    In the end each keeps half of them, and the other rank never has more but for the weight that is
    handed out and some buffers. Rank 0 holds them whole and its half of a model besides.
    """
    one, *two = (results.one["built"], *(result[f"{strategy}/built"] for result in results.two))
    for ranks in two:
        assert ranks["hashes"] == one["hashes"]
        assert ranks["reference"] == one["reference"] == one["hashes"][2]
        assert ranks["bytes"] == one["bytes"] > 300e6
    assert two[0]["peak"] > one["bytes"]
    assert two[1]["peak"] < 0.6 * one["bytes"]


@pytest.mark.parametrize("strategy", WITH_RANK_0)
def test_models_that_rank_0_cannot_build_are_refused_by_all(results, strategy):
    """The second error comes when the other rank has a policy without numbers already."""
    for result in results.two:
        adapter, critic = (result[f"{strategy}/{name} refused"] for name in ("adapter", "critic"))
        assert "['nowhere'] is no linear layer of LlamaForCausalLM" in adapter
        assert critic == "there is no critic"


@pytest.mark.parametrize("case", WITH_ADAM)
def test_adam_trains_the_same_weights_up_to_what_it_makes_of_rounding(results, case):
    """Where a gradient is nearly 0, Adam's step is the learning rate in the direction of noise.

    So nearly all weights agree, and none differs by more than its 12 steps of 1e-3 in opposite
    directions. A wrong scale of the gradient shows with SGD above.
    """
    one, first = of_one(results, case), results.two[0][case]
    difference = (first["weights"] - one["weights"]).abs()
    assert (difference > 1e-5).float().mean() < 0.01
    assert difference.max() < 2 * 12 * 1e-3
    assert (one["weights"] - one["initial"]).abs().max() > 5e-3


@pytest.mark.parametrize("case", CASES)
def test_metrics_and_controllers_are_those_of_one(results, case):
    """1e-5 relative; 2e-6 nats absolute, for differences of log-probs of a few nats in float32."""
    one, *two = (of_one(results, case), *(result[case] for result in results.two))
    assert one["metrics"]
    for ranks in two:
        for mine, expected in zip(ranks["metrics"], one["metrics"], strict=True):
            assert list(mine) == list(expected)
            for metric, value in mine.items():
                if not metric.startswith(TIMES):
                    right = pytest.approx(expected[metric], rel=1e-5, abs=2e-6, nan_ok=True)
                    assert value == right, metric


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_processes_differ_in_lengths_and_in_rows_to_train(results, strategy):
    """What the laws above are about: lengths of responses, micro-batches, an empty share."""
    longest = [
        [max(map(len, rows)) for rows in result[f"{strategy}/uneven"]["responses"]]
        for result in results.two
    ]
    assert longest[0] != longest[1]
    first, second = (result[f"{strategy}/grpo"] for result in results.two)
    counts = [[count for count, _ in seen["updates"]] for seen in (first, second)]
    assert any(a != b for a, b in zip(*counts, strict=True))
    assert max(*counts[0], *counts[1]) > 2
    shares = [
        [count for count, _ in result[f"{strategy}/skip_zero_advantages"]["updates"]]
        for result in results.two
    ]
    assert any(a == 0 and b > 0 for a, b in zip(*shares, strict=True))


@pytest.mark.parametrize("name", ["skipped_loss", "skipped_gradient"])
@pytest.mark.parametrize("strategy", ["ddp", *STRATEGIES])
def test_update_that_is_not_finite_on_one_process_is_skipped_on_both(results, strategy, name):
    """The first of eight. The others are those of a run that never saw that minibatch, with SGD.

    So nothing of its gradient is left, neither that of the rank that was finite.
    """
    prefix = "" if strategy == "ddp" else f"{strategy}/"
    first, second = (result[f"{prefix}{name}"] for result in results.two)
    assert torch.equal(first["weights"], second["weights"])
    for result in results.two:
        skipped, without = result[f"{prefix}{name}"], result[f"{prefix}nothing_skipped"]
        assert [metrics["skipped_updates"] for metrics in skipped["metrics"]] == [1.0, 1.0]
        fingerprints = [value for _, value in skipped["updates"]]
        assert fingerprints[0] == skipped["initial"].double().sum().item()
        assert fingerprints[1:] == [value for _, value in without["updates"]]
        assert len(set(fingerprints)) == len(fingerprints) == 8
        assert torch.equal(skipped["weights"], without["weights"])


@pytest.mark.parametrize("case", SKIPPING_IN_BFLOAT16)
def test_update_that_is_not_finite_is_skipped_in_bfloat16(results, case):
    first, second = (result[case] for result in results.two)
    assert torch.equal(first["weights"], second["weights"])
    assert first["weights"].isfinite().all()
    assert [metrics["skipped_updates"] for metrics in first["metrics"]] == [1.0, 1.0]
    fingerprints = [value for _, value in first["updates"]]
    assert len(set(fingerprints)) == len(fingerprints) == 8


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resumed_run_is_the_uninterrupted_one(results, strategy):
    for result in results.two:
        resumed, whole = result[f"{strategy}/ppo_resumed"], result[f"{strategy}/ppo"]
        assert resumed["responses"] == whole["responses"][1:]
        assert torch.equal(resumed["weights"], whole["weights"])
        coefficients = [metrics["kl_coef"] for metrics in whole["metrics"]]
        assert coefficients[1] != coefficients[2]
        assert [metrics["kl_coef"] for metrics in resumed["metrics"]] == coefficients[1:]


@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed_3"])
def test_moved_reference_is_resumed(results, strategy):
    for result in results.two:
        resumed, whole = (
            result[f"{strategy}/{name}"] for name in ("reference_sync_resumed", "reference_sync")
        )
        assert torch.equal(resumed["weights"], whole["weights"])


@pytest.mark.parametrize("iteration", [1, 2])
@pytest.mark.parametrize("strategy", RESUMED)
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(results, strategy, iteration):
    """With AdamW: weights, the part of its state that each process has, and rows of metrics."""
    prefix = "" if strategy == "ddp" else f"{strategy}/"
    for result in results.two:
        resumed = result[f"{prefix}ppo_adamw_resumed_{iteration}"]
        whole = result[f"{prefix}ppo_adamw"]
        assert resumed["responses"] == whole["responses"][iteration:]
        assert torch.equal(resumed["weights"], whole["weights"])
        assert whole["optimizer"]
        for part, expected in zip(resumed["optimizer"], whole["optimizer"], strict=True):
            assert torch.equal(part, expected)
        for row, expected in zip(resumed["metrics"], whole["metrics"][iteration:], strict=True):
            assert without_times(row) == without_times(expected)


@pytest.mark.parametrize("strategy", RESUMED)
def test_resumed_run_that_is_over_is_exported(results, strategy):
    """Its weights are those of the run of three iterations behind the second, of 4 updates each."""
    prefix = "" if strategy == "ddp" else f"{strategy}/"
    model = AutoModelForCausalLM.from_pretrained(results.folder / f"over-{strategy}-2")
    for result in results.two:
        over, whole = result[f"{prefix}ppo_adamw_over"], result[f"{prefix}ppo_adamw"]
        assert over["responses"] == []
        assert over["weights"].double().sum().item() == whole["updates"][7][1]
        exported = weights_of(model)
        assert torch.equal(exported, over["weights"][: len(exported)])


def without_times(row):
    """Exactly what is logged, NaN included."""
    return {name: repr(value) for name, value in row.items() if not name.startswith(TIMES)}


@pytest.mark.parametrize("strategy", RESUMED)
def test_checkpoints_are_folders_or_files_as_the_strategy_says(results, strategy):
    path = results.folder / f"adamw-{strategy}-1.ckpt"
    assert path.is_dir() == (strategy in ("fsdp2", "deepspeed_3"))
    verify(path)


@pytest.mark.parametrize("strategy", RESUMED)
def test_checkpoint_of_which_one_byte_is_changed_is_refused_by_all_processes(results, strategy):
    """The largest file of each strategy."""
    prefix = "" if strategy == "ddp" else f"{strategy}/"
    first, second = (result[f"{prefix}damaged"] for result in results.two)
    assert first == second
    shard = {
        "fsdp2": r"the content of __[01]_0\.distcp",
        "deepspeed_3": r"the content of checkpoint/\S*zero_pp_rank_[01]_\S*\.pt",
    }.get(strategy, "its content")
    path = rf"damaged-adamw-{strategy}-1\.ckpt"
    assert re.search(rf"{path} is damaged: {shard} does not match its hash", first)


def test_one_process_continues_what_two_began(results):
    resumed, whole = results.one["fsdp2/resumed"], results.one["grpo"]
    assert resumed["responses"] == whole["responses"][1:]
    torch.testing.assert_close(resumed["weights"], whole["weights"], rtol=0, atol=1e-6)


def test_one_process_is_told_why_it_cannot_continue_what_two_began_with_deepspeed(results):
    said = results.one["deepspeed_2/resume refused"]
    assert "was written by 2 ranks" in said
    assert "use --trainer.devices 2" in said


@pytest.mark.parametrize("case", IN_BFLOAT16)
def test_bfloat16_trains_the_same_weights_everywhere_from_a_kl_of_zero(results, case):
    first, second = (result[case] for result in results.two)
    assert torch.equal(first["weights"], second["weights"])
    assert (first["weights"] - first["initial"]).abs().max() > 0.01
    kls = [metrics["kl/reference_k3"] for metrics in first["metrics"]]
    assert 0 <= kls[0] < 1e-6 < kls[-1]


@pytest.mark.parametrize("case", REFUSING)
def test_trpo_is_refused_with_the_reason(results, case):
    for result in results.two:
        said = result[case]
        assert "keeps the policy in parts" in said
        assert "--trainer.strategy ddp or auto" in said


@pytest.mark.parametrize("case", ANSWERED)
def test_predictions_of_a_checkpoint_are_those_of_one_process(results, case):
    """A checkpoint of a run with a critic, of which answers need nothing."""
    parts = [result[case] for result in results.two]
    assert all(parts)
    assert sorted(parts[0] + parts[1]) == sorted(results.one["predict_resumed"])
    assert results.one["predict_resumed"] != results.one["predict"]


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_export_is_the_policy_in_memory(results, strategy):
    model = AutoModelForCausalLM.from_pretrained(results.folder / f"ppo-{strategy}-2")
    exported = weights_of(model)
    assert torch.equal(exported, results.two[0][f"{strategy}/ppo"]["weights"][: len(exported)])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_export_with_an_adapter_has_the_logits_of_that_of_one_process(results, strategy):
    """The adapter is merged into what is written; 1e-5 for logits of weights that agree to 1e-6."""
    ids = torch.arange(3, 13)[None]
    models = [
        AutoModelForCausalLM.from_pretrained(results.folder / name)
        for name in (f"ppo_lora-{strategy}-2", "ppo_lora-ddp-1")
    ]
    with torch.no_grad():
        logits, expected = (model(ids).logits for model in models)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    initial = results.one["ppo_lora"]["initial"]
    assert not torch.equal(weights_of(models[0]), initial[: len(weights_of(models[0]))])
