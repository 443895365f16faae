"""Where a critic reads its values, and where it comes from."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from lit_rl.models import (
    Policy,
    PolicyBackbone,
    PretrainedBackbone,
    SharedTrunk,
    save_pretrained,
)
from lit_rl.types import Sequences

# Two prompts, the second left-padded by two; responses of 4 and 2 tokens.
PROMPT_IDS = torch.tensor([[1, 7, 11, 13], [0, 0, 1, 13]])
PROMPT_MASK = torch.tensor([[True, True, True, True], [False, False, True, True]])
RESPONSE_IDS = torch.tensor([[5, 6, 9, 2], [8, 2, 0, 0]])
MASK = torch.tensor([[True, True, True, True], [True, True, False, False]])
BATCH = Sequences(
    prompt_ids=PROMPT_IDS, prompt_mask=PROMPT_MASK, response_ids=RESPONSE_IDS, mask=MASK
)


@pytest.fixture
def source(tiny_source):
    return tiny_source()


@pytest.fixture
def policy(source):
    return Policy(source.model(0))


def with_random_head(critic):
    with torch.no_grad():
        critic.head.weight.copy_(torch.randn(1, critic.head.in_features))
        critic.head.bias.fill_(0.3)
    return critic


def values(critic, batch=BATCH, policy=None):
    """What a critic says of a batch, from its own states or those of the policy."""
    reader = critic if policy is None else policy
    return critic.with_end_values(reader.states(batch, with_end=True), batch.mask)


def test_values_start_at_zero(policy, source):
    for kind in (PolicyBackbone(), SharedTrunk()):
        output = values(kind.critic(policy, source.tokenizer()), policy=policy)
        assert output.values.eq(0).all()
        assert output.end_values.eq(0).all()


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "bloom"])
def test_the_value_of_a_token_is_read_at_the_position_before_it(tiny_source, model_type):
    """The head on the base model's states of each row alone: from the last prompt token on."""
    source = tiny_source(model_type)
    policy = Policy(source.model(0))
    critic = with_random_head(PolicyBackbone().critic(policy, source.tokenizer()))
    output = values(critic)
    for row, (prompt, response) in enumerate([([1, 7, 11, 13], [5, 6, 9, 2]), ([1, 13], [8, 2])]):
        states = policy.model.base_model(torch.tensor([prompt + response])).last_hidden_state[0]
        expected = critic.head(states)[:, 0]
        start, end = len(prompt) - 1, len(prompt) + len(response) - 1
        close = {"rtol": 1e-5, "atol": 1e-5}
        length = len(response)
        torch.testing.assert_close(output.values[row, :length], expected[start:end], **close)
        torch.testing.assert_close(output.end_values[row], expected[end], **close)
    assert torch.equal(output.values != 0, MASK)


def test_a_value_does_not_know_its_token(policy, source):
    """Another first response token changes the value of the second, not its own."""
    critic = with_random_head(PolicyBackbone().critic(policy, source.tokenizer()))
    other = RESPONSE_IDS.clone()
    other[0, 0] = 8
    first = values(critic).values
    second = values(critic, replace(BATCH, response_ids=other)).values
    assert first[0, 0] == second[0, 0]
    assert first[0, 1] != second[0, 1]


def test_what_stands_in_the_padding_changes_no_value(policy, source):
    critic = with_random_head(PolicyBackbone().critic(policy, source.tokenizer()))
    other = replace(
        BATCH,
        prompt_ids=torch.where(PROMPT_MASK, PROMPT_IDS, 9),
        response_ids=torch.where(MASK, RESPONSE_IDS, 9),
    )
    first, second = (values(critic, batch) for batch in (BATCH, other))
    assert torch.equal(first.values, second.values)
    assert torch.equal(first.end_values, second.end_values)


def test_a_row_without_tokens_has_the_value_of_its_prompt_at_the_end(policy, source):
    """Its state is that of the last prompt token, which the first row reads for its first token."""
    critic = with_random_head(PolicyBackbone().critic(policy, source.tokenizer()))
    empty = MASK & torch.tensor([[False], [True]])
    whole = values(critic)
    output = values(critic, replace(BATCH, mask=empty))
    assert output.values[0].eq(0).all()
    torch.testing.assert_close(output.end_values[0], whole.values[0, 0])


def test_an_own_backbone_shares_no_tensor_with_the_policy(policy, source):
    critic = PolicyBackbone().critic(policy, source.tokenizer())
    shared = {p.data_ptr() for p in policy.parameters()} & {
        p.data_ptr() for p in critic.parameters()
    }
    assert not shared
    assert all(parameter.requires_grad for parameter in critic.parameters())


def test_gradient_reaches_the_policy_through_a_shared_trunk_only(policy, source):
    for kind, reaches in ((PolicyBackbone(), False), (SharedTrunk(), True)):
        policy.zero_grad()
        critic = with_random_head(kind.critic(policy, source.tokenizer()))
        own = critic.backbone is not None
        values(critic, policy=None if own else policy).values.sum().backward()
        moved = [p for p in policy.parameters() if p.grad is not None and p.grad.ne(0).any()]
        assert bool(moved) == reaches
        assert critic.head.weight.grad.ne(0).any()


def test_the_head_computes_in_float32_under_autocast(policy, source):
    """In bfloat16 the sum of 32 products would differ by about 1%."""
    critic = with_random_head(SharedTrunk().critic(policy, source.tokenizer()))
    states = policy.states(BATCH)
    exact = critic(states, MASK)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(critic(states, MASK), exact)


def test_gradient_checkpointing_changes_no_gradient(policy, source):
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        critic = with_random_head(PolicyBackbone().critic(policy, source.tokenizer()))
        if checkpointing:
            critic.enable_gradient_checkpointing()
        critic.train()(critic.states(BATCH), MASK).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in critic.parameters()]))
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0


# ----- another checkpoint


def test_the_backbone_of_an_exported_policy_is_read(policy, source, tmp_path):
    save_pretrained(policy.model, source.tokenizer(), tmp_path)
    critic = PretrainedBackbone(str(tmp_path)).critic(policy, source.tokenizer())
    expected = dict(policy.model.base_model.named_parameters())
    found = dict(critic.backbone.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_backbone_in_bfloat16_warns_that_updates_vanish(policy, source, tmp_path):
    save_pretrained(policy.model, source.tokenizer(), tmp_path)
    backbone = PretrainedBackbone(str(tmp_path), dtype="bfloat16")
    with pytest.warns(UserWarning, match=r"vanish.*float32 with trainer.precision: bf16-mixed"):
        critic = backbone.critic(policy, source.tokenizer())
    assert {parameter.dtype for parameter in critic.backbone.parameters()} == {torch.bfloat16}
    assert critic.head.weight.dtype == torch.float32


def test_the_backbone_of_a_reward_model_is_read_without_its_head(policy, source, tmp_path):
    config = copy.deepcopy(policy.model.config)
    model = LlamaForSequenceClassification(
        LlamaConfig(**{**config.to_dict(), "num_labels": 1, "architectures": None})
    )
    model.save_pretrained(tmp_path)
    source.tokenizer().save_pretrained(tmp_path)
    critic = PretrainedBackbone(str(tmp_path)).critic(policy, source.tokenizer())
    expected = dict(model.model.named_parameters())
    for name, parameter in critic.backbone.named_parameters():
        assert torch.equal(parameter, expected[name])
    assert critic.head.weight.eq(0).all()


def test_a_folder_without_a_model_is_refused_by_name(policy, source, tmp_path):
    with pytest.raises(ValueError, match=r"no critic to load at .*nothing"):
        PretrainedBackbone(str(tmp_path / "nothing")).critic(policy, source.tokenizer())


def test_other_tokens_than_those_of_the_policy_are_refused(policy, source, tmp_path):
    save_pretrained(policy.model, source.tokenizer(), tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"9"', '"x"'))
    assert isinstance(AutoTokenizer.from_pretrained(tmp_path), PreTrainedTokenizerFast)
    with pytest.raises(ValueError, match="are not those of the policy"):
        PretrainedBackbone(str(tmp_path)).critic(policy, source.tokenizer())


def test_a_number_format_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"dtype 'float8' is not one of \['bfloat16', 'float32'\]"):
        PretrainedBackbone("x", dtype="float8")
