"""The comparison with TRL is of equal work: lengths, losses, and the floor under both."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from compare import lit_rl_side
from compare.clock import StageClock
from compare.fixed_rollout import check_agreement
from compare.floor import Products, forward_operations, iteration_operations
from compare.process import Job, run_fresh, run_here
from compare.report import Comparison, Pair
from compare.workloads import WORKLOADS, Workload, planned_lengths, prompts, write_model
from lit_rl.models import PretrainedCausalLM, RandomCausalLM

RAGGED = Workload(
    about="tiny and ragged",
    model="tiny",
    num_prompts=2,
    prompt_tokens=5,
    min_new_tokens=2,
    max_new_tokens=12,
    group_size=4,
)
EQUAL = replace(RAGGED, min_new_tokens=12)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A measurement of a workload, with its model written."""

    def build(workload, **settings):
        folder = tmp_path_factory.mktemp("compare") / "model"
        write_model(workload, folder)
        return Job(workload=workload, folder=str(folder), threads=1, **settings)

    return build


@pytest.fixture
def model():
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    # torch counts the products of the attention where they are made one by one.
    return RandomCausalLM(config=config, alphabet="abc", attn_implementation="eager").model(0)


def test_a_forward_pass_has_the_operations_that_torch_counts(model):
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(3, 7, dtype=torch.long))
    # Without a mask of its own, torch multiplies every query with every key of its row.
    expected = Products.of(model).forward(positions=21, pairs=3 * 7 * 7, logits=21)
    assert counter.get_total_flops() == expected


def test_the_backward_pass_has_twice_as_many(model):
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(3, 7, dtype=torch.long)).logits.sum().backward()
    expected = Products.of(model).forward(positions=21, pairs=3 * 7 * 7, logits=21)
    assert counter.get_total_flops() == 3 * expected


# One prompt of two tokens, and responses of one and of three tokens, of which none and two are
# read: 2 + 2 positions; the queries attend to 1, 2 | 3, 4 keys, 10 in all; the distributions of
# the first token (one for the group), the second and the third are needed.
# Layers of 2 x 3 and 3 x 2 weights, queries of 4 numbers, 5 words:
# linear 4 x 12 = 48, attention 2 x 10 x 4 = 80, head 3 x 2 x 5 = 30 multiplications.
BY_HAND = Products(linear=((2, 3), (3, 2)), head=(2, 5), attention=4)
ONE_PROMPT = replace(RAGGED, num_prompts=1, prompt_tokens=2, group_size=2)


def test_the_floor_reads_a_prompt_once_and_no_last_token():
    assert forward_operations(BY_HAND, ONE_PROMPT, [1, 3]) == 2 * (48 + 80 + 30)


def test_the_floor_of_an_iteration_has_five_passes():
    """Sampling, the reference, and the update as a forward and a backward pass."""
    operations = iteration_operations(BY_HAND, ONE_PROMPT, [1, 3])
    assert operations == {"generate": 316, "log_probs": 316, "update": 948}


def test_the_floor_of_ppo_counts_the_critic_without_a_head():
    ppo = replace(ONE_PROMPT, algorithm="PPO")
    operations = iteration_operations(BY_HAND, ppo, [1, 3])
    assert operations == {"generate": 316, "log_probs": 316 + 256, "update": 3 * (316 + 256)}


def test_planned_lengths_are_those_of_the_seed_and_within_their_bounds():
    ragged = WORKLOADS["ragged"]
    lengths = [planned_lengths(ragged, seed=3, iteration=number) for number in range(20)]
    assert lengths == [planned_lengths(ragged, seed=3, iteration=number) for number in range(20)]
    assert lengths[0] != lengths[1] != planned_lengths(ragged, seed=4, iteration=1)
    every = [length for iteration in lengths for length in iteration]
    # 320 draws out of 93 lengths: the bounds themselves need not be among them.
    assert 4 <= min(every) < 10
    assert 90 < max(every) <= 96


@pytest.mark.parametrize(
    "workload", [RAGGED, EQUAL, replace(EQUAL, algorithm="PPO")], ids=["ragged", "equal", "ppo"]
)
def test_lit_rl_keeps_the_planned_lengths(workload, job):
    """The measurement itself compares the lengths of every iteration with the plan."""
    result = run_here("lit_rl", job(workload, iterations=2))
    assert len(result["iterations"]) == 2
    assert len(result["warm_up"]) == 1


def test_lengths_that_are_not_the_planned_ones_are_refused(job, monkeypatch):
    monkeypatch.setattr(lit_rl_side, "PlannedEnds", lambda plan: NotInstalled())
    with pytest.raises(RuntimeError, match=r"lit_rl generated .* tokens per response, not"):
        run_here("lit_rl", job(RAGGED))


class NotInstalled:
    def installed(self):
        return StageClock().stage("rest")


@pytest.mark.slow
@pytest.mark.parametrize("workload", [RAGGED, EQUAL], ids=["ragged", "equal"])
def test_trl_keeps_the_planned_lengths(workload, job):
    pytest.importorskip("trl")
    result = run_fresh("trl", job(workload, iterations=2))
    assert len(result["iterations"]) == 2


@pytest.mark.slow
def test_the_losses_of_both_agree_and_any_other_loss_does_not(job, monkeypatch):
    pytest.importorskip("trl")
    rollout = job(RAGGED, task="agree")
    expected = run_fresh("trl", rollout)
    check_agreement(expected, run_here("lit_rl", rollout))
    monkeypatch.setattr(lit_rl_side, "KL_COEF", 0.041)
    with pytest.raises(RuntimeError, match="the loss of TRL is"):
        check_agreement(expected, run_here("lit_rl", rollout))


@pytest.mark.parametrize(("name", "factor"), [("loss", 1.0001), ("gradient norm", 1.001)])
def test_a_small_difference_is_no_agreement(name, factor):
    numbers = {"loss": 0.5, "gradient norm": 3.0}
    check_agreement(numbers, dict(numbers))
    with pytest.raises(RuntimeError, match=f"the {name} of TRL is"):
        check_agreement(numbers, {**numbers, name: factor * numbers[name]})


def test_prompts_have_exactly_their_tokens_and_differ(job):
    tokenizer = PretrainedCausalLM(job(EQUAL).folder).tokenizer()
    texts = prompts(EQUAL, tokenizer, 6)
    assert [len(tokenizer(text)["input_ids"]) for text in texts] == [5] * 6
    assert len(set(texts)) == 6
    with pytest.raises(ValueError, match=r"prompts of \[5\] tokens, not 6"):
        prompts(replace(EQUAL, prompt_tokens=6), tokenizer, 6)


def test_a_stage_within_a_stage_takes_its_time_out_of_it(monkeypatch):
    times = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0])
    monkeypatch.setattr("compare.clock.perf_counter", lambda: next(times))
    monkeypatch.setattr("compare.clock.process_time", iter([1.0, 24.0, 24.0]).__next__)
    clock = StageClock()
    with clock.stage("log_probs"), clock.stage("generate"):
        pass
    clock.end_iteration()
    # Begun at 0, log_probs from 1, generate from 3 to 7, log_probs again to 15, the end at 31.
    seconds = {"rest": 17, "log_probs": 10, "generate": 4, "score": 0, "update": 0}
    assert clock.iterations == [{**seconds, "iteration": 31, "processor": 23}]


def side(seconds, peak):
    stages = dict.fromkeys(("generate", "score", "log_probs", "update", "rest"), 0.25 * seconds)
    return {
        "iterations": [{**stages, "iteration": seconds, "processor": 2 * seconds}],
        "peak_bytes": peak * 2**20,
        "stage_peak_bytes": dict.fromkeys(("set_up", *stages), peak * 2**20),
    }


def test_the_report_compares_pair_by_pair():
    operations = [{"generate": 100, "log_probs": 100, "update": 300}]
    pairs = [
        Pair(
            sides={"trl": side(trl, 600), "lit_rl": side(lit_rl, 200)},
            tokens=[64],
            operations=operations,
            operations_per_second=rate,
            load=0.5,
        )
        for trl, lit_rl, rate in ((30.0, 10.0, 100.0), (20.0, 10.0, 50.0), (50.0, 10.0, 50.0))
    ]
    losses = {name: {"loss": 0.5, "gradient norm": 2.0} for name in ("trl", "lit_rl")}
    report = Comparison("short", WORKLOADS["short"], "python x", 2, pairs, losses).markdown()
    # Ratios 3, 2 and 5. The floors are 500 operations at 100, 50 and 50 per second: 5, 10 and 10
    # seconds, so that lit_rl takes 2, 1 and 1 times as long.
    assert "| seconds | 3.00 | 2.00 | 5.00 | 3.00, 2.00, 5.00 |" in report
    assert "| peak memory | 3.00 | 3.00 | 3.00 | 3.00, 3.00, 3.00 |" in report
    assert "| lit_rl | 2.5 | 2.5 | 2.5 | 2.5 | 2.5 | 10 | 20 | 1.00 |" in report
    # 64 tokens in a quarter of 30, 20 and 50 seconds: 8.5, 12.8 and 5.1 per second.
    assert "| trl | 8.5 | 8.5 | 600 |" in report
