"""The mean of sampled gradients against the policy gradient, on problems with a closed form.

A policy is a table of logits, a response has one token or two, and the rewards are known. So the
policy gradient is the derivative of a short sum, and all batches that can be sampled are few. Each
case runs an algorithm's own `prepare` and `loss` on the table. One that states no gradient has the
policy gradient as its mean. One that is biased by design states the mean that it has instead, in
terms of the problem and without the code of the package.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from torch.nn.functional import one_hot

from lit_rl import algorithms
from lit_rl.advantages import GAE, BatchMean, MovingAverage, NormalizedParts, ReturnToGo
from lit_rl.advantages.groups import zero_std_groups
from lit_rl.aggregations import FixedLength, SequenceMean, SequenceSum, Totals
from lit_rl.algorithms import (
    CISPO,
    DAPO,
    GMPO,
    GPG,
    GRPO,
    GSPO,
    OPO,
    PPO,
    RLOO,
    SAPO,
    TRPO,
    ActorCritic,
    DrGRPO,
    PenalizedTRPO,
    PolicyGradient,
    Reinforce,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from lit_rl.kl_penalties import KLInLoss, KLInReward
from lit_rl.models import RandomCausalLM
from lit_rl.models.critic import Values
from lit_rl.policy_losses import (
    ClippedSurrogate,
    OffPolicySequenceMask,
    SequenceClipped,
    Surrogate,
)
from lit_rl.rewards import ExactAnswer
from lit_rl.sampler_corrections import ImportanceMask, TruncatedImportance
from lit_rl.types import (
    ActorCriticOutput,
    BaselinedRollout,
    PolicyOutput,
    ScoredRollout,
    at_last_token,
)

GROUP_SIZE = 3
NUM_SAMPLES = 8192


# The problems.


def table(*rows):
    return torch.tensor(rows, dtype=torch.float64)


@dataclass(frozen=True)
class Problem:
    """Prompts, the responses that each can get, and policies.

    Axes: `batches`, all that can be sampled; `prompts`; `group`; `responses`; `tokens`.

    Attributes:
        states: the row of logits that a token is drawn from, [prompts, responses, tokens].
        actions: the token, of the same shape.
        mask: True where a response has a token.
        parts: two parts of the reward, which is their sum, [2, prompts, responses].
        greedy: for each prompt the number of the response of likeliest tokens.
        policies: logits [states, actions] by name; `policy` is the one that is trained.
        values: what a critic says of each state; it need not be right.
    """

    states: torch.Tensor
    actions: torch.Tensor
    mask: torch.Tensor
    parts: torch.Tensor
    greedy: torch.Tensor
    policies: Mapping[str, torch.Tensor]
    values: torch.Tensor

    @cached_property
    def rewards(self):
        return self.parts.sum(0)

    def log_probs(self, logits):
        """Of each token, [prompts, responses, tokens]; 0 where there is none."""
        log_probs = logits.log_softmax(-1)[self.states, self.actions]
        return torch.where(self.mask, log_probs, 0.0)

    def log_ratio(self, above, below):
        """Of each token, for two policies by name."""
        return self.log_probs(self.policies[above]) - self.log_probs(self.policies[below])

    def probabilities(self, name):
        """Of each response, [prompts, responses]."""
        return self.log_probs(self.policies[name]).sum(-1).exp()

    def gradient(self, objective):
        """The derivative of `objective(logits)` at the policy, [states, actions]."""
        logits = self.policies["policy"].clone().requires_grad_()
        return torch.autograd.grad(objective(logits), logits)[0]

    @cached_property
    def batches(self):
        """The numbers of the responses of every batch, [batches, prompts, group]."""
        prompts, responses = self.rewards.shape
        numbers = [torch.arange(responses)] * (prompts * GROUP_SIZE)
        return torch.cartesian_prod(*numbers).view(-1, prompts, GROUP_SIZE)

    def sampled_batches(self, sampler):
        """As `batches`, as the policy of this name answers."""
        draws = torch.multinomial(
            self.probabilities(sampler),
            NUM_SAMPLES * GROUP_SIZE,
            replacement=True,
            generator=torch.Generator().manual_seed(0),
        )
        return draws.view(-1, NUM_SAMPLES, GROUP_SIZE).transpose(0, 1)

    def in_batches(self, of_tokens):
        """From [prompts, responses, tokens or 1] to [batches, prompts, group, tokens or 1]."""
        return of_tokens[torch.arange(len(self.rewards))[:, None], self.batches]

    def batch_probabilities(self, sampler):
        """Of every batch, where the policy of this name answers."""
        return self.in_batches(self.probabilities(sampler)[..., None]).prod(2).prod(1)[:, 0]

    @cached_property
    def batch_rewards(self):
        """[batches, prompts, group, 1]."""
        return self.in_batches(self.rewards[..., None])

    @cached_property
    def batch_mask(self):
        """[batches, prompts, group, tokens]."""
        return self.in_batches(self.mask)

    @cached_property
    def batch_lengths(self):
        """[batches, prompts, group, 1]."""
        return self.batch_mask.sum(-1, keepdim=True)

    def mean_over_batches(self, coefficients, sampler="policy"):
        """The mean of the sum over tokens of coefficient times gradient of the log-prob.

        Coefficients are [batches, prompts, group, tokens].
        """
        weighted = self.batch_probabilities(sampler)[:, None, None, None] * coefficients
        drawn = one_hot(self.batches, self.rewards.shape[1]).double()
        per_token = torch.einsum("bpgt,bpgr->prt", weighted, drawn)
        return self.gradient(lambda logits: (per_token * self.log_probs(logits)).sum())


def beside(policy, *, old, sampler, ref):
    """Policies by name, where the ratios of the policy to `old` and `sampler` are about these."""
    ratios = {"old": old, "sampler": sampler}
    others = {name: policy - table(*rows).log() for name, rows in ratios.items()}
    return {"policy": policy, "ref": table(*ref), **others}


# Two prompts with four responses of one token each. Some rewards are equal. The ratios lie on both
# sides of each clip, where the advantage is above 0 and where it is below.
ONE_TOKEN = Problem(
    states=torch.arange(2)[:, None, None].expand(2, 4, 1),
    actions=torch.arange(4)[None, :, None].expand(2, 4, 1),
    mask=torch.ones(2, 4, 1, dtype=torch.bool),
    parts=torch.stack(
        [
            table([1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]),
            table([0.0, 0.0, 0.0, -0.5], [-0.5, 1.0, 0.0, 0.0]),
        ]
    ),
    greedy=torch.tensor([2, 0]),
    policies=beside(
        table([0.3, -0.4, 0.8, 0.0], [1.0, 0.2, -0.5, -0.1]),
        old=([1.24, 0.6, 1.1, 0.98], [0.78, 1.4, 1.1, 1.67]),
        sampler=([1.05, 0.6, 1.15, 1.1], [1.3, 0.8, 0.5, 1.3]),
        ref=([-0.5, 0.2, 0.1, 0.3], [0.0, 0.9, -0.2, 0.4]),
    ),
    values=torch.tensor([0.7, -0.3], dtype=torch.float64),
)

# One prompt with the responses 0, 10, 11, 12, 20, 21 and 22. A second token is drawn from a row of
# logits of its own behind a 1 and behind a 2.
TWO_TOKENS = Problem(
    states=torch.tensor([[[0, 0], [0, 1], [0, 1], [0, 1], [0, 2], [0, 2], [0, 2]]]),
    actions=torch.tensor([[[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]]]),
    mask=torch.tensor([[[True, False], *[[True, True]] * 6]]),
    parts=torch.stack(
        [
            table([1.0, 0.0, 1.0, 0.0, 1.0, 2.0, 0.0]),
            table([0.5, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0]),
        ]
    ),
    greedy=torch.tensor([5]),
    policies=beside(
        table([0.3, -0.4, 0.8], [1.0, 0.2, -0.5], [0.0, 0.4, -0.2]),
        old=([0.8, 0.9, 1.25], [1.3, 0.9, 0.6], [0.6, 1.3, 1.3]),
        sampler=([1.1, 0.6, 1.2], [1.3, 0.7, 0.8], [0.8, 1.4, 0.8]),
        ref=([-0.5, 0.2, 0.1], [0.0, 0.9, -0.2], [0.5, 0.0, 0.3]),
    ),
    values=torch.tensor([0.7, -0.3, 1.1], dtype=torch.float64),
)


# Exact gradients.


def mean_reward(problem, logits, rewards):
    """Over prompts, the mean of what a response is expected to earn."""
    return (problem.log_probs(logits).sum(-1).exp() * rewards).sum(-1).mean()


def policy_gradient(problem, kl_coef=0.0, entropy_coef=0.0):
    """Of mean reward - kl_coef * KL(policy || ref) + entropy_coef * entropy, of responses."""
    ref_log_probs = problem.log_probs(problem.policies["ref"]).sum(-1)

    def objective(logits):
        log_probs = problem.log_probs(logits).sum(-1)
        paid = kl_coef * (log_probs - ref_log_probs) + entropy_coef * log_probs
        return mean_reward(problem, logits, problem.rewards - paid)

    return problem.gradient(objective)


def gradient_of_kl_to_ref(problem):
    return policy_gradient(problem) - policy_gradient(problem, kl_coef=1.0)


def gradient_of_kl_from(name, problem):
    """Of KL(policy of this name || policy), of responses of one token."""
    probabilities = problem.policies[name].softmax(-1)
    return problem.gradient(lambda logits: -(probabilities * logits.log_softmax(-1)).sum(-1).mean())


def gradient_of_kl_where_visited(problem):
    """Of KL(policy || ref) in each state, where the state is as probable as it is."""
    states = one_hot(problem.states, len(problem.policies["policy"])) * problem.mask[..., None]
    visits = torch.einsum("pr,prts->s", problem.probabilities("policy"), states.double())
    ref_log_probs = problem.policies["ref"].log_softmax(-1)

    def objective(logits):
        log_probs = logits.log_softmax(-1)
        return visits @ (log_probs.exp() * (log_probs - ref_log_probs)).sum(-1)

    return problem.gradient(objective) / len(problem.rewards)


# What multiplies the gradient of a token's log-prob, in all batches at once.

GROUP, BATCH = 2, (1, 2)


def centered(values, axes=GROUP):
    return values - values.mean(axes, keepdim=True)


def group_normalized(values):
    return centered(values) / (values.std(GROUP, keepdim=True) + 1e-6)


def whitened(values):
    return centered(values, BATCH) / (values.var(BATCH, keepdim=True) + 1e-8).sqrt()


def whitened_over_tokens(problem):
    """Rewards in units of their std over the tokens of the batch."""
    rewards, lengths = problem.batch_rewards, problem.batch_lengths
    tokens = lengths.sum(BATCH, keepdim=True)
    deviations = rewards - (lengths * rewards).sum(BATCH, keepdim=True) / tokens
    variance = (lengths * deviations.square()).sum(BATCH, keepdim=True) / (tokens - 1)
    return deviations / (variance + 1e-8).sqrt()


def less_mean_over_tokens(problem):
    """Rewards less their mean over the tokens of the group."""
    rewards, lengths = problem.batch_rewards, problem.batch_lengths
    return rewards - (lengths * rewards).sum(GROUP, True) / lengths.sum(GROUP, True)


def normalized_parts(problem):
    """Each part in units of its group's std, and their sum in units of its own over the batch."""
    parts = problem.parts[..., None]
    total = sum(group_normalized(problem.in_batches(part)) for part in parts)
    return centered(total, BATCH) / (total.std(BATCH, keepdim=True) + 1e-6)


def around_values(problem):
    """Rewards less the critic's value of the prompt."""
    return problem.in_batches(problem.rewards[..., None] - problem.values[problem.states[..., :1]])


def gae_of_two(problem, lam):
    """A_1 = r - V_1 and A_0 = V_1 - V_0 + lam * A_1; of a single token A_0 = r - V_0."""
    first, second = problem.values[problem.states].unbind(-1)
    last = problem.rewards - second
    of_two = torch.stack([second - first + lam * last, last], dim=-1)
    of_one = torch.stack([problem.rewards - first, torch.zeros_like(last)], dim=-1)
    return problem.in_batches(torch.where(problem.mask.all(-1, keepdim=True), of_two, of_one))


def token_mean(problem, coefficients):
    counted = coefficients * problem.batch_mask
    return counted / problem.batch_mask.sum((1, 2, 3), keepdim=True)


def sequence_sum(problem, coefficients):
    return coefficients * problem.batch_mask / problem.batches[0].numel()


def sequence_mean(problem, coefficients):
    return sequence_sum(problem, coefficients / problem.batch_lengths)


def mean_over_unequal_groups(problem, coefficients):
    """Groups whose rewards are all equal count in no denominator; 0 if there is no other."""
    rewards = problem.batch_rewards
    differ = rewards.amax(GROUP, keepdim=True) > rewards.amin(GROUP, keepdim=True)
    return coefficients * differ / (GROUP_SIZE * differ.sum(BATCH, keepdim=True)).clamp(min=1)


# Gradients that are stated, as functions of the problem and the algorithm.


def mean_of(advantages, aggregation=sequence_sum):
    """On responses of the policy itself, with `advantages(problem)`."""
    return lambda problem, _: problem.mean_over_batches(aggregation(problem, advantages(problem)))


def mean_of_rewards(advantages, aggregation=sequence_sum):
    """The same with `advantages(rewards)`."""
    return mean_of(lambda problem: advantages(problem.batch_rewards), aggregation)


def less(stated, kl_gradient):
    """Another gradient less kl_coef times one of a KL."""
    return lambda problem, algorithm: (
        stated(problem, algorithm) - algorithm.kl_coef * kl_gradient(problem)
    )


def whitened_with_kl(earned):
    """Responses of one token: whitened is what they earned less the KL (k1) to the reference."""

    def stated(problem, algorithm):
        kl = problem.in_batches(problem.log_ratio("policy", "ref"))
        coefficients = whitened(earned(problem) - algorithm.kl_coef * kl)
        return problem.mean_over_batches(sequence_sum(problem, coefficients))

    return stated


def token_ratios(problem):
    return problem.in_batches(problem.log_ratio("policy", "old")).exp()


def sequence_ratios(problem):
    """The geometric mean of the ratios of a response."""
    log_ratios = problem.in_batches(problem.log_ratio("policy", "old"))
    return (log_ratios.sum(-1, keepdim=True) / problem.batch_lengths).exp()


def geometric_mean_of_clipped_ratios(problem, advantages):
    """Log-ratios are clipped to +-0.4 one by one; a token that is clipped has no gradient."""
    log_ratios = problem.in_batches(problem.log_ratio("policy", "old"))
    bounded = torch.where(advantages > 0, log_ratios.clamp(max=0.4), log_ratios.clamp(min=-0.4))
    mean = bounded.sum(-1, keepdim=True) / problem.batch_lengths
    return torch.where(bounded == log_ratios, mean.exp(), 0.0)


def from_old(weights, advantages=None, aggregation=sequence_sum):
    """On responses of the old policy, with `weights(problem, A)` in the place of the ratio.

    The advantages are those of GRPO, if none are given.
    """

    def stated(problem, _):
        normalized = group_normalized(problem.batch_rewards)
        chosen = normalized if advantages is None else advantages(problem)
        coefficients = aggregation(problem, weights(problem, chosen) * chosen)
        return problem.mean_over_batches(coefficients, "old")

    return stated


def clipped(low, high, dual=torch.inf, ratios=token_ratios):
    """The ratio, and 0 where a clip stops the gradient."""

    def weights(problem, advantages):
        ratio = ratios(problem)
        stops_fall = (advantages < 0) & ((ratio < low) | (ratio > dual))
        stops_rise = (advantages > 0) & (ratio > high)
        return torch.where(stops_fall | stops_rise, 0.0, ratio)

    return weights


def without_far_negatives(problem, advantages):
    """The clipped ratio, and 0 where A < 0 and the log-ratio is below -0.01."""
    far = (advantages < 0) & (token_ratios(problem).log() < -0.01)
    return torch.where(far, 0.0, clipped(0.8, 1.2)(problem, advantages))


def slope_of_gate(problem, advantages):
    """d/d log_prob of (4 / tau) * sigmoid(tau * (ratio - 1)), tau = 1 where A > 0, else 1.05."""
    ratio = token_ratios(problem)
    positive, negative = (torch.sigmoid(tau * (ratio - 1)) for tau in (1.0, 1.05))
    gate = torch.where(advantages > 0, positive, negative)
    return 4 * gate * (1 - gate) * ratio


def from_sampler(weights):
    """Rewards, without baseline, on the sampler's responses, with `weights(log_ratios)`."""

    def stated(problem, _):
        log_ratios = problem.in_batches(problem.log_ratio("policy", "sampler"))
        coefficients = sequence_sum(problem, weights(log_ratios) * problem.batch_rewards)
        return problem.mean_over_batches(coefficients, "sampler")

    return stated


# The algorithms, with tables in the place of models.


@dataclass(frozen=True)
class TabularPolicy:
    """Draws a token from the row of logits that the prompt id in its column names."""

    logits: torch.Tensor

    def __call__(self, sequences):
        log_probs = self.logits.log_softmax(-1)[sequences.prompt_ids]
        chosen = log_probs.gather(-1, sequences.response_ids[..., None])[..., 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return PolicyOutput(
            log_probs=torch.where(sequences.mask, chosen, 0.0),
            entropy=torch.where(sequences.mask, entropy, 0.0),
        )


class OnTables:
    """What an algorithm asks its models, asked of the tables of a problem."""

    problem: Problem

    @property
    def reference(self):
        return TabularPolicy(self.problem.policies["ref"]) if self.uses_reference else None

    def output_under(self, policy, sequences):
        return policy(sequences)

    def log_probs_under(self, policy, sequences):
        return policy(sequences).log_probs

    def values_under(self, sequences):
        values = torch.where(sequences.mask, self.problem.values[sequences.prompt_ids], 0.0)
        return Values(values, end_values=torch.full_like(values[:, 0], 100.0))

    def forward_pass(self, experience):
        values = self.values_under(experience).values
        return self.policy(experience).extended(ActorCriticOutput, values=values)


def rollout(problem, numbers, sampler):
    """The responses with these numbers, [prompts, group], all of which have ended."""
    rows = (torch.arange(len(numbers)).repeat_interleave(GROUP_SIZE), numbers.flatten())
    mask, rewards, texts = problem.mask[rows], problem.rewards[rows], ("",) * len(rows[0])
    log_probs = problem.log_probs(problem.policies[sampler])[rows]
    return ScoredRollout(
        prompt_ids=problem.states[rows],
        prompt_mask=torch.ones_like(mask),
        response_ids=problem.actions[rows],
        mask=mask,
        sampler_log_probs=log_probs,
        finished=mask.any(1),
        prompts=texts,
        responses=texts,
        answers=texts,
        columns={},
        group_size=GROUP_SIZE,
        rewards=rewards,
        token_rewards=at_last_token(rewards, mask),
        step_rewards=torch.full_like(log_probs, torch.nan),
        reward_parts={"first": problem.parts[0][rows], "second": problem.parts[1][rows]},
        missing=torch.zeros(len(texts), dtype=torch.bool),
    )


def collected(algorithm, scored):
    """What `collect` adds to the responses of one round."""
    if isinstance(algorithm, DAPO):
        signal = ~zero_std_groups(scored).repeat_interleave(GROUP_SIZE)
        return replace(scored, mask=scored.mask & signal[:, None])
    if isinstance(algorithm, ReMax):
        problem = algorithm.problem
        rewards = problem.rewards.gather(1, problem.greedy[:, None])[:, 0]
        return scored.extended(
            BaselinedRollout, baseline_rewards=rewards.repeat_interleave(GROUP_SIZE)
        )
    return scored


@dataclass(frozen=True)
class Case:
    """An algorithm on a problem.

    Attributes:
        kind: the algorithm.
        stated: from problem and algorithm to the gradient that is expected; None: the policy
            gradient.
        settings: those that are not the algorithm's own.
        problem: the prompts, responses and policies.
        old: name of the policy before the update.
        sampler: name of the policy that answers.
    """

    kind: type[PolicyGradient]
    stated: Callable[[Problem, PolicyGradient], torch.Tensor] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    problem: Problem = ONE_TOKEN
    old: str = "policy"
    sampler: str = "policy"

    @cached_property
    def algorithm(self):
        name = f"{self.kind.__name__}OnTables"
        on_tables = type(name, (OnTables, self.kind), {"problem": self.problem})
        source, reward = RandomCausalLM(config={}, alphabet="0"), ExactAnswer()
        return on_tables(
            source=source, reward=reward, group_size=GROUP_SIZE, layout="padded", **self.settings
        )

    @cached_property
    def policy_gradient(self):
        """Of what the algorithm is to maximise."""
        return policy_gradient(
            self.problem, self.algorithm.kl_coef, entropy_coef=self.algorithm.entropy_coef
        )

    @cached_property
    def expected(self):
        if self.stated is None:
            return self.policy_gradient
        return self.stated(self.problem, self.algorithm)

    def gradients(self, batches):
        """The ascent direction of each batch, by the algorithm, [batches, states, actions]."""
        algorithm, policies = self.algorithm, self.problem.policies

        def loss(logits, numbers):
            algorithm.policy = TabularPolicy(policies[self.old])
            scored = collected(algorithm, rollout(self.problem, numbers, self.sampler))
            experience = algorithm.prepare(scored)
            algorithm.policy = TabularPolicy(logits)
            output = algorithm.forward_pass(experience)
            return algorithm.loss(output, experience, Totals.of(experience.mask))

        # Logits of its own for each batch, so that each has a gradient of its own.
        logits = policies["policy"].expand(len(batches), -1, -1).clone().requires_grad_()
        losses = torch.vmap(loss)(logits, batches)
        return -torch.autograd.grad(losses.sum(), logits)[0]

    @cached_property
    def sampled_gradients(self):
        return self.gradients(self.problem.sampled_batches(self.sampler))


# Every algorithm with its own choices, on its own responses of one token. There a token mean, a
# sequence mean and a sequence sum are the same, and so are all losses with a ratio, since it is 1.
#
# A reward that is part of its own baseline, the mean of n rewards, keeps (n - 1) / n of its effect;
# the other rewards in it are those of other responses and have none. Where a baseline is divided
# by a std, numerator and divisor depend on each other: the mean is taken over all batches.

OTHERS_OF_GROUP = (GROUP_SIZE - 1) / GROUP_SIZE
OTHERS_OF_BATCH = (2 * GROUP_SIZE - 1) / (2 * GROUP_SIZE)


def of_others(problem, _):
    return OTHERS_OF_GROUP * policy_gradient(problem)


normalized = mean_of_rewards(group_normalized)

OWN_CHOICES = {
    Reinforce: None,
    ReMax: None,
    RLOO: None,
    GPG: of_others,
    OPO: of_others,  # weighted by lengths, which are all 1
    DrGRPO: lambda problem, algorithm: (
        of_others(problem, algorithm) / algorithm.sampling.max_new_tokens
    ),
    # k3 in the loss has the gradient of the KL in the other direction as its mean:
    # E[(1 - ref / policy) * d log policy] = -sum ref * d log policy.
    GRPO: less(normalized, lambda problem: gradient_of_kl_from("ref", problem)),
    GSPO: normalized,
    GMPO: normalized,
    CISPO: normalized,
    SAPO: normalized,
    DAPO: mean_of_rewards(group_normalized, mean_over_unequal_groups),
    ReinforcePlusPlus: whitened_with_kl(lambda problem: problem.batch_rewards),
    # k2 in the loss has the gradient of the KL as its mean.
    ReinforcePlusPlusBaseline: less(
        mean_of_rewards(lambda rewards: whitened(centered(rewards))), gradient_of_kl_to_ref
    ),
    PPO: whitened_with_kl(around_values),
    TRPO: whitened_with_kl(around_values),
    PenalizedTRPO: whitened_with_kl(around_values),  # at the old policy the penalty is flat
}


class BaselineOfEarlierIterations(MovingAverage):
    """A moving average that is not shown the iteration at hand."""

    def observe(self, returns, mask):
        pass


def baseline_of_earlier_iterations():
    baseline = BaselineOfEarlierIterations()
    baseline.load_state_dict({"average": 0.6})
    return baseline


NO_KL = {"kl_coef": 0.0}
NO_WHITENING = {"advantage": GAE(whiten=False)}

OTHER_CHOICES = {
    "moving average": Case(
        Reinforce, settings={"advantage": ReturnToGo(baseline=baseline_of_earlier_iterations())}
    ),
    "batch mean": Case(
        Reinforce,
        lambda problem, _: OTHERS_OF_BATCH * policy_gradient(problem),
        {"advantage": ReturnToGo(baseline=BatchMean())},
    ),
    # Whatever the critic says.
    "PPO without whitening": Case(PPO, settings=NO_WHITENING),
    "TRPO without whitening": Case(TRPO, settings=NO_WHITENING),
    "parts": Case(GRPO, mean_of(normalized_parts), {"advantage": NormalizedParts(), **NO_KL}),
    "entropy bonus": Case(Reinforce, settings={"entropy_coef": 0.3}),
}


# KL terms with coefficient 0.5, on responses of one token, under REINFORCE without baseline.


def with_kl(penalty, stated=None):
    return Case(Reinforce, stated, {"kl": penalty, "kl_coef": 0.5})


def k2_as_reward(problem, _):
    """Not the gradient of the mean of k2, which also goes through k2 itself."""
    k2 = 0.5 * problem.log_ratio("policy", "ref").sum(-1).square()
    return problem.gradient(lambda now: mean_reward(problem, now, problem.rewards - 0.5 * k2))


def k3_as_reward(problem, _):
    """The mean of k3 is the KL; of its gradient, the part that goes through k3 itself is missing.

    That part is the gradient of the KL in the other direction, see GRPO.
    """
    return policy_gradient(problem, kl_coef=0.5) + 0.5 * gradient_of_kl_from("ref", problem)


def k3_as_loss(problem, _):
    return policy_gradient(problem) - 0.5 * gradient_of_kl_from("ref", problem)


def abs_as_loss(problem, _):
    """E[sign(policy - ref) * d log policy] is the gradient of the sum of abs(policy - ref)."""
    ref = problem.policies["ref"].softmax(-1)
    distance = problem.gradient(lambda now: (now.softmax(-1) - ref).abs().sum(-1).mean())
    return policy_gradient(problem) - 0.5 * distance


KL_TERMS = {
    "k1 in reward": with_kl(KLInReward("k1")),
    "k2 in reward": with_kl(KLInReward("k2"), k2_as_reward),
    "k3 in reward": with_kl(KLInReward("k3"), k3_as_reward),
    "k2 in loss": with_kl(KLInLoss("k2")),
    "k1 in loss, unbiased": with_kl(KLInLoss("k1", unbiased_gradient=True)),
    "k3 in loss, unbiased": with_kl(KLInLoss("k3", unbiased_gradient=True)),
    "k3 in loss": with_kl(KLInLoss("k3"), k3_as_loss),
    "abs in loss": with_kl(KLInLoss("abs"), abs_as_loss),
}


# Responses of the old policy, of one token.


def of_old(kind, stated=None, **settings):
    return Case(kind, stated, settings, old="old", sampler="old")


OLD_POLICY = {
    # The ratio alone is importance sampling: the gradient of the policy as it is now.
    "TRPO": of_old(TRPO, **NO_WHITENING),
    "RLOO without clip": of_old(RLOO, policy_loss=Surrogate(), **NO_KL),
    # Without it, REINFORCE goes on to learn what the old policy did.
    "REINFORCE": of_old(
        Reinforce, from_old(lambda *_: 1.0, advantages=lambda problem: problem.batch_rewards)
    ),
    # k3 of KL(old || policy) is exact in value and gradient where the old policy answers.
    "TRPO with penalty": of_old(
        PenalizedTRPO,
        lambda problem, _: policy_gradient(problem) - 0.5 * gradient_of_kl_from("old", problem),
        beta=0.5,
        **NO_WHITENING,
    ),
    "PPO": of_old(PPO, from_old(clipped(0.8, 1.2), around_values), **NO_WHITENING, **NO_KL),
    "GRPO": of_old(GRPO, from_old(clipped(0.8, 1.2)), **NO_KL),
    "dual clip": of_old(
        GRPO,
        from_old(clipped(0.8, 1.2, dual=1.5)),
        policy_loss=ClippedSurrogate(dual_clip=1.5),
        **NO_KL,
    ),
    "DAPO": of_old(DAPO, from_old(clipped(0.8, 1.28), aggregation=mean_over_unequal_groups)),
    "GSPO": of_old(GSPO, from_old(clipped(1 - 3e-4, 1 + 4e-4))),
    "GMPO": of_old(GMPO, from_old(geometric_mean_of_clipped_ratios)),
    "CISPO": of_old(CISPO, from_old(lambda problem, _: token_ratios(problem).clamp(max=1.2))),
    "SAPO": of_old(SAPO, from_old(slope_of_gate)),
    "off-policy mask": of_old(
        GRPO,
        from_old(without_far_negatives),
        policy_loss=OffPolicySequenceMask(ClippedSurrogate(), max_kl=0.01),
        update_epochs=2,  # it is of no use in the first update; the gradient is of one here, too
        **NO_KL,
    ),
}


# Responses of a sampler that is not the policy, of one token. No ratio is above 10.

ALL = 10.0


def of_sampler(correction, stated=None, problem=ONE_TOKEN):
    settings = {"sampler_correction": correction, "aggregation": SequenceSum()}
    return Case(Reinforce, stated, settings, problem, sampler="sampler")


def within_band(log_ratios):
    ratios = log_ratios.exp()
    return torch.where((ratios < 0.8) | (ratios > 1.2), 0.0, ratios)


SAMPLER = {
    "no correction": of_sampler(None, from_sampler(torch.ones_like)),
    "importance": of_sampler(TruncatedImportance("token", maximum=ALL)),
    "truncated importance": of_sampler(
        TruncatedImportance("token", maximum=1.2),
        from_sampler(lambda log_ratios: log_ratios.exp().clamp(max=1.2)),
    ),
    "importance in a band": of_sampler(
        ImportanceMask("token", minimum=0.8, maximum=1.2), from_sampler(within_band)
    ),
    # From the sampler to the old policy, and from there to the policy.
    "importance and ratio": Case(
        RLOO,
        settings={
            "sampler_correction": TruncatedImportance("token", maximum=ALL),
            "policy_loss": Surrogate(),
            **NO_KL,
        },
        old="old",
        sampler="sampler",
    ),
}


# Responses of one token or two.


def on_two_tokens(kind, stated=None, policy="policy", **settings):
    return Case(kind, stated, settings, TWO_TOKENS, old=policy, sampler=policy)


def reward_per_token(problem, _):
    """What the mean over the tokens of a response maximises."""
    per_token = problem.rewards / problem.mask.sum(-1)
    return problem.gradient(lambda logits: mean_reward(problem, logits, per_token))


def k2_of_tokens(problem, _):
    """The KL of a token where it stands: what it does to later states is left out."""
    return policy_gradient(problem) - 0.5 * gradient_of_kl_where_visited(problem)


def less_others(rewards):
    """Rewards less the mean of the others of the group."""
    return centered(rewards) / OTHERS_OF_GROUP


LENGTHS = {
    # The sum over the tokens of a response is that of the response as one action.
    "REINFORCE": on_two_tokens(Reinforce, aggregation=SequenceSum()),
    "KL in reward": on_two_tokens(
        Reinforce, aggregation=SequenceSum(), kl=KLInReward("k1"), kl_coef=0.5
    ),
    "RLOO": on_two_tokens(RLOO),
    "ReMax": on_two_tokens(ReMax, aggregation=SequenceSum()),
    # With lambda 1 the critic is a baseline, whatever it says; otherwise it has to be right.
    "PPO": on_two_tokens(PPO, advantage=GAE(lam=1.0, whiten=False), aggregation=SequenceSum()),
    "PPO with lambda 0.5": on_two_tokens(
        PPO,
        mean_of(lambda problem: gae_of_two(problem, lam=0.5)),
        advantage=GAE(lam=0.5, whiten=False),
        aggregation=SequenceSum(),
        **NO_KL,
    ),
    "fixed length": on_two_tokens(
        Reinforce, lambda problem, _: policy_gradient(problem) / 8, aggregation=FixedLength(8)
    ),
    "DrGRPO": on_two_tokens(
        DrGRPO,
        lambda problem, algorithm: of_others(problem, algorithm) / 8,
        aggregation=FixedLength(8),
    ),
    "sequence mean": on_two_tokens(Reinforce, reward_per_token, aggregation=SequenceMean()),
    # Divided by its length, a response's baseline has an effect of its own.
    "RLOO with sequence mean": on_two_tokens(
        RLOO, mean_of_rewards(less_others, sequence_mean), aggregation=SequenceMean(), **NO_KL
    ),
    "GRPO": on_two_tokens(GRPO, mean_of_rewards(group_normalized, sequence_mean), **NO_KL),
    # A token mean is a quotient of two sums over the batch.
    "token mean": on_two_tokens(Reinforce, mean_of(lambda p: p.batch_rewards, token_mean)),
    "GPG": on_two_tokens(GPG, mean_of_rewards(centered, token_mean)),
    "OPO": on_two_tokens(OPO, mean_of(less_mean_over_tokens, token_mean)),
    "REINFORCE++": on_two_tokens(
        ReinforcePlusPlus, mean_of(whitened_over_tokens, token_mean), **NO_KL
    ),
    "k2 in loss": on_two_tokens(
        Reinforce, k2_of_tokens, aggregation=SequenceSum(), kl=KLInLoss("k2"), kl_coef=0.5
    ),
    # The ratio of a token leaves out those of the tokens before it.
    "RLOO without clip": on_two_tokens(
        RLOO,
        from_old(lambda problem, _: token_ratios(problem), lambda p: less_others(p.batch_rewards)),
        policy="old",
        policy_loss=Surrogate(),
        **NO_KL,
    ),
    "GSPO": on_two_tokens(
        GSPO,
        from_old(clipped(0.8, 1.2, ratios=sequence_ratios), aggregation=sequence_mean),
        policy="old",
        policy_loss=SequenceClipped(clip_low=0.2, clip_high=0.2),
    ),
    "GMPO": on_two_tokens(
        GMPO,
        from_old(geometric_mean_of_clipped_ratios, aggregation=sequence_mean),
        policy="old",
    ),
    "importance of sequences": of_sampler(
        TruncatedImportance("sequence", maximum=ALL), problem=TWO_TOKENS
    ),
    "truncated importance of sequences": of_sampler(
        TruncatedImportance("sequence", maximum=1.2),
        from_sampler(lambda log_ratios: log_ratios.sum(-1, keepdim=True).exp().clamp(max=1.2)),
        TWO_TOKENS,
    ),
    "importance of tokens": of_sampler(
        TruncatedImportance("token", maximum=ALL), from_sampler(torch.exp), TWO_TOKENS
    ),
}

CASES = {("own choices", kind.__name__): Case(kind, stated) for kind, stated in OWN_CHOICES.items()}
for group, cases in {
    "other choices": OTHER_CHOICES,
    "KL": KL_TERMS,
    "old policy": OLD_POLICY,
    "sampler": SAMPLER,
    "two tokens": LENGTHS,
}.items():
    CASES |= {(group, name): case for name, case in cases.items()}


def over(cases):
    return pytest.mark.parametrize("case", cases.values(), ids=map(": ".join, cases))


# The tests.


def standard_errors_off(gradients, expected):
    """How far the mean is from what is expected, in standard errors: the worst of all logits.

    The cases share six samples of batches, one for each problem and policy that answers. Of all the
    numbers one or more would be beyond 3 standard errors at about one seed in five (3 of the seeds
    0 to 13); the seed is fixed.
    """
    errors = gradients.std(0) / len(gradients) ** 0.5
    # A logit without gradient has no error, but rounding.
    return ((gradients.mean(0) - expected).abs() / (errors + 1e-12)).max()


def test_every_algorithm_is_tested_with_its_own_choices():
    exported = {getattr(algorithms, name) for name in algorithms.__all__}
    loops = {kind for kind in exported if issubclass(kind, PolicyGradient)}
    assert loops - {PolicyGradient, ActorCritic} == OWN_CHOICES.keys()


@over(CASES)
def test_the_mean_of_sampled_gradients_agrees_with_the_expected_one(case):
    assert standard_errors_off(case.sampled_gradients, case.expected) < 3


@over({name: case for name, case in CASES.items() if case.stated})
def test_a_bias_by_design_shows_in_the_samples(case):
    assert standard_errors_off(case.sampled_gradients, case.policy_gradient) > 3


@over(CASES)
def test_the_mean_over_all_batches_is_the_expected_gradient(case):
    gradients = case.gradients(case.problem.batches)
    mean = torch.einsum("b,bsa->sa", case.problem.batch_probabilities(case.sampler), gradients)
    torch.testing.assert_close(mean, case.expected, rtol=0, atol=1e-12)
