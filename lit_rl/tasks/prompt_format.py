"""How a prompt of a task becomes the text that a model reads."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A prompt with its right answer, shown before the prompt that is asked.

    Args:
        prompt: as a prompt of the task.
        answer: as a right response.
    """

    prompt: str
    answer: str


class PromptFormat(ABC):
    """From a prompt of a task to the text that a model reads."""

    #: Whether the tokenizer adds the special tokens that it adds to any text, such as the begin
    #: token. False: the text holds them already.
    adds_special_tokens: ClassVar[bool]

    @abstractmethod
    def text(self, prompt: str | list[Message], tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the text.

        Args:
            prompt: text, or a list of chat messages with `role` and `content`.
            tokenizer: the model's.

        Raises:
            ValueError: if this format or this tokenizer has no place for the prompt.
        """


@dataclass(frozen=True)
class PlainPrompt(PromptFormat):
    r"""Raw text: the system prompt, the examples and the prompt, with a separator between them.

    The tokenizer adds what it adds to any text. Template "{prompt}", the separator a line break and
    the example 2+3= with the answer 5 make "2+3=5\n4+4=" of the prompt 4+4=.

    Args:
        template: stands for each prompt, `{prompt}` for its text; an answer follows directly.
        system_prompt: the first text.
        few_shot: examples in front of the prompt.
        separator: what stands between the texts.

    Raises:
        ValueError: unless the template holds `{prompt}` once.
    """

    template: str = "{prompt}"
    system_prompt: str | None = None
    few_shot: tuple[Example, ...] = ()
    separator: str = "\n"

    adds_special_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.template.count("{prompt}") != 1:
            raise ValueError(
                f"template {self.template!r} must hold {{prompt}} once, "
                r"such as 'Question: {prompt}\nAnswer:'"
            )

    def text(self, prompt: str | list[Message], tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the texts, joined."""
        if not isinstance(prompt, str):
            raise ValueError(
                f"the prompt {prompt} is a list of chat messages, which PlainPrompt cannot "
                "format; use prompt_format: lit_rl.tasks.ChatPrompt"
            )
        texts = [] if self.system_prompt is None else [self.system_prompt]
        texts += [self._filled(example.prompt) + example.answer for example in self.few_shot]
        return self.separator.join([*texts, self._filled(prompt)])

    def _filled(self, prompt: str) -> str:
        return self.template.replace("{prompt}", prompt)


@dataclass(frozen=True)
class ChatPrompt(PromptFormat):
    """The tokenizer's chat template, up to where the response begins.

    The template is in charge of all special tokens: the tokenizer adds none. A prompt that is text
    becomes a message of the user.

    Args:
        system_prompt: content of the system message. A prompt that brings one of its own is refused
            then.
        few_shot: examples as turns of user and assistant, in front of the prompt and behind the
            system message.
    """

    system_prompt: str | None = None
    few_shot: tuple[Example, ...] = ()

    adds_special_tokens: ClassVar[bool] = False

    def text(self, prompt: str | list[Message], tokenizer: PreTrainedTokenizerBase) -> str:
        """Return what the chat template renders."""
        if tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__!r} has no chat "
                "template; use prompt_format: lit_rl.tasks.PlainPrompt"
            )
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = tokenizer.apply_chat_template(
            self._conversation(turns), tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)
        return text

    def _conversation(self, turns: list[Message]) -> list[Message]:
        # A table fills the keys that a message lacks with None.
        turns = [{key: v for key, v in turn.items() if v is not None} for turn in turns]
        system = [turn for turn in turns[:1] if turn["role"] == "system"]
        if self.system_prompt is not None:
            if system:
                raise ValueError(
                    f"system_prompt is {self.system_prompt!r}, but a prompt brings the system "
                    f"message {system[0]['content']!r}; remove one of them"
                )
            return [{"role": "system", "content": self.system_prompt}, *self._shots(), *turns]
        return [*system, *self._shots(), *turns[len(system) :]]

    def _shots(self) -> list[Message]:
        return [
            {"role": role, "content": content}
            for example in self.few_shot
            for role, content in (("user", example.prompt), ("assistant", example.answer))
        ]
