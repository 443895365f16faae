import pytest
from jsonargparse import ArgumentParser

from lit_rl.tasks import ChatPrompt, Example, PlainPrompt, PromptFormat

SHOTS = (Example("2+3=", "5"), Example("7+1=", "8"))
USER = {"role": "user", "content": "4+4="}
SYSTEM = {"role": "system", "content": "add"}


def test_a_plain_prompt_is_itself_by_default(tokenizer):
    assert PlainPrompt().text("482>", tokenizer) == "482>"


def test_examples_stand_before_a_plain_prompt(tokenizer):
    assert PlainPrompt(few_shot=SHOTS).text("4+4=", tokenizer) == "2+3=5\n7+1=8\n4+4="


def test_the_template_holds_for_examples_and_prompt(tokenizer):
    prompt_format = PlainPrompt("q: {prompt} a: ", "add", SHOTS[:1], separator="\n\n")
    assert prompt_format.text("{x}+1=", tokenizer) == "add\n\nq: 2+3= a: 5\n\nq: {x}+1= a: "


@pytest.mark.parametrize("template", ["", "{prompts}", "{prompt}{prompt}"])
def test_a_template_without_one_place_for_the_prompt_is_refused(template):
    with pytest.raises(ValueError, match=r"must hold \{prompt\} once"):
        PlainPrompt(template)


def test_messages_need_the_chat_format(tokenizer):
    with pytest.raises(ValueError, match=r"list of chat messages.*lit_rl\.tasks\.ChatPrompt"):
        PlainPrompt().text([USER], tokenizer)


def test_text_becomes_a_message_of_the_user(chat_tokenizer):
    assert ChatPrompt().text("4+4=", chat_tokenizer) == "<bos>user:4+4=\nassistant:"


def test_system_prompt_and_examples_are_turns(chat_tokenizer):
    text = ChatPrompt("add", SHOTS[:1]).text("4+4=", chat_tokenizer)
    assert text == "<bos>system:add\nuser:2+3=\nassistant:5\nuser:4+4=\nassistant:"


def test_examples_stand_behind_the_system_message_of_a_prompt(chat_tokenizer):
    # The None is what a table adds where another message has a name.
    text = ChatPrompt(few_shot=SHOTS[:1]).text([{**SYSTEM, "name": None}, USER], chat_tokenizer)
    assert text == "<bos>system:add\nuser:2+3=\nassistant:5\nuser:4+4=\nassistant:"


def test_two_system_messages_are_refused(chat_tokenizer):
    with pytest.raises(ValueError, match=r"system_prompt is 'add', but .* message 'add'"):
        ChatPrompt("add").text([SYSTEM, USER], chat_tokenizer)


def test_a_tokenizer_without_a_chat_template_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"has no chat template.*lit_rl\.tasks\.PlainPrompt"):
        ChatPrompt().text("4+4=", tokenizer)


def test_a_config_gives_examples_as_mappings():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--prompt_format", type=PromptFormat)
    examples = [{"prompt": "2+3=", "answer": "5"}, {"prompt": "7+1=", "answer": "8"}]
    config = {"class_path": "lit_rl.tasks.PlainPrompt", "init_args": {"few_shot": examples}}
    parsed = parser.parse_object({"prompt_format": config})
    assert parser.instantiate(parsed).prompt_format == PlainPrompt(few_shot=SHOTS)
