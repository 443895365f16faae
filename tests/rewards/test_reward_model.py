import warnings

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from lit_rl.rewards import Length, RewardModel, WeightedSum

PAD, BEGIN, END = "<pad>", "<bos>", "<eos>"
VOCABULARY = {token: number for number, token in enumerate([PAD, BEGIN, END, *"0123456789>:au"])}
SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
}
# Large weights, so that scores are far apart and any change of the text is seen.
CONFIGS = {
    "llama": {**SIZES, "initializer_range": 0.3, "max_position_embeddings": 32},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "initializer_range": 0.3},
    "bert": {**SIZES, "initializer_range": 0.3, "max_position_embeddings": 32},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "initializer_range": 0.3},
}
# What each architecture's tokenizer usually adds to a text.
SPECIAL_TOKENS = {"llama": f"{BEGIN} $A", "gpt2": "$A", "bert": f"{BEGIN} $A {END}", "xlnet": "$A"}
CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'][0] + ':' + "
    "message['content'] }}{% endfor %}{{ eos_token }}"
)


def ids_of(*parts):
    """Token ids of special tokens, and of texts one by one."""
    return [VOCABULARY[t] for part in parts for t in ([part] if part in VOCABULARY else part)]


@pytest.fixture
def saved(tmp_path):
    """`saved("llama", ...)`: path of a folder with a tiny random reward model of this kind."""

    def save(kind, *, chat_template=None, padding_side="right", pad_token=None, labels=1, **config):
        backend = Tokenizer(models.WordLevel(VOCABULARY))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        backend.post_processor = processors.TemplateProcessing(
            single=SPECIAL_TOKENS[kind],
            special_tokens=[(token, VOCABULARY[token]) for token in (BEGIN, END)],
        )
        names = {"eos_token": END, "bos_token": BEGIN, "padding_side": padding_side}
        if pad_token is not None:
            names["pad_token"] = pad_token
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
        tokenizer.chat_template = chat_template
        tokenizer.save_pretrained(tmp_path)
        defaults = {"vocab_size": len(VOCABULARY), "num_labels": labels}
        config = AutoConfig.for_model(kind, **{**defaults, **CONFIGS[kind], **config})
        torch.manual_seed(0)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
        return str(tmp_path)

    return save


def scores_alone(folder, *rows, label=0):
    """The model's own logits of rows of token ids, one by one and without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids])).logits[0, label].item() for ids in rows]


# Responses of 1 to 8 characters, one of which ends as the others do not.
RESPONSES = ["1", "22345678", "3>4", "9876", "5:"]


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize(
    ("kind", "pad_token", "pad_id"),
    [
        ("llama", PAD, 0),
        # Neither the tokenizer nor the config knows a padding.
        ("llama", None, None),
        ("gpt2", None, None),
        # The end token pads, as it is often set.
        ("gpt2", END, VOCABULARY[END]),
        ("bert", PAD, 0),
    ],
)
def test_a_batch_scores_as_single_rows_do(saved, rollout_of, kind, padding_side, pad_token, pad_id):
    folder = saved(kind, padding_side=padding_side, pad_token=pad_token, pad_token_id=pad_id)
    rollout = rollout_of(RESPONSES, prompts=["12>", "3>", "1234>", ">", "7>"])
    begin, end = {"llama": ([BEGIN], []), "gpt2": ([], []), "bert": ([BEGIN], [END])}[kind]
    pairs = zip(rollout.prompts, rollout.responses, strict=True)
    alone = scores_alone(folder, *(ids_of(*begin, "".join(pair), *end) for pair in pairs))
    assert max(alone) - min(alone) > 0.1
    for batch_tokens in (16384, 24, 1):
        reward = RewardModel(folder, batch_tokens=batch_tokens)
        assert reward.values(rollout) == pytest.approx(alone, abs=1e-4)


def test_a_text_that_ends_in_the_usual_padding_is_read_to_its_end(saved, rollout_of):
    """Without a padding in the config, a row alone is read at its last token, whichever it is."""
    folder = saved("gpt2", pad_token=END)
    reward = RewardModel(folder, template=f"{{prompt}}{{response}}{END}")
    expected = scores_alone(folder, ids_of(">1", END), ids_of(">234", END))
    rollout = rollout_of(["1", "234"], prompts=[">", ">"])
    assert reward.values(rollout) == pytest.approx(expected, abs=1e-4)


def test_a_batch_whose_rows_end_in_every_token_there_is_is_divided(saved, rollout_of):
    """Beside them all there would be no token left to pad with."""
    folder = saved("gpt2", pad_token=PAD)
    responses = [*VOCABULARY, "12"]
    expected = scores_alone(folder, *(ids_of(">", text) for text in responses))
    rollout = rollout_of(responses, prompts=[">"] * len(responses))
    assert RewardModel(folder).values(rollout) == pytest.approx(expected, abs=1e-4)


def test_a_model_that_reads_padding_is_refused(saved, rollout_of):
    """XLNet takes the last column for the end of the text."""
    folder = saved("xlnet")
    rollout = rollout_of(["1", "234"], prompts=[">", ">"])
    with pytest.raises(ValueError, match=r"XLNetForSequenceClassification scores a text .* alone"):
        RewardModel(folder).values(rollout)
    expected = scores_alone(folder, ids_of(">1"), ids_of(">234"))
    alone = RewardModel(folder, batch_tokens=1).values(rollout)
    assert alone == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_chat_template_writes_the_conversation_and_all_special_tokens(saved, rollout_of, kind):
    folder = saved(kind, chat_template=CHAT, pad_token=PAD)
    expected = scores_alone(folder, ids_of(BEGIN, "u:12>a:3", END))
    rollout = rollout_of(["3"], prompts=["12>"])
    scores = RewardModel(folder, template="chat").values(rollout)
    assert scores == pytest.approx(expected, abs=1e-4)


def test_a_column_gives_the_prompt_as_its_writer_wrote_it(saved, rollout_of):
    folder = saved("llama", chat_template=CHAT)
    turns = [("user", "1"), ("assistant", "2"), ("user", "3")]
    messages = [{"role": role, "content": content} for role, content in turns]
    columns = {"question": ("12>", messages)}
    rollout = rollout_of(["4", "4"], prompts=["rendered"] * 2, columns=columns)
    texts = ("u:12>a:4", "u:1a:2u:3a:4")
    expected = scores_alone(folder, *(ids_of(BEGIN, text, END) for text in texts))
    reward = RewardModel(folder, template="chat", prompt_column="question")
    assert reward.values(rollout) == pytest.approx(expected, abs=1e-4)
    # The data set's own list is not written to.
    assert len(messages) == 3


def test_a_prompt_with_a_begin_token_gets_no_second_one(saved, rollout_of):
    folder = saved("llama")
    expected = scores_alone(folder, ids_of(BEGIN, "1>2"))
    rollout = rollout_of(["2", "2"], prompts=[f"{BEGIN}1>", "1>"])
    assert RewardModel(folder).values(rollout) == pytest.approx(expected * 2, abs=1e-4)


def test_a_template_may_leave_the_prompt_out_and_hold_other_texts(saved, rollout_of):
    folder = saved("llama")
    reward = RewardModel(folder, template=f"a:{{response}}{END}")
    expected = scores_alone(folder, ids_of(BEGIN, "a:12", END))
    assert reward.values(rollout_of(["12"])) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_that_is_too_long_loses_its_beginning_with_one_warning(saved, rollout_of, side):
    folder = saved("llama", padding_side=side)
    reward = RewardModel(folder, max_tokens=6)
    rollout = rollout_of(["34", "34", "3"], prompts=["99912>", "8812>", "2>"])
    # Six tokens: the begin token and five of prompt and response.
    texts = ("12>34", "12>34", "2>3")
    expected = scores_alone(folder, *(ids_of(BEGIN, text) for text in texts))
    message = r"2 of 3 texts are longer than the 6 tokens .* first is row 0, of 9 tokens"
    with pytest.warns(UserWarning, match=message):
        assert reward.values(rollout) == pytest.approx(expected, abs=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reward.values(rollout)


def test_a_text_is_as_long_as_the_positions_of_the_model(saved, rollout_of):
    folder = saved("gpt2")
    with pytest.warns(UserWarning, match="longer than the 32 tokens"):
        scores = RewardModel(folder).values(rollout_of(["1" * 40], prompts=[">"]))
    assert scores == pytest.approx(scores_alone(folder, ids_of("1" * 32)), abs=1e-4)


def test_an_encoder_keeps_its_last_special_token_when_a_text_is_cut(saved, rollout_of):
    folder = saved("bert", pad_token=PAD)
    expected = scores_alone(folder, ids_of(BEGIN, "12", END))
    with pytest.warns(UserWarning, match="longer than the 4 tokens"):
        scores = RewardModel(folder, max_tokens=4).values(rollout_of(["12"], prompts=["9>"]))
    assert scores == pytest.approx(expected, abs=1e-4)


def test_a_text_without_a_token_has_no_score(saved, rollout_of):
    reward = RewardModel(saved("gpt2"), template="{response}")
    first, second = reward.values(rollout_of(["", "1"]))
    assert first is None
    assert isinstance(second, float)


def test_a_label_chooses_among_several_outputs(saved, rollout_of):
    folder = saved("bert", labels=3, pad_token=PAD)
    ids = ids_of(BEGIN, ">1", END)
    rollout = rollout_of(["1"], prompts=[">"])
    for label in (0, 2):
        expected = scores_alone(folder, ids, label=label)
        scores = RewardModel(folder, label=label).values(rollout)
        assert scores == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("labels", "label", "message"),
    [
        (3, None, r"the labels of .* are .*LABEL_2.*: label says which .*, such as 2"),
        (3, 3, r"label is 3, but the labels of .*; such as 2"),
        (1, 1, r"label is 1, but the labels of .*; such as 0"),
        (1, -1, "label is -1, but"),
    ],
)
def test_labels_that_do_not_fit_are_refused(saved, rollout_of, labels, label, message):
    with pytest.raises(ValueError, match=message):
        RewardModel(saved("llama", labels=labels), label=label).values(
            rollout_of(["1"], prompts=[">"])
        )


@pytest.fixture
def language_model(tmp_path, saved):
    """A folder with a causal language model, which has no head that scores."""
    folder = saved("llama")
    config = AutoConfig.for_model("llama", vocab_size=len(VOCABULARY), **CONFIGS["llama"])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_model_without_a_trained_head_is_refused(language_model, rollout_of):
    with pytest.raises(ValueError, match=r"no weights \['score.weight'\], which would be random"):
        RewardModel(language_model).values(rollout_of(["1"], prompts=[">"]))


@pytest.mark.parametrize("name", ["./no/such/folder", "nobody/no-such-model"])
def test_a_name_that_leads_nowhere_is_named(rollout_of, name):
    with pytest.raises(ValueError, match=f"no reward model to load at '{name}'"):
        RewardModel(name).values(rollout_of(["1"]))


@pytest.mark.parametrize("summed", [False, True])
def test_what_cannot_be_loaded_is_refused_before_anything_is_scored(summed):
    reward = RewardModel("./no/such/folder")
    if summed:
        reward = WeightedSum({"both": WeightedSum({"short": Length(4), "judge": reward})})
    with pytest.raises(ValueError, match=r"no reward model to load at '\./no/such/folder'"):
        reward.setup()


def test_a_score_that_is_no_number_names_its_row(saved, rollout_of, tmp_path):
    folder = saved("llama")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.model.embed_tokens.weight.data[VOCABULARY["7"]] = torch.nan
    model.save_pretrained(folder)
    rollout = rollout_of(["1", "7"], prompts=[">", ">"])
    with pytest.raises(ValueError, match="reward_model gave nan for row 1, whose response is '7'"):
        RewardModel(folder)(rollout)


def test_a_missing_chat_template_and_a_missing_column_are_errors(saved, rollout_of):
    folder = saved("llama")
    with pytest.raises(ValueError, match=r"has no chat template; such as '\{prompt\}\{response\}'"):
        RewardModel(folder, template="chat").values(rollout_of(["1"]))
    rollout = rollout_of(["1"], columns={"level": (1,)})
    with pytest.raises(ValueError, match=r"prompt_column is 'question', .* only .*\['level'\]"):
        RewardModel(folder, prompt_column="question").values(rollout)


def test_messages_need_a_chat(saved, rollout_of):
    messages = [{"role": "user", "content": "1"}]
    rollout = rollout_of(["1"], columns={"question": (messages,)})
    with pytest.raises(ValueError, match=r"prompt \[\{'role'.* is no text; with template 'chat'"):
        RewardModel(saved("llama"), prompt_column="question").values(rollout)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "{prompt}"}, r"template is '\{prompt\}'; it must be 'chat', or"),
        ({"template": "{question}{response}"}, "template is"),
        ({"template": "{response}{"}, "template is"),
        ({"template": "{response:d}"}, "template is"),
        ({"template": "{prompt!r}{response}"}, "template is"),
        ({"template": "{response.__class__}"}, "template is"),
        ({"max_tokens": 1}, "max_tokens is 1, must be at least 2, such as 1024"),
        ({"batch_tokens": 0}, "batch_tokens is 0, must be at least 1"),
        ({"dtype": "float16"}, r"dtype is 'float16', must be one of \['bfloat16', 'float32'\]"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_loaded(settings, message):
    with pytest.raises(ValueError, match=message):
        RewardModel("nobody/no-such-model", **settings)


def test_a_limit_beyond_the_model_is_refused(saved, rollout_of):
    with pytest.raises(ValueError, match=r"max_tokens is 33, but .* reads 32; such as 32"):
        RewardModel(saved("llama"), max_tokens=33).values(rollout_of(["1"], prompts=[">"]))


@pytest.fixture
def loaded(monkeypatch):
    """The models that are loaded, each of which draws a random number as new weights do."""
    models, load = [], AutoModelForSequenceClassification.from_pretrained

    def recorded(*args, **settings):
        torch.rand(1)
        model, loading = load(*args, **settings)
        models.append(model)
        return model, loading

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", recorded)
    return models


def test_loading_leaves_the_random_state(saved, rollout_of, loaded):
    folder = saved("gpt2")
    before = torch.random.get_rng_state()
    RewardModel(folder).values(rollout_of(["1"], prompts=[">"]))
    assert len(loaded) == 1
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_model_is_loaded_once_and_is_frozen_in_evaluation_mode(saved, rollout_of, loaded):
    reward = RewardModel(saved("gpt2"))
    assert not loaded
    reward.setup()
    assert len(loaded) == 1
    rollout = rollout_of(["1", "23"], prompts=[">", ">"])
    # GPT-2 has dropout, which training mode would show.
    assert reward.values(rollout) == reward.values(rollout)
    (model,) = loaded
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_mode_of_a_validation_step_does_not_stick_to_the_weights(saved, rollout_of, loaded):
    with torch.inference_mode():
        RewardModel(saved("gpt2")).values(rollout_of(["1"], prompts=[">"]))
    assert not any(parameter.is_inference() for parameter in loaded[0].parameters())


def test_a_module_that_holds_it_has_none_of_its_weights(saved, rollout_of):
    holder = nn.Module()
    holder.reward = WeightedSum({"judge": RewardModel(saved("gpt2")), "short": Length(4)})
    holder.reward(rollout_of(["1"], prompts=[">"]))
    assert holder.state_dict() == {}
    assert list(holder.parameters()) == []


def test_the_precision_of_the_caller_changes_no_score(saved, rollout_of):
    folder = saved("llama")
    rollout = rollout_of(["1", "23"], prompts=[">", ">"])
    expected = RewardModel(folder).values(rollout)
    with torch.autocast("cpu", torch.bfloat16):
        assert RewardModel(folder).values(rollout) == expected


def test_it_is_summed_with_other_rewards(saved, rollout_of):
    folder = saved("llama")
    reward = WeightedSum({"judge": RewardModel(folder), "short": Length(4)}, {"judge": 0.5})
    scored = reward(rollout_of(["1"], prompts=[">"]))
    (score,) = scores_alone(folder, ids_of(BEGIN, ">1"))
    assert scored.rewards.tolist() == pytest.approx([0.5 * score + 1.0], abs=1e-4)


def test_the_hash_of_its_weights_is_taken_once_and_is_in_a_sum(saved, monkeypatch, tmp_path):
    counted = []
    monkeypatch.setattr(
        "lit_rl.rewards.reward_model.fingerprint", lambda weights: counted.append([*weights]) or "1"
    )
    reward = WeightedSum({"judge": RewardModel(saved("gpt2")), "short": Length(4)})
    reward.setup()
    assert reward.models == reward.models == {tmp_path.name: "1"}
    assert len(counted) == 1
    assert "score.weight" in counted[0]
    assert Length(4).models == {}
