"""The estimate of memory: counted by hand on a model, and held against the peak of a process."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lit_rl.callbacks.footprint import ALONE, STRATEGIES, footprint
from lit_rl.memory import main, planned

CHARACTERS = "0123456789>+=" + "".join(map(chr, range(0x4E00, 0x4E00 + 2032)))  # vocabulary 2048
MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128,
}
# Weights of a layer: four square matrices, three to or from the wide space, two norms.
LAYER = 4 * 512**2 + 3 * 512 * 1024 + 2 * 512
WEIGHTS = 6 * LAYER + 2 * 2048 * 512 + 512
OPTIONS = [
    *("--model.source.config", json.dumps(MODEL), "--model.source.alphabet", CHARACTERS),
    *("--model.sampling", '{"max_new_tokens": 64, "min_new_tokens": 64}'),
    *("--data.max_prompt_tokens", "5", "--data.batch_size", "8", "--model.group_size", "4"),
    *("--model.micro_batch_tokens", "512", "--model.num_minibatches", "1"),
    *("--model.update_epochs", "1", "--model.skip_zero_advantages", "false"),
]
LORA = {
    "class_path": "lit_rl.models.LoRA",
    "init_args": {"rank": 1, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
}
RANK_1 = ["--model.adapter", json.dumps(LORA)]
BY_NAME = {strategy.name: strategy for strategy in (ALONE, *STRATEGIES)}


def held(*options, devices=1):
    return footprint(*planned([*OPTIONS, *options]), devices=devices)


def test_weights_gradients_and_moments_are_counted():
    """AdamW has two moments per weight; float32 has four bytes."""
    parts = held("--model.kl_coef", "0.1").parts(ALONE, 1)
    assert parts["weights"] == parts["gradients"] == parts["reference"] == 4 * WEIGHTS
    assert parts["optimizer"] == 8 * WEIGHTS
    assert parts["critic"] == 0


def test_cache_and_logits_are_counted():
    """Keys and values of 8 prompts of 5 tokens, and of 32 responses of 64; 512 tokens of logits."""
    footprint = held()
    assert footprint.cache == (8 * 5 + 32 * 64) * 2 * 6 * 512 * 4
    assert footprint.logits == 512 * 2048 * 4
    assert footprint.reference == 0


def test_the_table_shows_every_number_whole(capsys):
    """By hand: the weights in MiB; gradients as many; AdamW two numbers for each of them."""
    main([*OPTIONS, "--devices", "1,2"])
    lines = capsys.readouterr().out.splitlines()
    assert "MiB per device" in lines[0]
    assert not any("…" in line for line in lines)
    (alone,) = [line for line in lines if " auto " in line]
    cells = [cell.strip() for cell in alone.split("│")]
    size = f"{4 * WEIGHTS / 2**20:.3g}"
    assert cells[3] == cells[6] == size
    assert cells[7] == f"{8 * WEIGHTS / 2**20:.3g}"


@pytest.mark.parametrize("devices", ["0", "1,x", "-2", ""])
def test_other_devices_than_numbers_of_at_least_1_are_refused(devices, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--devices", devices])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        f"error: devices {devices!r} must be numbers of at least 1, such as --devices 1,2,8\n"
    )


def test_an_update_holds_all_parts_but_the_cache():
    """Law: also what is gathered of weights in shards, whose layers stand whole in their turn."""
    strategy, footprint = BY_NAME["fsdp2"], held(devices=2)
    parts = footprint.parts(strategy, 2)
    assert parts["gathered"] > 0
    held_in_update = sum(size for name, size in parts.items() if name != "cache")
    assert footprint.stages(strategy, 2)["update"] == pytest.approx(held_in_update)


def test_stage_3_gathers_a_model_of_less_than_a_billion_weights_whole_for_an_update():
    """By hand: DeepSpeed keeps 1e9 weights from the pass forward to that backward."""
    footprint = held(devices=2)
    assert footprint.parts(BY_NAME["deepspeed_3"], 2)["gathered"] == 4 * WEIGHTS
    assert footprint.parts(BY_NAME["deepspeed_3"], 1)["gathered"] == 0
    policy = replace(footprint.policy, weights=12 * 10**9)
    for large in (
        replace(footprint, policy=policy),
        replace(footprint, policy=policy, critic=policy),
    ):
        assert large.parts(BY_NAME["deepspeed_3"], 2)["gathered"] == 4 * 10**9


def test_prompts_at_a_time_bound_what_sampling_takes():
    """By hand: 3 of the 8 prompts, with 4 responses each, at a vocabulary of 2048."""
    footprint = held("--model.prompts_at_a_time", "3")
    assert footprint.cache == (3 * 5 + 12 * 64) * 2 * 6 * 512 * 4
    assert footprint.sampling == 12 * 2048 * 4
    assert held("--model.prompts_at_a_time", "100") == held()


def test_a_chunk_of_logits_is_64_mib_at_most():
    """By hand: 2^24 numbers of float32; a vocabulary of 2048 makes that 8192 tokens."""
    assert held("--model.micro_batch_tokens", "8192", "--data.batch_size", "64").logits == 1 << 26
    assert held("--model.micro_batch_tokens", "20000", "--data.batch_size", "64").logits == 1 << 26


def test_shards_divide_what_the_strategy_cuts():
    footprint = held("--model.kl_coef", "0.1", devices=4)
    weights = {name: footprint.parts(s, 4)["weights"] for name, s in BY_NAME.items()}
    moments = {name: footprint.parts(s, 4)["optimizer"] for name, s in BY_NAME.items()}
    assert weights["ddp"] == weights["deepspeed_2"] == 4 * WEIGHTS
    assert weights["fsdp2"] == weights["deepspeed_3"] == WEIGHTS
    gradients = {name: footprint.parts(s, 4)["gradients"] for name, s in BY_NAME.items()}
    # Once whole, and again in buckets; whole until the last micro-batch; a part.
    assert gradients["ddp"] == 2 * 4 * WEIGHTS
    assert gradients["fsdp2"] == gradients["deepspeed_1"] == 4 * WEIGHTS
    assert gradients["deepspeed_3"] == WEIGHTS
    assert moments["ddp"] == 8 * WEIGHTS
    assert moments["fsdp2"] == 2 * WEIGHTS
    # With a copy of the weights of its part.
    assert moments["deepspeed_1"] == 2 * WEIGHTS + WEIGHTS


def test_an_adapter_is_trained_alone_upon_one_base():
    """Rank 1 on the four square matrices: 2 x 512 weights each."""
    parts = held(*RANK_1, "--model.kl_coef", "0.1").parts(ALONE, 1)
    trained = 4 * 6 * 4 * 2 * 512
    assert parts["gradients"] == parts["reference"] == trained
    assert parts["weights"] == 4 * WEIGHTS + trained


def test_a_critic_with_an_adapter_stands_upon_the_base_of_the_policy_but_under_fsdp2():
    """There it has one of its own, without the output head; each device keeps half."""
    footprint = held("--model", "lit_rl.algorithms.PPO", *RANK_1, devices=2)
    critics = {name: footprint.parts(s, 2)["critic"] for name, s in BY_NAME.items()}
    trained = 4 * 6 * 4 * 2 * 512
    assert critics["ddp"] == critics["deepspeed_1"] == trained
    assert critics["deepspeed_3"] == trained / 2
    assert critics["fsdp2"] == (4 * (WEIGHTS - 2048 * 512) + trained) / 2


def measured(folder, *options, devices=1):
    """Return the peak of the process that needs most."""
    worker = Path(__file__).with_name("memory_worker.py")
    run = subprocess.run(
        [sys.executable, str(worker), str(folder), *OPTIONS, *options],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    peaks = [int(file.read_text()) for file in folder.iterdir()]
    assert len(peaks) == devices
    return max(peaks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--model.kl_coef", "0.1"], id="grpo with a reference"),
        pytest.param(["--model.micro_batch_tokens", "2048"], id="grpo with one large pass"),
        pytest.param(["--model", "lit_rl.algorithms.PPO"], id="ppo"),
    ],
)
def test_the_peak_of_a_process_is_the_estimate_within_15_percent(tmp_path, options):
    options = [*options, "--model.entropy_coef", "0.0"]
    expected = max(held(*options).stages(ALONE, 1).values())
    assert measured(tmp_path, *options) == pytest.approx(expected, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--model.kl_coef", "0.1"], id="grpo with a reference"),
        pytest.param(["--model", "lit_rl.algorithms.PPO"], id="ppo"),
    ],
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_peak_of_each_of_two_processes_is_the_estimate_within_15_percent(
    tmp_path, strategy, options
):
    """With several micro-batches to an update, whose gradients FSDP2 adds up whole."""
    options = [*options, "--model.entropy_coef", "0.0"]
    expected = max(held(*options, devices=2).stages(BY_NAME[strategy], 2).values())
    config = Path(__file__).parents[1] / "configs" / "strategy" / f"{strategy}.yaml"
    peak = measured(tmp_path, *options, f"--config={config}", "--trainer.devices=2", devices=2)
    assert peak == pytest.approx(expected, rel=0.15)
