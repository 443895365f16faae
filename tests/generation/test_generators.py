import logging
import warnings
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from lit_rl.generation import CachedGenerator, SamplingSettings, TransformersGenerator
from lit_rl.models import Policy, RandomCausalLM
from lit_rl.types import Sequences
from tiny_job import TWO_LAYERS

ROWS = [[1, 4, 13], [1, 4, 5, 6, 13], [1, 12, 13]]  # "1>", "123>", "9>"
TEN = SamplingSettings(max_new_tokens=10)
OTHER_ARCHITECTURES = [
    {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
    {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
    {"model_type": "gemma2", **TWO_LAYERS, "head_dim": 8, "final_logit_softcapping": 1.0},
]


@pytest.fixture
def policy(source):
    return Policy(source.model(0))


@pytest.fixture(params=[TransformersGenerator, CachedGenerator])
def generate(request, source):
    """For each generator, `generate(policy, prompts, sampling, ...)`."""

    def rollout(policy, prompts, sampling=TEN, group_size=1, seed=(0,), tokenizer=None):
        return request.param()(
            policy,
            tokenizer or source.tokenizer(),
            prompts,
            sampling,
            group_size=group_size,
            seed=seed,
        )

    return rollout


def tokens(rollout):
    """The sampled ids of each row, without padding."""
    return [
        ids[mask].tolist() for ids, mask in zip(rollout.response_ids, rollout.mask, strict=True)
    ]


def scored(policy, rollout, temperature=1.0):
    sequences = Sequences(
        prompt_ids=rollout.prompt_ids,
        prompt_mask=rollout.prompt_mask,
        response_ids=rollout.response_ids,
        mask=rollout.mask,
    )
    with policy.passes("padded"):
        return policy(sequences, temperature=temperature).log_probs


# ----- what is sampled


def test_the_frequencies_of_tokens_are_the_softmax_probabilities(markov, generate, prompts_of):
    logits = torch.zeros(14, 14)
    logits[3, :6] = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, 1.5])
    count = 4000
    rollout = generate(
        Policy(markov(logits)),
        prompts_of([[3]]),
        SamplingSettings(max_new_tokens=1, temperature=0.8),
        group_size=count,
    )
    probabilities = (logits[3] / 0.8).softmax(0)
    frequencies = rollout.response_ids[:, 0].bincount(minlength=14) / count
    standard_error = (probabilities * (1 - probabilities) / count).sqrt()
    # Four standard errors: over 14 tokens a right sampler fails for one seed of some 1,000.
    assert ((frequencies - probabilities).abs() < 4 * standard_error).all()


def test_the_log_prob_is_the_one_at_the_temperature(markov, generate, prompts_of):
    # Logits 1 and 0 at temperature 0.5: log sigmoid(2) = -0.126928; without it -0.313262.
    logits = torch.full((14, 14), -200.0)
    logits[:, 3], logits[:, 4] = 1.0, 0.0
    policy = Policy(markov(logits))
    sampling = SamplingSettings(max_new_tokens=3, temperature=0.5, greedy=True)
    rollout = generate(policy, prompts_of([[1]]), sampling)
    expected = torch.full((1, 3), -0.126928)
    torch.testing.assert_close(rollout.sampler_log_probs, expected)
    torch.testing.assert_close(scored(policy, rollout, temperature=0.5), expected)


@pytest.mark.parametrize(
    "sampling",
    [
        TEN,
        replace(TEN, temperature=0.6),
        replace(TEN, temperature=1.5, top_k=5, top_p=0.9, min_p=0.05, min_new_tokens=3),
        TEN.as_greedy(),
    ],
)
def test_sampler_and_policy_agree_on_the_log_probs(policy, generate, prompts_of, sampling):
    rollout = generate(policy, prompts_of(ROWS), sampling, group_size=4)
    assert rollout.mask.sum() > 40
    log_probs = scored(policy, rollout, sampling.temperature)
    torch.testing.assert_close(rollout.sampler_log_probs, log_probs, rtol=0, atol=1e-5)
    assert torch.equal(rollout.sampler_log_probs != 0, rollout.mask)


def test_dropout_of_the_architecture_leaves_sampler_and_policy_equal(generate, prompts_of):
    source = RandomCausalLM(OTHER_ARCHITECTURES[0], "0123456789>")
    policy = Policy(source.model(0))  # GPT-2's own config drops with probability 0.1
    rollout = generate(policy, prompts_of(ROWS), group_size=4)
    ratio = (scored(policy, rollout) - rollout.sampler_log_probs).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)


def test_a_row_does_not_depend_on_its_batch(policy, generate, prompts_of):
    together = tokens(generate(policy, prompts_of(ROWS, row_ids=[7, 8, 9]), group_size=3))
    for index, row in enumerate(ROWS):
        alone = generate(policy, prompts_of([row], row_ids=[7 + index]), group_size=2)
        assert tokens(alone) == together[3 * index : 3 * index + 2]


def test_the_same_seed_repeats_and_another_differs(policy, generate, prompts_of):
    prompts = prompts_of(ROWS)
    first = tokens(generate(policy, prompts, group_size=4, seed=(0, 1, 5)))
    assert first == tokens(generate(policy, prompts, group_size=4, seed=(0, 1, 5)))
    for other in [(1, 1, 5), (0, 2, 5), (0, 1, 6)]:
        assert first != tokens(generate(policy, prompts, group_size=4, seed=other))


def test_the_same_prompt_in_another_row_is_sampled_otherwise(policy, generate, prompts_of):
    # So are the rows of two ranks, and the members of a group.
    rollout = generate(policy, prompts_of([ROWS[1]] * 2, row_ids=[3, 4]), group_size=3)
    assert len({tuple(row) for row in tokens(rollout)}) == 6


def test_global_random_state_is_neither_read_nor_changed(policy, generate, prompts_of):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = tokens(generate(policy, prompts_of(ROWS)))
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert first == tokens(generate(policy, prompts_of(ROWS)))


@pytest.mark.parametrize(
    "config", [None, *OTHER_ARCHITECTURES], ids=lambda c: c["model_type"] if c else "llama"
)
def test_a_prompt_alone_is_continued_as_in_a_left_padded_batch(
    policy, generate, prompts_of, config
):
    if config is not None:
        policy = Policy(RandomCausalLM(config, "0123456789>").model(0))
    together = tokens(generate(policy, prompts_of(ROWS), TEN.as_greedy()))
    alone = [tokens(generate(policy, prompts_of([row]), TEN.as_greedy()))[0] for row in ROWS]
    assert together == alone


def test_greedy_responses_are_those_of_transformers(policy, source, generate, prompts_of):
    model = policy.model.eval()
    expected = model.generate(torch.tensor([ROWS[1]]), max_new_tokens=10, do_sample=False)[0, 5:]
    assert tokens(generate(policy, prompts_of([ROWS[1]]), TEN.as_greedy())) == [expected.tolist()]


# ----- what the model's own generation config may not change

HOSTILE = {
    "temperature": 1e-6,
    "top_k": 1,
    "top_p": 0.001,
    "do_sample": False,
    "repetition_penalty": 5.0,
    "no_repeat_ngram_size": 1,
    "min_length": 30,
    "max_length": 7,
    "max_time": 1e-9,
    "suppress_tokens": [3, 4, 5, 6],
    "forced_eos_token_id": 9,
    "forced_bos_token_id": 9,
    "use_cache": False,
    "stop_strings": ["1"],
}


def test_the_generation_config_of_the_model_changes_nothing(policy, generate, prompts_of):
    expected = generate(policy, prompts_of(ROWS), group_size=8)
    hostile = GenerationConfig(**HOSTILE, eos_token_id=2)
    policy.model.generation_config = hostile
    rollout = generate(policy, prompts_of(ROWS), group_size=8)
    assert torch.equal(rollout.response_ids, expected.response_ids)
    assert torch.equal(rollout.sampler_log_probs, expected.sampler_log_probs)
    assert len({tuple(row) for row in tokens(rollout)}) == 24  # not the most probable token only
    assert policy.model.generation_config is hostile
    assert hostile.top_k == 1


def test_all_comes_back_after_an_error(policy, generate, prompts_of, monkeypatch):
    own = policy.model.generation_config
    attention = policy.model.config._attn_implementation

    def fail(*args, **kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr(policy.model.model.layers[1], "forward", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        generate(policy, prompts_of(ROWS))
    assert policy.model.generation_config is own
    assert policy.model.config._attn_implementation == attention
    assert policy.training


def test_nothing_warns(policy, generate, prompts_of, caplog):
    policy.model.generation_config = GenerationConfig(temperature=0.1, do_sample=True, top_k=3)
    transformers_logger = logging.getLogger("transformers")
    transformers_logger.addHandler(caplog.handler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(policy, prompts_of(ROWS), replace(TEN, temperature=0.5, top_k=3, top_p=0.9))
    transformers_logger.removeHandler(caplog.handler)
    assert not caplog.records


# ----- where responses end


def test_masks_come_from_lengths_where_the_end_token_pads(chain, source, generate, prompts_of):
    policy = Policy(chain({10: 5, 5: 7, 7: 2, 4: 11, 11: 8, 8: 9, 9: 6, 6: 12, 3: 2}))
    tokenizer = RandomCausalLM({}, "0123456789>").tokenizer()
    tokenizer.pad_token = "<eos>"
    prompts = prompts_of([[10], [2, 9, 2, 4], [3]], pad_id=2)
    rollout = generate(
        policy, prompts, SamplingSettings(max_new_tokens=5, greedy=True), tokenizer=tokenizer
    )
    expected = torch.tensor([[5, 7, 2, 2, 2], [11, 8, 9, 6, 12], [2, 2, 2, 2, 2]])
    assert torch.equal(rollout.response_ids, expected)
    assert rollout.mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert rollout.finished.tolist() == [True, False, True]
    assert rollout.prompt_mask[1].all()
    assert rollout.responses == ("24", "85639", "")  # ids 3, 4, ... are "0", "1", ...


def test_a_response_is_as_wide_as_the_longest_one(chain, generate, prompts_of):
    rollout = generate(Policy(chain({10: 5, 5: 2, 3: 2})), prompts_of([[10], [3]]), TEN.as_greedy())
    assert rollout.response_ids.tolist() == [[5, 2], [2, 0]]  # not of 10 tokens


def test_the_last_token_at_the_limit_stays_the_sampled_one(policy, generate, prompts_of):
    rollout = generate(policy, prompts_of(ROWS), replace(TEN, max_new_tokens=3), group_size=8)
    longer = generate(policy, prompts_of(ROWS), group_size=8)
    truncated = ~rollout.finished
    assert truncated.sum() > 10
    assert torch.equal(rollout.response_ids[truncated], longer.response_ids[truncated, :3])
    assert rollout.mask[truncated].all()
    last = scored(policy, rollout)[truncated, 2]
    torch.testing.assert_close(rollout.sampler_log_probs[truncated, 2], last, rtol=0, atol=1e-5)


def test_an_end_token_at_once_is_a_response_of_one_token(chain, generate, prompts_of):
    policy = Policy(chain(dict.fromkeys(range(14), 2)))
    policy.model.generation_config.min_length = 10
    rollout = generate(policy, prompts_of(ROWS), group_size=2)
    assert rollout.response_ids.tolist() == [[2]] * 6
    assert rollout.mask.all()
    assert rollout.finished.all()
    assert rollout.responses == ("",) * 6


def test_end_tokens_wait_for_min_new_tokens(chain, generate, prompts_of):
    # Always the end; where it is forbidden all others are equal and the first, 0, is taken.
    policy = Policy(chain(dict.fromkeys(range(14), 2)))
    rollout = generate(policy, prompts_of([[3]]), replace(TEN, min_new_tokens=2, greedy=True))
    assert rollout.response_ids.tolist() == [[0, 0, 2]]


def test_every_end_id_of_model_and_tokenizer_ends_a_response(chain, generate, prompts_of):
    policy = Policy(chain({3: 7, 4: 8, 5: 2, 7: 6, 8: 6, 2: 6}))
    policy.model.generation_config.eos_token_id = [7, 8]
    rollout = generate(policy, prompts_of([[3], [4], [5]]), TEN.as_greedy())
    assert rollout.response_ids.tolist() == [[7], [8], [2]]  # 2 is the tokenizer's
    assert rollout.finished.all()


def test_a_stop_string_ends_a_response_but_not_from_the_prompt(chain, generate, prompts_of):
    # "12" stands in the prompt 4 5 and comes again in the response 6 4 5.
    policy = Policy(chain({5: 6, 6: 4, 4: 5}))
    sampling = replace(TEN, stop_strings=["12"], greedy=True)
    rollout = generate(policy, prompts_of([[4, 5]]), sampling)
    assert rollout.response_ids.tolist() == [[6, 4, 5]]
    assert rollout.finished.tolist() == [True]
    assert rollout.responses == ("3",)


# ----- the policy meanwhile


def test_gradient_checkpointing_leaves_the_cache_in_use(policy, generate, prompts_of):
    expected = tokens(generate(policy, prompts_of(ROWS), TEN.as_greedy()))
    policy.enable_gradient_checkpointing()
    policy.train()
    read = []
    policy.model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: read.append(inputs[0].numel())
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rollout = generate(policy, prompts_of(ROWS), TEN.as_greedy())
    assert tokens(rollout) == expected
    # Three rows at most per token, and no token twice.
    assert max(read[1:]) <= 3
    assert len(read) == rollout.response_ids.shape[1]
    assert policy.model.model.layers[0].gradient_checkpointing
    scored(policy, rollout).sum().backward()


def test_every_submodule_gets_its_mode_back(policy, generate, prompts_of):
    policy.train()
    policy.model.model.layers[1].eval()
    before = {name: module.training for name, module in policy.named_modules()}
    seen = []
    policy.model.model.layers[0].register_forward_hook(lambda m, *_: seen.append(m.training))
    generate(policy, prompts_of(ROWS))
    assert not any(seen)
    assert {name: module.training for name, module in policy.named_modules()} == before


@pytest.mark.filterwarnings("ignore:weights in bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hundred_rollouts_leave_the_weights_bit_for_bit(source, generate, prompts_of, dtype):
    policy = Policy(replace(source, dtype=dtype).model(0))
    policy.train()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    three = replace(TEN, max_new_tokens=3)
    rollouts = [generate(policy, prompts_of(ROWS), three, seed=(n,)) for n in range(100)]
    assert len({rollout.responses for rollout in rollouts}) > 90
    assert policy.state_dict().keys() == before.keys()
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.dtype == before[name].dtype


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_rollouts_may_be_used_in_a_loss(policy, generate, prompts_of, context):
    with context():
        rollout = generate(policy, prompts_of(ROWS), group_size=2)
    assert not rollout.sampler_log_probs.requires_grad
    ratio = (scored(policy, rollout) - rollout.sampler_log_probs).exp()
    ratio.sum().backward()
    assert policy.model.lm_head.weight.grad.abs().sum() > 0


# ----- containers and errors


def test_rows_of_a_prompt_are_contiguous_and_carry_its_columns(policy, generate, prompts_of):
    rollout = generate(policy, prompts_of(ROWS), group_size=2)
    assert torch.equal(rollout.prompt_ids, prompts_of(ROWS).ids[[0, 0, 1, 1, 2, 2]])
    assert torch.equal(rollout.prompt_mask, prompts_of(ROWS).mask[[0, 0, 1, 1, 2, 2]])
    assert rollout.answers == tuple(f"answer {row}" for row in (0, 0, 1, 1, 2, 2))
    assert rollout.columns == {"number": (0, 0, 1, 1, 2, 2)}
    assert rollout.prompts == tuple(str(row) for row in ROWS for _ in range(2))
    assert rollout.group_size == 2


def test_a_group_of_none_is_refused(policy, generate, prompts_of):
    with pytest.raises(ValueError, match="group_size must be at least 1, such as 8; it is 0"):
        generate(policy, prompts_of(ROWS), group_size=0)


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(policy, generate, prompts_of):
    with pytest.raises(
        ValueError, match=r"60 tokens and max_new_tokens = 10 .* context of 64 .* such as 4 new"
    ):
        generate(policy, prompts_of([[4] * 60, [4]]))
    rollout = generate(policy, prompts_of([[4] * 60, [4]]), replace(TEN, max_new_tokens=4))
    assert rollout.response_ids.shape[1] <= 4


def test_an_empty_prompt_is_refused(policy, generate, prompts_of):
    with pytest.raises(ValueError, match="prompt 1 of the batch is empty"):
        generate(policy, prompts_of([[4], []]))
