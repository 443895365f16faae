"""Packed passes say what padded ones say, for less work."""

from dataclasses import replace

import pytest
import torch

from lit_rl.models import Policy, packing
from lit_rl.models.packing import (
    KEY_COST,
    blocks_cost,
    cheapest_blocks,
    packed,
    response_blocks,
)
from lit_rl.models.response_states import packing_fits, response_states
from lit_rl.types import Sequences
from random_batch import random_batch

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gpt2", "mistral", "cohere", "opt"]

# Prompts A = (1, 7, 11) and B = (1, 13), left-padded; rows A, B, A, A, B out of order, one of them
# without a token that counts.
A, B = [1, 7, 11], [0, 1, 13]
BATCH = Sequences(
    prompt_ids=torch.tensor([A, B, A, A, B]),
    prompt_mask=torch.tensor([[True] * 3, [False, True, True], [True] * 3, [True] * 3,
                              [False, True, True]]),
    response_ids=torch.tensor([[5, 6, 9, 2], [8, 2, 0, 0], [5, 2, 0, 0], [4, 4, 4, 4],
                               [9, 9, 9, 0]]),
    mask=torch.tensor([[True] * 4, [True, True, False, False], [True, True, False, False],
                       [False] * 4, [True, True, True, False]]),
)  # fmt: skip


def both(policy, batch, function):
    results = []
    for layout in ("packed", "padded"):
        policy.layout = layout
        results.append(function(policy, batch))
    return results


def test_what_rows_have_in_common_stands_once():
    """By hand: both prompts begin with 1; `unique` sorts B before A; last tokens are not read."""
    rows = packed(BATCH, with_end=False)
    assert rows.ids.tolist() == [1, 13, 7, 11, 5, 6, 9, 8, 5, 9, 9]
    assert rows.positions.tolist() == [0, 1, 1, 2, 3, 4, 5, 2, 3, 2, 3]
    assert rows.prompt_of_row.tolist() == [1, 0, 1, 1, 0]
    assert rows.prompt_tokens.tolist() == [[0, 1, 1], [0, 2, 3]]
    whole = packed(BATCH, with_end=True)
    assert len(whole.ids) == 4 + BATCH.mask.sum()


def test_a_prompt_may_be_the_beginning_of_another():
    """By hand: (1, 13) and (1, 13, 5): the second adds a token."""
    ids = torch.tensor([[0, 1, 13], [1, 13, 5]])
    batch = BATCH.select(torch.tensor([1, 0]))
    batch = replace(batch, prompt_ids=ids, prompt_mask=ids > 0)
    rows = packed(batch, with_end=False)
    assert rows.ids[:3].tolist() == [1, 13, 5]
    assert rows.num_prompt_tokens == 3
    assert rows.prompt_tokens.tolist() == [[0, 1, 1], [0, 1, 2]]


def test_states_are_those_before_each_token():
    """By hand, with the state of a token being its place in the row of the test above."""
    states = packed(BATCH, with_end=False).states(torch.arange(11.0)[:, None], 4)[..., 0]
    assert states[0].tolist() == [3, 4, 5, 6]  # the last token of prompt A, then its own
    assert states[1, :2].tolist() == [1, 7]
    assert states[2, :2].tolist() == [3, 8]
    assert states[4, :3].tolist() == [1, 9, 10]


@pytest.mark.parametrize("rows_per_block", [1, 2, 3, 8])
def test_a_response_attends_to_its_prompt_and_to_itself(rows_per_block):
    """Law: the tokens that a query attends to are its sequence up to it, however rows are split."""
    batch = random_batch()
    rows = packed(batch, with_end=True)
    blocks = response_blocks(rows, rows_per_block)
    attends = blocks.attends(None)
    queries = 0
    for number, place in enumerate(blocks.places.tolist()):
        block, query = divmod(place, blocks.queries.shape[1])
        token = rows.num_prompt_tokens + number
        assert blocks.queries[block, query] == token
        seen = sorted(blocks.keys[block][attends[block, query]].tolist())
        row = int((rows.response_starts <= token).nonzero().max())
        prompt = int(rows.prompt_of_row[row])
        of_prompt = rows.prompt_tokens[prompt, : int(rows.prompt_lengths[prompt])].tolist()
        assert seen == [*of_prompt, *range(int(rows.response_starts[row]), token + 1)]
        queries += 1
    assert queries == batch.mask.sum()


def cost_of(blocks):
    num_blocks, queries = blocks.queries.shape
    return num_blocks * blocks.keys.shape[1] * (queries + KEY_COST)


@pytest.mark.parametrize("rows_of_prompt", [(8,), (3, 1, 5)])
def test_the_split_is_the_one_of_least_cost(rows_of_prompt):
    rows = packed(random_batch(rows_of_prompt=rows_of_prompt), with_end=False)
    costs = [blocks_cost(rows, number) for number in (1, 2, 4, 8)]
    # The tables that are made cost what was said of them.
    assert costs == [cost_of(response_blocks(rows, number)) for number in (1, 2, 4, 8)]
    assert cost_of(cheapest_blocks(rows)) == min(costs)
    assert len(set(costs)) > 1


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_packed_log_probs_are_the_padded_ones(tiny_source, model_type):
    policy = Policy(tiny_source(model_type).model(0))
    assert policy.layout == "packed"
    for batch in (BATCH, random_batch()):
        packs, pads = both(policy, batch, lambda p, b: p(b, temperature=0.7))
        torch.testing.assert_close(packs.log_probs, pads.log_probs, rtol=0, atol=1e-5)
        torch.testing.assert_close(packs.entropy, pads.entropy, rtol=0, atol=1e-5)
    # The rows differ at all, and so do the tokens.
    assert pads.log_probs[batch.mask].unique().numel() > 20


@pytest.mark.parametrize("model_type", ["mistral", "gemma2"])
def test_a_sliding_window_is_kept(tiny_source, model_type):
    """With a window of 3 tokens a log-prob differs from that of the whole context."""
    model = tiny_source(model_type).model(0)
    policy = Policy(model)
    whole = policy(random_batch(), temperature=1.0).log_probs
    windowed = tiny_source(model_type, config={"sliding_window": 3}).model(0)
    windowed.load_state_dict(model.state_dict())
    policy = Policy(windowed)
    packs, pads = both(policy, random_batch(), lambda p, b: p(b, temperature=1.0).log_probs)
    torch.testing.assert_close(packs, pads, rtol=0, atol=1e-5)
    assert (packs - whole).abs().max() > 1e-3


def test_biases_are_made_once_for_all_layers_of_a_window(tiny_source, monkeypatch):
    """By hand: two layers of one window, whose prompts and responses have a bias each."""
    made, original = [], packing._bias
    monkeypatch.setattr(
        packing, "_bias", lambda allowed, dtype: made.append(1) or original(allowed, dtype)
    )
    Policy(tiny_source("mistral").model(0))(random_batch(), temperature=1.0)
    assert len(made) == 2


@pytest.mark.parametrize(
    ("model_type", "dtype", "tolerance"),
    [
        ("gpt2", torch.float64, 1e-12),
        # These compute their norms in float32 whatever the weights are.
        ("llama", torch.float32, 1e-5),
        ("gemma2", torch.float32, 1e-5),
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_gradients_are_the_padded_ones(
    tiny_source, model_type, dtype, tolerance, checkpointing
):
    policy = Policy(tiny_source(model_type).model(0)).to(dtype)
    if checkpointing:
        policy.enable_gradient_checkpointing()

    def gradient(policy, batch):
        policy.zero_grad()
        output = policy(batch, temperature=1.0)
        (output.log_probs.sum() + output.entropy.square().sum()).backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters()])

    packs, pads = both(policy, random_batch(), gradient)
    assert (packs - pads).abs().max() <= tolerance * pads.abs().max()
    assert pads.abs().max() > 1


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_the_state_behind_the_last_token_is_the_padded_one(tiny_source, model_type):
    base = Policy(tiny_source(model_type).model(0)).base_model
    batch = random_batch()
    packs, pads = (
        response_states(base, batch, layout=layout, with_end=True)
        for layout in ("packed", "padded")
    )
    assert packs.shape == pads.shape
    with_end = torch.cat([torch.ones_like(batch.mask[:, :1]), batch.mask], dim=1)
    torch.testing.assert_close(packs[with_end], pads[with_end], rtol=1e-5, atol=1e-5)


def test_a_packed_pass_reads_no_padding_and_each_prompt_once(tiny_source):
    """By hand: 4 different prompt tokens of A and B, and of the responses all but the last: 7."""
    policy = Policy(tiny_source().model(0))
    read = []
    policy.model.model.layers[0].mlp.register_forward_hook(
        lambda module, inputs, output: read.append(output.shape[:-1].numel())
    )
    policy(BATCH, temperature=1.0)
    assert read == [11]


def test_other_passes_of_the_model_keep_their_attention(tiny_source):
    model = tiny_source().model(0)
    before = model(BATCH.ids).logits
    Policy(model)(BATCH, temperature=1.0)
    assert torch.equal(model(BATCH.ids).logits, before)


def test_bloom_whose_positions_come_from_its_mask_pads(tiny_source):
    assert Policy(tiny_source("bloom").model(0)).layout == "padded"


def test_a_model_that_attends_otherwise_is_found(tiny_source):
    """Its second layer reads the token before, in the order of the row: across sequences."""
    policy = Policy(tiny_source().model(0))
    assert packing_fits(policy, BATCH)
    policy.model.model.layers[1].register_forward_hook(
        lambda module, inputs, output: output + output.roll(1, dims=1)
    )
    assert not packing_fits(policy, BATCH)
    assert policy.layout == "packed"  # the comparison itself changes nothing


def test_bfloat16_fits_within_its_precision(tiny_source):
    with pytest.warns(UserWarning, match="vanish"):
        policy = Policy(tiny_source(dtype="bfloat16").model(0))
    assert packing_fits(policy, BATCH)


def test_a_row_does_not_depend_on_the_other_rows(tiny_source):
    policy = Policy(tiny_source().model(0))
    alone = policy(BATCH.select(torch.tensor([0])), temperature=1.0).log_probs
    other = replace(BATCH, response_ids=BATCH.response_ids.roll(1, 0))
    other.response_ids[0] = BATCH.response_ids[0]
    together = policy(other, temperature=1.0).log_probs
    torch.testing.assert_close(alone, together[:1], rtol=1e-5, atol=1e-5)
