"""The score of a trained reward model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lit_rl.functional import fingerprint
from lit_rl.rewards.base import Reward
from lit_rl.rewards.checked_scores import shown
from lit_rl.rewards.sequence_scorer import SequenceScorer
from lit_rl.rewards.text_reader import TextReader, check_template
from lit_rl.types import Rollout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class RewardModel(Reward):
    """What a Hugging Face sequence-classification model says of prompt and response: its logit.

    The model is loaded once, before the first rollout, and moved to the device of the rollout. It
    has its own tokenizer, is frozen and in evaluation mode, and is in no checkpoint.

    A text that is longer than `max_tokens` loses tokens at its beginning, behind a begin token:
    first those of the prompt, and those of the response only when nothing of the prompt is left. A
    warning counts such texts, once. The model does not apply to a text without a token.

    Args:
        model: name on the Hugging Face hub, such as "Skywork/Skywork-Reward-V2-Qwen3-0.6B", or path
            of a folder.
        revision: branch, tag or commit on the hub; None: its main branch.
        trust_remote_code: whether code that comes with the model may run on this machine.
        template: the text that the model reads, with places {prompt} and {response}, to which its
            tokenizer adds the special tokens that it adds to any text; the template may hold
            others, such as a separator or an end token. "chat": the chat template of its tokenizer,
            with the prompt as message of the user and the response as that of the assistant.
        prompt_column: the column of the data set that holds the prompt as this model is to read it,
            a text, or for "chat" also a list of messages. None: the prompt as the policy reads it,
            which may hold the marks of the policy's own chat template.
        label: which output of a model with several is the score, from 0; None: it has one.
        max_tokens: longest text in tokens of the reward model, special tokens included, at least 2;
            None: as long as its config and its tokenizer allow.
        batch_tokens: tokens of one forward pass, padding included; bounds the memory and changes no
            score.
        dtype: number format of the weights, "float32" or "bfloat16".

    Raises:
        ValueError: for a setting outside its range; in `setup` for a model that is not found, has
            no trained head, or has other labels.
    """

    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    template: str = "{prompt}{response}"
    prompt_column: str | None = None
    label: int | None = None
    max_tokens: int | None = None
    batch_tokens: int = 16384
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_template(self.template)
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}, must be at least 2, such as 1024")
        if self.batch_tokens < 1:
            raise ValueError(f"batch_tokens is {self.batch_tokens}, must be at least 1, as 16384")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, must be one of {sorted(DTYPES)}")

    def setup(self) -> None:
        """Load the tokenizer and the model."""
        _ = self._reader, self._scorer

    @cached_property
    def models(self) -> dict[str, str]:
        """The model, with a hash of its weights that is taken once."""
        return {Path(self.model).name: fingerprint(dict(self._scorer.model.named_parameters()))}

    def values(self, rollout: Rollout) -> list[float | None]:
        """Return a score per response; None for a text without a token."""
        rows = self._reader(self._prompts(rollout), rollout.responses)
        scored = [number for number, row in enumerate(rows) if row]
        scores = self._scorer([rows[number] for number in scored], rollout.mask.device)
        by_number = dict(zip(scored, scores, strict=True))
        return [by_number.get(number) for number in range(len(rows))]

    def _prompts(self, rollout: Rollout) -> tuple[Any, ...]:
        if self.prompt_column is None:
            return rollout.prompts
        if self.prompt_column not in rollout.columns:
            raise ValueError(
                f"prompt_column is {self.prompt_column!r}, but the data set has only the columns "
                f"{sorted(rollout.columns)}"
            )
        return rollout.columns[self.prompt_column]

    @cached_property
    def _reader(self) -> TextReader:
        with self._named_errors():
            tokenizer = AutoTokenizer.from_pretrained(**self._where())
        return TextReader(tokenizer, self.template, self._limit(tokenizer))

    def _limit(self, tokenizer: PreTrainedTokenizerBase) -> int:
        positions, usual = self._scorer.max_tokens, tokenizer.model_max_length
        if self.max_tokens is None:
            return usual if positions is None else min(positions, usual)
        if positions is not None and self.max_tokens > positions:
            raise ValueError(
                f"max_tokens is {self.max_tokens}, but the reward model {self.model} reads "
                f"{positions}; such as {positions}"
            )
        return self.max_tokens

    @cached_property
    def _scorer(self) -> SequenceScorer:
        # Weights that a validation step loads are used in training too; loading draws numbers.
        with (
            torch.inference_mode(False),
            torch.device("cpu"),
            torch.random.fork_rng(devices=[]),
            self._named_errors(),
        ):
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                **self._where(), dtype=DTYPES[self.dtype], output_loading_info=True
            )
        if loading["missing_keys"]:
            raise ValueError(
                f"{self.model} is no reward model: it has no weights "
                f"{sorted(loading['missing_keys'])}, which would be random numbers. A model that "
                "was trained with AutoModelForSequenceClassification has them"
            )
        return SequenceScorer(model, self._checked_label(model), self.batch_tokens)

    def _checked_label(self, model: PreTrainedModel) -> int:
        labels, label = model.config.id2label or {}, self.label
        named = f"the labels of {self.model} are {shown(labels)}"
        if label is None and len(labels) > 1:
            raise ValueError(f"{named}: label says which is the score, such as {len(labels) - 1}")
        if label is not None and not 0 <= label < len(labels):
            raise ValueError(f"label is {label}, but {named}; such as {len(labels) - 1}")
        return label or 0

    def _where(self) -> dict[str, Any]:
        folder = Path(self.model).expanduser()
        return {
            "pretrained_model_name_or_path": str(folder) if folder.is_dir() else self.model,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
        }

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"no reward model to load at {self.model!r}: neither a folder with one, nor the "
                "name of a repository that the Hugging Face hub or its cache on this machine "
                f"gives: {error}"
            ) from error
