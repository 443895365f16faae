"""Options of the loop that any algorithm may take: what they change, and what they leave."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lit_rl.advantages import GroupCentered, NormalizedParts, ProcessNormalized, ReturnToGo
from lit_rl.algorithms import GRPO, PPO, RecomputedLogProbs, Reinforce, SamplerLogProbs
from lit_rl.callbacks import RLCallback
from lit_rl.generation import TransformersGenerator
from lit_rl.kl_penalties import KLInReward
from lit_rl.reward_shaping import MissingEndPenalty, ScaleReward
from lit_rl.rewards import PythonFunction, Steps
from lit_rl.sampler_corrections import ImportanceMask, TruncatedImportance
from tiny_job import num_fives


class Recorder(RLCallback):
    def __init__(self):
        self.scored, self.experiences, self.updates = [], [], []

    def on_rollout(self, trainer, module, scored, experience):
        self.scored.append(scored)
        self.experiences.append(experience)

    def on_minibatch(self, trainer, module, update):
        self.updates.append(update)


class ImpreciseSampler(TransformersGenerator):
    """Reports log-probs that are 0.5 nats above those of the policy."""

    def __call__(self, *args, **kwargs):
        rollout = super().__call__(*args, **kwargs)
        return replace(rollout, sampler_log_probs=rollout.sampler_log_probs + 0.5 * rollout.mask)


@pytest.fixture
def signal(algorithm):
    return partial(algorithm, reward=PythonFunction(num_fives))


@pytest.fixture
def one_iteration(fit):
    """Train one iteration; return what was rolled out, what the update read, and the update."""

    def run(module):
        recorder = Recorder()
        fit(module, iterations=1, callbacks=[recorder])
        return recorder.scored[0], recorder.experiences[0], recorder.updates[0]

    return run


def test_only_tokens_of_high_entropy_have_an_advantage(signal, one_iteration):
    """Of n tokens the ceil(0.2 n) of the highest entropy; the denominators count all of them."""
    _, full, _ = one_iteration(signal())
    scored, experience, update = one_iteration(signal(top_entropy_fraction=0.2))
    ((part, output),) = update.micro_batches
    entropy = torch.where(part.mask, output.entropy, -1.0)
    number = -(-int(part.mask.sum()) // 5)
    chosen = entropy >= entropy.flatten().sort(descending=True).values[number - 1]
    assert part.advantages.ne(0).sum() > 0
    assert not (part.advantages.ne(0) & ~chosen).any()
    kept = experience.advantages.ne(0)
    assert torch.equal(experience.advantages[kept], full.advantages[kept])
    assert torch.equal(experience.mask, full.mask)
    # A row without chosen tokens still counts as a sequence in the mean over sequences.
    means = (experience.advantages.sum(1) / scored.mask.sum(1)).mean()
    torch.testing.assert_close(update.loss, -means, rtol=0, atol=1e-6)


@pytest.mark.parametrize("choice", [RecomputedLogProbs(), SamplerLogProbs()])
def test_entropy_of_the_old_policy_is_known_wherever_old_log_probs_come_from(
    signal, one_iteration, choice
):
    expected = one_iteration(signal(top_entropy_fraction=0.5))[1].advantages
    _, experience, _ = one_iteration(signal(top_entropy_fraction=0.5, old_log_probs=choice))
    torch.testing.assert_close(experience.advantages, expected)


def test_truncated_rows_are_left_out_of_the_baseline(signal, one_iteration):
    scored, experience, _ = one_iteration(
        signal(filter_truncated=True, advantage=GroupCentered(), group_size=8)
    )
    assert 0 < scored.finished.sum() < 48
    assert torch.equal(experience.mask, scored.mask & scored.finished[:, None])
    for rows in torch.arange(48).view(6, 8):
        finished = rows[scored.finished[rows]]
        if len(finished) > 1:
            expected = scored.rewards[finished] - scored.rewards[finished].mean()
            torch.testing.assert_close(experience.advantages[finished, 0], expected)


def test_shaping_acts_on_advantages_in_order_and_not_on_the_logged_reward(signal, one_iteration):
    """(reward - 1 for a missing end) * 10, in the order of the list; A is the return to go."""
    shaping = [MissingEndPenalty(1.0), ScaleReward(10.0)]
    scored, experience, _ = one_iteration(
        signal(kind=Reinforce, advantage=ReturnToGo(), reward_shaping=shaping)
    )
    expected = 10 * (scored.rewards - (~scored.finished).float())
    torch.testing.assert_close(experience.advantages[:, 0], expected)
    assert torch.equal(scored.rewards, torch.tensor(num_fives(scored.responses)))


def test_a_sampler_that_disagrees_is_weighed_token_by_token(signal, one_iteration):
    """exp(-0.5) = 0.6065 at every token, so the gradient is smaller by that factor."""
    build = partial(signal, generator=ImpreciseSampler(), max_grad_norm=None)
    plain = one_iteration(build())[2]
    weighed = one_iteration(build(sampler_correction=TruncatedImportance("token", 2.0)))[2]
    factor = torch.tensor(-0.5).exp()
    ratio = weighed.grad_norms["actor"] / plain.grad_norms["actor"]
    assert ratio == pytest.approx(factor.item(), rel=1e-4)
    masked = one_iteration(build(sampler_correction=ImportanceMask("token", 0.7, 2.0)))[2]
    assert masked.grad_norms["actor"] == 0


@pytest.mark.parametrize(
    "correction",
    [TruncatedImportance("token"), ImportanceMask("sequence")],
    ids=["truncated", "mask"],
)
def test_a_correction_of_a_sampler_that_is_taken_at_its_word_is_refused(signal, correction):
    """With the sampler's log-probs as the old ones every weight is exp(0) = 1."""
    with pytest.raises(ValueError, match="SamplerLogProbs makes them the same; use Recomputed"):
        signal(old_log_probs=SamplerLogProbs(), sampler_correction=correction)


def test_a_punishment_of_rows_that_are_left_out_is_refused(signal):
    with pytest.raises(ValueError, match="leaves out the very responses that MissingEndPenalty"):
        signal(filter_truncated=True, reward_shaping=[ScaleReward(2.0), MissingEndPenalty(1.0)])


@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_a_group_without_a_response_is_refused_whatever_the_estimator(signal, kind):
    with pytest.raises(ValueError, match="group_size is 0, must be at least 1"):
        signal(kind, group_size=0)


def test_rows_of_which_no_token_counts_are_in_no_pass_of_the_update(signal, one_iteration):
    scored, _, update = one_iteration(signal(filter_truncated=True, group_size=8))
    ((part, _),) = update.micro_batches
    assert part.mask.any(1).all()
    assert len(part) == scored.finished.sum() < 48


# ----- rewards of steps


def per_digit(responses: list[str], response_ids: list[list[int]]) -> list[Steps]:
    """One step per token: 1 for a "5", else 0; the end token is none."""
    return [
        Steps(list(range(len(response))), [float(letter == "5") for letter in response])
        for response in responses
    ]


def test_return_to_go_counts_the_steps_from_a_token_on(signal, one_iteration):
    module = signal(kind=Reinforce, reward=PythonFunction(per_digit), advantage=ReturnToGo())
    scored, experience, _ = one_iteration(module)
    for row, response in enumerate(scored.responses):
        expected = [float(response[place:].count("5")) for place in range(len(response))]
        assert experience.advantages[row, : len(response)].tolist() == expected
    assert experience.advantages.ne(0).any()


def test_group_estimators_see_the_sum_of_the_steps(signal, one_iteration):
    scored, experience, _ = one_iteration(
        signal(reward=PythonFunction(per_digit), advantage=GroupCentered())
    )
    totals = torch.tensor([float(r.count("5")) for r in scored.responses]).view(6, 4)
    expected = (totals - totals.mean(1, keepdim=True)).flatten()
    torch.testing.assert_close(experience.advantages[:, 0], expected)


def test_process_supervision_normalizes_all_steps_of_a_group(signal, one_iteration):
    """DeepSeekMath, section 4.1.3: (r - mean) / std over the steps; their sum from there on."""
    scored, experience, _ = one_iteration(
        signal(reward=PythonFunction(per_digit), advantage=ProcessNormalized())
    )
    for group in range(6):
        rows = range(4 * group, 4 * group + 4)
        steps = [[float(x == "5") for x in scored.responses[row]] for row in rows]
        values = torch.tensor([value for row in steps for value in row])
        for row, own in zip(rows, steps, strict=True):
            normalized = (torch.tensor(own) - values.mean()) / (values.std() + 1e-6)
            expected = normalized.flip(0).cumsum(0).flip(0)
            torch.testing.assert_close(
                experience.advantages[row, : len(own)], expected, rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("advantage", [ProcessNormalized(), NormalizedParts()])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl": KLInReward(), "kl_coef": 0.1}, "does not see a KL"),
        ({"reward_shaping": [ScaleReward(2.0)]}, "does not see what reward_shaping does"),
    ],
)
def test_what_an_estimator_does_not_see_is_refused(signal, advantage, settings, message):
    with pytest.raises(ValueError, match=message):
        signal(advantage=advantage, **settings)


def test_a_kl_that_the_sampler_would_tell_is_refused_where_it_is_corrected(signal):
    with pytest.raises(ValueError, match="take the KL in the reward from the sampler"):
        signal(
            kind=Reinforce,
            advantage=ReturnToGo(),
            kl=KLInReward(),
            kl_coef=0.1,
            sampler_correction=TruncatedImportance("token"),
        )


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_a_share_of_tokens_outside_its_range_is_refused(signal, fraction):
    with pytest.raises(ValueError, match="share of the tokens that is trained"):
        signal(kind=GRPO, top_entropy_fraction=fraction)
