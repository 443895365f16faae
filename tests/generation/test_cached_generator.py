"""The cache of our own: the tokens of transformers' `generate`, for less work."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lit_rl.generation import (
    CachedGenerator,
    SamplingSettings,
    TransformersGenerator,
    cached_generator,
    captured_step,
)
from lit_rl.generation.group_cache import GroupCache, PromptCache
from lit_rl.models import Policy, RandomCausalLM
from lit_rl.models.packing import PackedSequences
from tiny_job import TWO_LAYERS

ROWS = [[1, 4, 13], [1, 4, 5, 6, 13], [1, 12, 13], [1, 4, 13]]  # "1>", "123>", "9>", "1>"
SMALL = {**TWO_LAYERS, "head_dim": 8}
MODELS = {
    "llama": SMALL,
    "qwen2": TWO_LAYERS,
    "qwen3": SMALL,
    "gemma": SMALL,
    # Each window is shorter than prompt and response; gemma2 and 3 have layers of both kinds.
    "mistral": {**SMALL, "sliding_window": 4},
    "gemma2": {**SMALL, "sliding_window": 4, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**SMALL, "sliding_window": 4, "_sliding_window_pattern": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
}
SAMPLING = SamplingSettings(max_new_tokens=12)


def policy_of(model_type, **config):
    fields = {"model_type": model_type, **MODELS.get(model_type, {}), **config}
    source = RandomCausalLM(fields, "0123456789>")
    return Policy(source.model(0)), source.tokenizer()


def both(policy, tokenizer, prompts, sampling=SAMPLING, group_size=5):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [
            generator(policy, tokenizer, prompts, sampling, group_size=group_size, seed=(3,))
            for generator in (CachedGenerator(), TransformersGenerator())
        ]


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("sampling", [SAMPLING, SAMPLING.as_greedy()], ids=["drawn", "greedy"])
def test_tokens_and_log_probs_are_those_of_generate(prompts_of, model_type, sampling):
    policy, tokenizer = policy_of(model_type)
    own, expected = both(policy, tokenizer, prompts_of(ROWS), sampling)
    assert policy.fits_group_cache
    assert torch.equal(own.response_ids, expected.response_ids)
    assert torch.equal(own.mask, expected.mask)
    assert torch.equal(own.finished, expected.finished)
    assert own.responses == expected.responses
    close = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(own.sampler_log_probs, expected.sampler_log_probs, **close)
    if not sampling.greedy:
        assert own.mask.sum(1).unique().numel() > 3  # rows ended at different tokens


@pytest.mark.parametrize(
    "settings", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"stop_strings": ["5", "77"]},
                 {"min_new_tokens": 6, "temperature": 2.0}],
)  # fmt: skip
def test_every_setting_acts_as_with_generate(prompts_of, settings):
    policy, tokenizer = policy_of("llama")
    plain = CachedGenerator()(
        policy, tokenizer, prompts_of(ROWS), SAMPLING, group_size=5, seed=(3,)
    )
    own, expected = both(policy, tokenizer, prompts_of(ROWS), replace(SAMPLING, **settings))
    assert torch.equal(own.response_ids, expected.response_ids)
    assert own.responses != plain.responses
    torch.testing.assert_close(own.filtered_log_probs, expected.filtered_log_probs)


@pytest.mark.parametrize("steps", [3, 100])
def test_looking_seldom_for_ends_changes_nothing(prompts_of, monkeypatch, steps):
    policy, tokenizer = policy_of("llama")
    sampling = replace(SAMPLING, stop_strings=("5", "77"))
    expected = CachedGenerator()(
        policy, tokenizer, prompts_of(ROWS), sampling, group_size=5, seed=(3,)
    )
    monkeypatch.setattr(cached_generator, "STEPS_PER_LOOK", {"cpu": steps})
    own, _ = both(policy, tokenizer, prompts_of(ROWS), sampling)
    assert torch.equal(own.response_ids, expected.response_ids)
    assert torch.equal(own.finished, expected.finished)
    assert own.responses == expected.responses
    torch.testing.assert_close(own.sampler_log_probs, expected.sampler_log_probs)


def test_a_prompt_is_read_once_and_a_response_that_ended_no_more(prompts_of):
    """By hand: 3 prompts of 11 tokens, which all begin with 1; then at each step what runs."""
    policy, tokenizer = policy_of("llama")
    policy.fits_group_cache = True  # without the comparison
    read = []
    policy.model.model.layers[0].register_forward_hook(
        lambda module, inputs, output: read.append(output.shape[:-1].numel())
    )
    rollout = CachedGenerator()(
        policy, tokenizer, prompts_of(ROWS), SAMPLING, group_size=5, seed=(3,)
    )
    lengths = rollout.mask.sum(1)
    assert read == [9, *(int((lengths > step).sum()) for step in range(1, int(lengths.max())))]


def test_places_of_ended_responses_are_taken_by_the_last_ones():
    """By hand: of six places 0, 2 and 5 stay: 5 moves to place 1, and its keys with it."""
    rows = PackedSequences(
        ids=torch.tensor([7, 8]),
        positions=torch.tensor([0, 0]),
        prompt_of_row=torch.tensor([0, 1]),
        prompt_lengths=torch.tensor([1, 1]),
        prompt_tokens=torch.tensor([[0], [1]]),
        num_prompt_tokens=2,
        lengths=torch.tensor([0, 0]),
    )
    cache = GroupCache(PromptCache(rows), torch.tensor([0, 0, 0, 1, 1, 1]), max_new_tokens=4)
    cache.num_tokens = 2
    keys = torch.arange(6.0)[:, None, None, None].expand(6, 1, 4, 1).clone()
    cache.keys[0], cache.values[0] = keys, keys + 10
    assert cache.keep(torch.tensor([0, 2, 5])).tolist() == [0, 5, 2]
    assert cache.keys[0][:3, 0, :2, 0].tolist() == [[0, 0], [5, 5], [2, 2]]
    assert cache.values[0][:3, 0, :2, 0].tolist() == [[10, 10], [15, 15], [12, 12]]
    assert cache.prompt_of_place.tolist() == [0, 1, 0]


def test_a_model_without_position_ids_is_left_to_generate_with_one_warning(prompts_of):
    policy, tokenizer = policy_of("bloom", hidden_size=32, n_layer=2, n_head=4)
    call = {"group_size": 2, "seed": (3,)}
    with pytest.warns(UserWarning, match=r"BloomForCausalLM .*sampled by transformers' generate"):
        own = CachedGenerator()(policy, tokenizer, prompts_of(ROWS), SAMPLING, **call)
    expected = TransformersGenerator()(policy, tokenizer, prompts_of(ROWS), SAMPLING, **call)
    assert torch.equal(own.response_ids, expected.response_ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CachedGenerator()(policy, tokenizer, prompts_of(ROWS), SAMPLING, **call)


def test_a_model_that_attends_otherwise_is_found_and_left_to_generate(prompts_of):
    """Its second layer adds the state of the position before, which a lone new token has not."""
    policy, tokenizer = policy_of("llama")
    policy.model.model.layers[1].register_forward_hook(
        lambda module, inputs, output: output + 5 * output.roll(1, dims=1)
    )
    call = {"group_size": 2, "seed": (3,)}
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM has an attention that"):
        own = CachedGenerator()(policy, tokenizer, prompts_of(ROWS), SAMPLING, **call)
    expected = TransformersGenerator()(policy, tokenizer, prompts_of(ROWS), SAMPLING, **call)
    assert torch.equal(own.response_ids, expected.response_ids)


def test_a_model_in_double_precision_stays_in_it(prompts_of):
    policy, tokenizer = policy_of("gpt2")
    own, expected = both(policy.double(), tokenizer, prompts_of(ROWS))
    assert torch.equal(own.response_ids, expected.response_ids)
    difference = (own.sampler_log_probs - expected.sampler_log_probs).abs().max()
    assert float(difference) < 1e-6


class Recording(TorchDispatchMode):
    """Does on a CPU what a CUDA graph does: repeats operations on the memory that they had.

    What Python decides is decided once; an operation that waits for numbers, or makes a tensor of
    a size that depends on them, cannot be recorded.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert torch.Tag.data_dependent_output not in operation.tags, operation
        if operation is torch.ops.aten.index.Tensor:  # of another size by a mask only
            assert all(index is None or index.dtype == torch.long for index in args[1])
        else:
            assert torch.Tag.dynamic_output_shape not in operation.tags, operation
        result = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, result))
        return result

    def replay(self):
        for operation, args, kwargs, result in self.calls:
            again = operation(*args, **kwargs)
            for old, new in zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def num_captures(rollout):
    """How often: for the second token, and whenever half of the places belong to ended rows."""
    lengths = rollout.mask.sum(1)
    places, captures = len(lengths), 1
    for step in range(1, int(lengths.max())):
        running = int((lengths > step).sum())
        if 2 * running <= places:
            places, captures = running, captures + 1
    return captures


@pytest.fixture
def recordings(monkeypatch):
    """Let `cuda_graphs` run here, on recordings; returns them."""
    made = []

    def captured(function, device):
        for _ in range(captured_step.WARM_UPS):
            function()
        with monkeypatch.context() as patch, Recording() as recording:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            result = function()
        result.fill_(torch.nan)  # a capture computes nothing
        made.append(recording)

        def replay():
            recording.replay()
            return result

        return replay

    monkeypatch.setattr(captured_step, "captured", captured)
    monkeypatch.setattr(CachedGenerator, "refusal", lambda self, device: None)
    return made


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("sampling", [SAMPLING, SAMPLING.as_greedy()], ids=["drawn", "greedy"])
def test_recorded_steps_give_the_same(prompts_of, recordings, model_type, sampling):
    policy, tokenizer = policy_of(model_type)
    sampling = replace(sampling, max_new_tokens=24, temperature=2.0)  # not to end too late
    call = {"group_size": 5, "seed": (3,)}
    plain, graphs = (
        generator(policy, tokenizer, prompts_of(ROWS), sampling, **call)
        for generator in (CachedGenerator(), CachedGenerator(cuda_graphs=True))
    )
    assert policy.fits_group_cache
    assert torch.equal(graphs.response_ids, plain.response_ids)
    assert torch.equal(graphs.mask, plain.mask)
    assert torch.equal(graphs.finished, plain.finished)
    close = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(graphs.sampler_log_probs, plain.sampler_log_probs, **close)
    assert len(recordings) == num_captures(graphs)
    if not sampling.greedy:
        assert len(recordings) > 1
        assert graphs.mask.sum(1).unique().numel() > 3  # rows ended at different tokens
