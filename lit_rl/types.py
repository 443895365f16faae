"""The containers that travel through an iteration: one frozen dataclass per stage.

Axes, everywhere in the package:

- `prompts`: rows of a batch of prompts.
- `rollouts`: `prompts * group_size` rows; rows `[i * group_size, (i + 1) * group_size)` answer
  prompt `i`.
- `prompt_tokens`: positions of a prompt, left-padded.
- `tokens`: positions of a response, right-padded. Column `t` of every per-token tensor belongs to
  response token `t`; nobody shifts by one outside `functional.log_probs`.
- `vocab`: entries of the vocabulary.

A mask is True where a position counts.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

ContainerT = TypeVar("ContainerT", bound="Container")


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(entry, function) for key, entry in value.items()}
    return value


@dataclass(frozen=True, kw_only=True)
class Container:
    """A frozen batch whose tensors move together. Nobody assigns to one: a change is a new one."""

    def map_tensors(self: ContainerT, function: Callable[[Tensor], Tensor]) -> ContainerT:
        """Return this container with `function` applied to each tensor field."""
        changed = {f.name: _map_tensors(getattr(self, f.name), function) for f in fields(self)}
        return replace(self, **changed)

    def to(self: ContainerT, device: torch.device | str, **kwargs: Any) -> ContainerT:
        """Return this container on `device`; Lightning calls it to move a batch."""
        return self.map_tensors(lambda tensor: tensor.to(device, **kwargs))

    def extended(self, stage: type[ContainerT], **added: Any) -> ContainerT:
        """Return the next stage: the fields of this container and the `added` ones."""
        return stage(**{f.name: getattr(self, f.name) for f in fields(self)}, **added)


@dataclass(frozen=True, kw_only=True)
class Prompts(Container):
    """A batch of prompts, one row each. Made by `lit_rl.data`.

    Two prompts "1>" and "23>" with pad id 0 and vocabulary {">": 3, "1": 5, "2": 6, "3": 7}::

        ids     = [[0, 5, 3], [6, 7, 3]]
        mask    = [[F, T, T], [T, T, T]]
        texts   = ("1>", "23>")
        answers = ("1", "3")
        columns = {"digits": (1, 2)}
        row_ids = (17, 4)

    Attributes:
        ids: token ids, left-padded.
        mask: True where a token is the prompt's own. Read from lengths, never from token values.
        texts: the prompts as the model reads them.
        answers: the reference answers, empty text where the task has none.
        columns: every other column of the data set, one entry per prompt.
        row_ids: number of the row in the data set, which seeds the sampling of this prompt.
    """

    ids: Int[Tensor, "prompts prompt_tokens"]
    mask: Bool[Tensor, "prompts prompt_tokens"]
    texts: tuple[str, ...]
    answers: tuple[str, ...]
    columns: dict[str, tuple[Any, ...]]
    row_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.row_ids)

    def split(self, size: int) -> "list[Prompts]":
        """Return the prompts in parts of `size`, the last of which may be smaller."""
        parts = []
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            parts.append(
                Prompts(
                    ids=self.ids[rows],
                    mask=self.mask[rows],
                    texts=self.texts[rows],
                    answers=self.answers[rows],
                    columns={name: column[rows] for name, column in self.columns.items()},
                    row_ids=self.row_ids[rows],
                )
            )
        return parts


RolloutT = TypeVar("RolloutT", bound="Rollout")


def _map_rows(function: Callable[..., Any], first: RolloutT, *others: RolloutT) -> RolloutT:
    """Return `first` with `function(name, values, ...)` for every field with an entry per row."""
    changed: dict[str, Any] = {}
    for field in fields(first):
        values = [getattr(rollout, field.name) for rollout in (first, *others)]
        if isinstance(values[0], dict):
            changed[field.name] = {
                key: function(field.name, *(value[key] for value in values)) for key in values[0]
            }
        elif isinstance(values[0], Tensor | tuple):
            changed[field.name] = function(field.name, *values)
    return replace(first, **changed)


@dataclass(frozen=True, kw_only=True)
class Rollout(Container):
    """Sampled responses, `group_size` rows per prompt. Made by `lit_rl.generation`.

    One prompt, a group of two, end id 2: the first response ended, the second met the limit::

        response_ids = [[7, 2, 0], [5, 5, 6]]
        mask         = [[T, T, F], [T, T, T]]
        finished     = [T, F]
        responses    = ("3", "112")

    Attributes:
        prompt_ids: token ids of the prompts, left-padded, each repeated `group_size` times.
        prompt_mask: True where a prompt token is the prompt's own.
        response_ids: sampled token ids, right-padded.
        mask: True where the policy sampled the token, the end token included; counts in the loss.
        sampler_log_probs: the generator's log-probs of the sampled tokens at the sampling
            temperature, before top-k, top-p or min-p, in nats; zero where the mask is False.
        filtered_log_probs: the same after these filters, of the distribution that the tokens were
            drawn from; None where the generator does not tell.
        finished: True where an end token or stop string ended the response; False: truncated.
        prompts: the prompts' texts.
        responses: the responses' texts, without the end token and cut before the stop string.
        answers: the reference answers.
        columns: every other column of the data set, one entry per rollout.
        group_size: rollouts per prompt.
    """

    prompt_ids: Int[Tensor, "rollouts prompt_tokens"]
    prompt_mask: Bool[Tensor, "rollouts prompt_tokens"]
    response_ids: Int[Tensor, "rollouts tokens"]
    mask: Bool[Tensor, "rollouts tokens"]
    sampler_log_probs: Float[Tensor, "rollouts tokens"]
    finished: Bool[Tensor, " rollouts"]
    prompts: tuple[str, ...]
    responses: tuple[str, ...]
    answers: tuple[str, ...]
    columns: dict[str, tuple[Any, ...]]
    group_size: int
    filtered_log_probs: Float[Tensor, "rollouts tokens"] | None = None

    def __len__(self) -> int:
        return len(self.responses)

    def select(self: RolloutT, rows: Int[Tensor, " selected"]) -> RolloutT:
        """Return the given rows, in the given order."""
        numbers = rows.tolist()

        def chosen(_: str, values: Any) -> Any:
            if isinstance(values, Tensor):
                return values[rows]
            return tuple(values[number] for number in numbers)

        return _map_rows(chosen, self)

    def followed_by(self: RolloutT, other: RolloutT) -> RolloutT:
        """Return the rows of this rollout and then those of another, padded to the same widths."""

        def joined(name: str, first: Any, second: Any) -> Any:
            if not isinstance(first, Tensor):
                return first + second
            if first.ndim == 1:
                return torch.cat([first, second])
            width = max(first.shape[1], second.shape[1])
            padding = torch.nan if name == "step_rewards" else 0
            left = name.startswith("prompt_")
            return torch.cat(
                [
                    nn.functional.pad(part, (missing, 0) if left else (0, missing), value=padding)
                    for part in (first, second)
                    for missing in [width - part.shape[1]]
                ]
            )

        return _map_rows(joined, self, other)


ScoredT = TypeVar("ScoredT", bound="ScoredRollout")


@dataclass(frozen=True, kw_only=True)
class ScoredRollout(Rollout):
    """A rollout with its rewards. Made by `lit_rl.rewards`.

    A response of three tokens that earned 1.0 as a whole, and one whose reward judged two steps::

        rewards       = [1.0, 0.7]
        token_rewards = [[0.0, 0.0, 1.0], [0.2, 0.0, 0.5]]
        step_rewards  = [[nan, nan, nan], [0.2, nan, 0.5]]

    Attributes:
        rewards: one number per rollout, in the task's units; 0 where `missing`.
        token_rewards: the same number as its tokens earned it: the value of each step at its token,
            the rest at the last token that counts; a KL in the reward is deducted from each token.
            Zero where the mask is False; the sum over the tokens is `rewards`.
        step_rewards: the value of each step at the token that ends it, as the reward gave it; NaN
            where no step ends.
        reward_parts: the named parts before weighting; NaN where a part does not apply.
        missing: True where no part applies, or judging failed. Such a row leaves its group: it
            moves no baseline and has no advantage.
        failed: True where judging failed, which is then also `missing`; None: it failed nowhere.
    """

    rewards: Float[Tensor, " rollouts"]
    token_rewards: Float[Tensor, "rollouts tokens"]
    step_rewards: Float[Tensor, "rollouts tokens"]
    reward_parts: dict[str, Float[Tensor, " rollouts"]]
    missing: Bool[Tensor, " rollouts"]
    failed: Bool[Tensor, " rollouts"] | None = None

    def with_rewards(self: ScoredT, rewards: Float[Tensor, " rollouts"]) -> ScoredT:
        """Return this rollout with other rewards; the last token that counts earns the difference.

        Args:
            rewards: one number per rollout; what stands at a row that is `missing` is not read.
        """
        rewards = torch.where(self.missing, 0.0, rewards)
        difference = at_last_token(rewards - self.rewards, self.mask)
        return replace(self, rewards=rewards, token_rewards=self.token_rewards + difference)


@dataclass(frozen=True, kw_only=True)
class BaselinedRollout(ScoredRollout):
    """A scored rollout beside a baseline response to each prompt.

    Attributes:
        baseline_rewards: reward of the baseline response to the prompt of each rollout, shaped as
            the rewards are before advantages are estimated.
    """

    baseline_rewards: Float[Tensor, " rollouts"]


@dataclass(frozen=True, kw_only=True)
class ValuedRollout(ScoredRollout):
    """A scored rollout with what the critic expected of it.

    Attributes:
        values: the critic's value of the state before each token, in reward units: read at the
            position before it, which is the last prompt token for the first one; zero where the
            mask is False.
        end_values: its value of the state behind the last token that counts.
    """

    values: Float[Tensor, "rollouts tokens"]
    end_values: Float[Tensor, " rollouts"]


def at_last_token(
    values: Float[Tensor, " rollouts"], mask: Bool[Tensor, "rollouts tokens"]
) -> Float[Tensor, "rollouts tokens"]:
    """Return each value at the last token of its row that counts, and 0 elsewhere.

    Args:
        values: one number per rollout.
        mask: True where a token counts; a row without such a token gets no value.

    Example:
        >>> mask = torch.tensor([[True, True, False], [False, False, False]])
        >>> at_last_token(torch.tensor([0.5, 2.0]), mask)
        tensor([[0.0000, 0.5000, 0.0000],
                [0.0000, 0.0000, 0.0000]])
    """
    is_last = mask & (mask.long().flip(1).cumsum(1).flip(1) == 1)
    return torch.where(is_last, values[:, None], 0.0)


SequencesT = TypeVar("SequencesT", bound="Sequences")


@dataclass(frozen=True, kw_only=True)
class Sequences(Container):
    """Prompts with responses as tensors only: any selection of rows is a batch again.

    Attributes:
        prompt_ids: as in `Rollout`.
        prompt_mask: as in `Rollout`.
        response_ids: as in `Rollout`.
        mask: True where a response token counts.
    """

    prompt_ids: Int[Tensor, "rollouts prompt_tokens"]
    prompt_mask: Bool[Tensor, "rollouts prompt_tokens"]
    response_ids: Int[Tensor, "rollouts tokens"]
    mask: Bool[Tensor, "rollouts tokens"]

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def widths(self) -> Int[Tensor, "rollouts 2"]:
        """Columns that each row needs: of its prompt, and of its response up to the last token."""
        columns = torch.arange(1, self.mask.shape[1] + 1, device=self.mask.device)
        return torch.stack([self.prompt_mask.sum(1), (self.mask * columns).amax(1)], dim=1)

    @property
    def ids(self) -> Int[Tensor, "rollouts positions"]:
        """Token ids of prompt and response."""
        return torch.cat([self.prompt_ids, self.response_ids], dim=1)

    @property
    def attention_mask(self) -> Bool[Tensor, "rollouts positions"]:
        """True where a token of prompt or response is attended to."""
        return torch.cat([self.prompt_mask, self.mask], dim=1)

    def select(self: SequencesT, rows: Int[Tensor, " selected"]) -> SequencesT:
        """Return the given rows, in the given order."""
        return self.map_tensors(lambda tensor: tensor[rows])

    def trimmed(self: SequencesT) -> SequencesT:
        """Return the same rows without the columns that all of them pad (one column stays)."""
        prompt_width, width = self.widths.amax(0).clamp(min=1).tolist()
        cut = {
            f.name: value[:, -prompt_width:] if f.name.startswith("prompt_") else value[:, :width]
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **cut)


@dataclass(frozen=True, kw_only=True)
class Experience(Sequences):
    """What the update reads.

    Attributes:
        sampler_log_probs: as in `Rollout`.
        advantages: advantage of each token, zero where the mask is False.
        old_log_probs: log-probs under the policy before the update, in nats. None: the rollout is
            used for exactly one update, whose own detached log-probs are the old ones.
        ref_log_probs: log-probs under the frozen reference, in nats. None: no KL term needs them.
    """

    sampler_log_probs: Float[Tensor, "rollouts tokens"]
    advantages: Float[Tensor, "rollouts tokens"]
    old_log_probs: Float[Tensor, "rollouts tokens"] | None
    ref_log_probs: Float[Tensor, "rollouts tokens"] | None


@dataclass(frozen=True, kw_only=True)
class CriticExperience(Experience):
    """What the update of an actor and its critic reads.

    Attributes:
        old_values: the critic's values at the time of the rollout, fixed over all epochs.
        returns: what the values of the tokens are moved towards, in reward units.
    """

    old_values: Float[Tensor, "rollouts tokens"]
    returns: Float[Tensor, "rollouts tokens"]


@dataclass(frozen=True, kw_only=True)
class ModelOutput(Container):
    """What models say of given responses."""


@dataclass(frozen=True, kw_only=True)
class PolicyOutput(ModelOutput):
    """What a policy says of given responses. Made by `lit_rl.models`.

    Attributes:
        log_probs: log-probability of each response token at the sampling temperature, in nats.
        entropy: entropy of the distribution that each response token was drawn from, in nats.
    """

    log_probs: Float[Tensor, "rollouts tokens"]
    entropy: Float[Tensor, "rollouts tokens"]


@dataclass(frozen=True, kw_only=True)
class CriticOutput(ModelOutput):
    """What a critic says of given responses.

    Attributes:
        values: the critic's value of the state before each token; zero where the mask is False.
    """

    values: Float[Tensor, "rollouts tokens"]


@dataclass(frozen=True, kw_only=True)
class ActorCriticOutput(PolicyOutput, CriticOutput):
    """What a policy and a critic say of given responses."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step, as callbacks see it.

    Attributes:
        passes: the rows of the minibatch and the (detached) output of the models on them; none on a
            rank that had no row.
        loss: the aggregated loss of the minibatch on this rank.
        grad_norms: norm of the gradient before clipping, by parameter group: `actor`, and `critic`
            where there is one.
        index: number of the update within its iteration, from 0; at 0 the policy is still the one
            that sampled.
    """

    passes: tuple[tuple[Experience, ModelOutput], ...]
    loss: Float[Tensor, ""]
    grad_norms: dict[str, float]
    index: int

    @property
    def micro_batches(self) -> tuple[tuple[Experience, PolicyOutput], ...]:
        """The rows with the policy's output; none where a critic alone is trained."""
        return tuple(
            (experience, output)
            for experience, output in self.passes
            if isinstance(output, PolicyOutput)
        )
