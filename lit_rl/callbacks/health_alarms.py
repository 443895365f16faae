"""What goes wrong in a run: when it is taken to, why as a rule, and what to try.

Each alarm is a function of its thresholds. docs/health.md has them as a table.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lit_rl.callbacks.metric_history import MetricHistory

SKIPPED = "skipped_updates"
"""Counts the updates of a run that were left out because loss or gradient were not finite."""

COMPARED = ("reward/mean", "policy/entropy", "response/length_mean", "grad_norm", SKIPPED)
"""The metrics whose history alarms read."""

FINITE = ("loss", "grad_norm", "critic/grad_norm")
"""Metrics that are numbers in every iteration of a sound run."""

SOLVED = 0.9
"""Share of the reward of success from which a task counts as solved: equal rewards and a low
entropy are then what success looks like."""


@dataclass(frozen=True)
class Reading:
    """What is known after an iteration.

    Attributes:
        metrics: of the iteration, by name.
        history: of `COMPARED`, this iteration included.
        compares_groups: whether advantages come from the responses to one prompt alone.
        success_reward: reward from which a response is right.
        max_grad_norm: the limit of the gradient norm; infinite if there is none.
    """

    metrics: Mapping[str, float]
    history: MetricHistory
    compares_groups: bool = True
    success_reward: float = 1.0
    max_grad_norm: float = math.inf

    def __getitem__(self, name: str) -> float:
        return self.metrics.get(name, math.nan)

    @property
    def is_solved(self) -> bool:
        """Whether the mean reward is close to that of success."""
        missing = (1 - SOLVED) * abs(self.success_reward)
        return self["reward/mean"] >= self.success_reward - missing

    @property
    def reward_has_risen(self) -> bool:
        """Whether the reward is above all that it was in the first iterations."""
        return self.history.has_risen("reward/mean")


@dataclass(frozen=True)
class Alarm:
    """One thing that goes wrong.

    Attributes:
        name: its name, in a checkpoint and in the documentation.
        quantity: what is watched; NaN: nothing is known in this iteration.
        wrong: whether a value of it is.
        patience: iterations in a row in which it has to be.
        sentence: what happened, why as a rule, and what to try; `{value}` and `{patience}` are
            filled in.
        too_fast: whether a lower learning rate is a cure.
    """

    name: str
    quantity: Callable[[Reading], float]
    wrong: Callable[[float, Reading], bool]
    patience: int
    sentence: str
    too_fast: bool = False

    def message(self, value: float) -> str:
        """Return the sentence for a value of the quantity."""
        return self.sentence.format(value=f"{value:.3g}", patience=self.patience)


def no_signal(*, patience: int) -> Alarm:
    """All advantages are 0, before the task is solved."""

    def quantity(reading: Reading) -> float:
        if reading.compares_groups:
            return reading["reward/zero_std_group_fraction"]
        deviation = reading["reward/std"]
        return deviation if math.isnan(deviation) else float(deviation == 0)

    return Alarm(
        "no_signal",
        quantity,
        lambda fraction, reading: fraction == 1 and not reading.is_solved,
        patience,
        "for {patience} iterations in a row all rewards within each group were equal, so that "
        "nothing is learnt: the task is too hard, every response is cut off, the policy always "
        "says the same, or the reward reads the answers wrongly; look at the samples, then try "
        "easier prompts, a larger group_size, max_new_tokens or temperature, or another reward",
    )


def entropy_collapse(min_entropy: float, *, patience: int) -> Alarm:
    """The policy always says the same, before the task is solved."""
    return Alarm(
        "entropy_collapse",
        lambda reading: reading["policy/entropy"],
        lambda entropy, reading: entropy < min_entropy and not reading.is_solved,
        patience,
        "the entropy of the policy is {value} nats per token, so that it hardly tries anything "
        "new although the task is not solved: it has settled on an answer too early; start again "
        "from an earlier checkpoint with a higher entropy_coef, a higher clip_high or a lower "
        "learning rate",
    )


def entropy_rise(max_factor: float, *, patience: int) -> Alarm:
    """The policy becomes random."""
    return Alarm(
        "entropy_rise",
        lambda reading: reading["policy/entropy"] / reading.history.start("policy/entropy"),
        lambda factor, reading: factor > max_factor,
        patience,
        "the entropy of the policy is {value} times what it was at the start: the policy turns "
        "random, as with steps that are too large or an entropy bonus that outweighs the reward; "
        "lower the learning rate or entropy_coef",
        too_fast=True,
    )


def reference_kl(max_kl: float, *, patience: int) -> Alarm:
    """The policy leaves the reference behind."""
    return Alarm(
        "reference_kl",
        lambda reading: reading["kl/reference_k1"],
        lambda kl, reading: kl > max_kl,
        patience,
        "the KL of the policy to the reference is {value} nats per token, far for text that is to "
        "stay readable: the KL term is too weak for the reward or the steps are too large; raise "
        "kl_coef, steer it with AdaptiveKL, or lower the learning rate",
        too_fast=True,
    )


def update_kl(max_kl: float, *, patience: int) -> Alarm:
    """An iteration moves the policy far from the one that sampled."""
    return Alarm(
        "update_kl",
        lambda reading: reading["ratio/approx_kl_k3"],
        lambda kl, reading: kl > max_kl,
        patience,
        "for {patience} iterations in a row the updates of an iteration moved the policy far from "
        "the one that sampled, by now {value} nats per token: the steps are too large or too "
        "many; lower the learning rate, update_epochs or num_minibatches, or add StopOnKL",
        too_fast=True,
    )


def clipping(max_fraction: float, *, patience: int) -> Alarm:
    """Clips stop the gradient of most tokens."""
    sides = ("ratio/clip_low_fraction", "ratio/clip_high_fraction", "ratio/dual_clip_fraction")
    return Alarm(
        "clipping",
        lambda reading: sum(reading[side] for side in sides),
        lambda fraction, reading: fraction > max_fraction,
        patience,
        "clips bind at a share of {value} of the tokens, for {patience} iterations in a row, so "
        "that most of a rollout teaches nothing: the steps are too large or too many for the clip "
        "range; lower the learning rate or update_epochs, or widen clip_low and clip_high",
        too_fast=True,
    )


def truncation(max_fraction: float, *, patience: int) -> Alarm:
    """Responses are cut off, and the reward does not rise."""
    return Alarm(
        "truncation",
        lambda reading: reading["response/truncated_fraction"],
        lambda fraction, reading: fraction > max_fraction and not reading.reward_has_risen,
        patience,
        "a share of {value} of the responses is cut off at the limit and the reward does not "
        "rise: the reward hardly sees a finished answer, or the policy cannot produce its end "
        "token; raise max_new_tokens, look whether prompt format and end token fit the model, or "
        "add MissingEndPenalty",
    )


def length(max_factor: float, *, patience: int) -> Alarm:
    """Responses become much longer or shorter, and the reward does not rise."""
    return Alarm(
        "length",
        lambda reading: (
            reading["response/length_mean"] / reading.history.start("response/length_mean")
        ),
        lambda factor, reading: (
            not 1 / max_factor <= factor <= max_factor and not reading.reward_has_risen
        ),
        patience,
        "responses have {value} times the length that they had at the start and the reward does "
        "not rise: something other than the reward drives the length, such as the aggregation or "
        "a part of the reward; compare SequenceMean, TokenMean and FixedLength, and look at the "
        "samples",
    )


def critic(min_explained_variance: float, *, patience: int) -> Alarm:
    """The critic knows less than a constant."""
    return Alarm(
        "critic",
        lambda reading: reading["critic/explained_variance"],
        lambda value, reading: value < min_explained_variance and not reading.is_solved,
        patience,
        "the critic's values explain {value} of the variance of the returns, less than a constant "
        "does, for {patience} iterations in a row: advantages are noise; raise critic_lr, "
        "num_minibatches or critic_warmup, or lower critic_lr if critic/value_loss grows",
    )


def grad_norm(max_factor: float) -> Alarm:
    """The gradient is suddenly large, and was clipped."""

    def wrong(factor: float, reading: Reading) -> bool:
        return max_factor < factor < math.inf and reading["grad_norm"] > reading.max_grad_norm

    return Alarm(
        "grad_norm",
        lambda reading: reading["grad_norm"] / (reading.history.usual("grad_norm") or math.nan),
        wrong,
        1,
        "the gradient norm is {value} times its usual size: an outlier in rewards, ratios or "
        "log-probs, or the beginning of a divergence; look at ratio/max, reward/std and the "
        "samples of this iteration, and lower the learning rate or max_grad_norm if it returns",
        too_fast=True,
    )


def sampler(max_difference: float) -> Alarm:
    """Sampler and trainer do not see the same policy."""
    return Alarm(
        "sampler",
        lambda reading: reading["sampler/abs_difference_max"],
        lambda difference, reading: difference > max_difference,
        1,
        "log-probs of the sampler and of the trainer differ by up to {value} nats for the same "
        "tokens and weights: they do not see the same policy; look for another precision, "
        "temperature or attention in the generator, and let RecomputedLogProbs as old_log_probs "
        "keep the difference out of the ratios",
    )


def not_finite() -> Alarm:
    """A loss or a gradient norm is no number, or an update was left out for that."""

    def quantity(reading: Reading) -> float:
        values = [reading.metrics[name] for name in FINITE if name in reading.metrics]
        counts = [0.0, *reading.history.last[SKIPPED]]
        skipped = counts[-1] - counts[-2] if len(counts) > 1 else 0.0
        return max(skipped, float(sum(not math.isfinite(value) for value in values)))

    return Alarm(
        "not_finite",
        quantity,
        lambda number, reading: number > 0,
        1,
        "loss or gradient norm is no finite number ({value} of them): a reward, a log-prob or an "
        "activation has overflowed; look at reward/std, ratio/max and sampler/abs_difference_max "
        "of this iteration and the one before, and lower the learning rate or use float32",
        too_fast=True,
    )
