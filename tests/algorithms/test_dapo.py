"""Dynamic sampling: what is sampled, what is trained on, and what is counted."""

from functools import partial

import pytest
import torch

from lit_rl.advantages import NormalizedParts, ProcessNormalized
from lit_rl.algorithms import DAPO
from lit_rl.algorithms.rounds import Group, choose_groups, gathered_groups
from lit_rl.callbacks import RewardMetrics, RLCallback, Throughput
from lit_rl.generation import SamplingSettings
from lit_rl.reward_shaping import SoftOverlongPunishment
from lit_rl.rewards import PythonFunction
from tiny_job import num_fives


def constant(responses: list[str]) -> list[float]:
    return [1.0] * len(responses)


def after_a_five(prompts: list[str], responses: list[str]) -> list[float]:
    """Signal in the groups of the prompts with a 5 alone."""
    values = zip(prompts, num_fives(responses), strict=True)
    return [value if "5" in prompt else 0.0 for prompt, value in values]


class Recorder(RLCallback):
    def __init__(self):
        self.rounds, self.scored, self.experiences, self.updates = [], [], [], []

    def on_scored(self, trainer, module, scored):
        self.rounds.append(scored)

    def on_rollout(self, trainer, module, scored, experience):
        self.scored.append(scored)
        self.experiences.append(experience)

    def on_minibatch(self, trainer, module, update):
        self.updates.append(update)


@pytest.fixture
def dapo(algorithm):
    settings = {
        "kind": DAPO,
        "reward": PythonFunction(num_fives),
        "reward_shaping": [],
        "filter_truncated": False,
    }
    return partial(algorithm, **settings)


def prompts_of(scored):
    return scored.prompts[:: scored.group_size]


def test_groups_without_signal_are_replaced_by_those_of_further_prompts(dapo, fit):
    """Six prompts an iteration; those with a 5, and no others, are trained on."""
    recorder = Recorder()
    module = dapo(reward=PythonFunction(after_a_five), max_rounds=20)
    trainer = fit(module, iterations=1, callbacks=[recorder])
    (batch,), (experience,) = recorder.scored, recorder.experiences
    assert len(prompts_of(batch)) == 6
    assert all("5" in prompt for prompt in prompts_of(batch))
    assert experience.mask.any(1).all()
    rewards = batch.rewards.view(6, 4)
    assert (rewards.amax(1) > rewards.amin(1)).all()
    # The first groups with signal, in the order in which they were sampled.
    sampled = [
        responses
        for scored in recorder.rounds
        for responses, values in zip(
            torch.tensor(range(len(scored))).view(6, 4).tolist(),
            scored.rewards.view(6, 4),
            strict=True,
        )
        if values.amax() > values.amin()
        for responses in [tuple(scored.responses[row] for row in responses)]
    ]
    trained = [batch.responses[row : row + 4] for row in range(0, 24, 4)]
    assert trained == sampled[:6]
    metrics = trainer.callback_metrics
    assert metrics["dynamic_sampling/rounds"] == len(recorder.rounds) > 1
    assert metrics["dynamic_sampling/sampled_groups"] == 6 * len(recorder.rounds)
    assert metrics["dynamic_sampling/signal_fraction"] == len(sampled) / (6 * len(recorder.rounds))
    assert metrics["dynamic_sampling/trained_groups"] == 6


def test_one_round_is_enough_where_every_group_has_signal(dapo, fit):
    """Then it is GRPO: the same rollouts of the same prompts."""
    recorder, plain = Recorder(), Recorder()
    fit(dapo(group_size=16), iterations=1, callbacks=[recorder])
    fit(dapo(group_size=16, max_rounds=1), iterations=1, callbacks=[plain])
    assert len(recorder.rounds) == 1
    assert recorder.scored[0].responses == plain.scored[0].responses
    assert torch.equal(recorder.experiences[0].advantages, plain.experiences[0].advantages)


def test_places_that_the_rounds_do_not_fill_count_in_no_denominator(dapo, fit):
    """The loss is the token mean over the groups with signal alone, though six are in the batch."""
    recorder = Recorder()
    module = dapo(reward=PythonFunction(after_a_five), max_rounds=1, max_grad_norm=None)
    trainer = fit(module, iterations=1, callbacks=[recorder])
    (batch,), (experience,), (update,) = recorder.scored, recorder.experiences, recorder.updates
    rewards = batch.rewards.view(6, 4)
    signal = (rewards.amax(1) > rewards.amin(1)).repeat_interleave(4)
    assert 0 < signal.sum() < 24
    assert torch.equal(experience.mask.any(1), signal)
    # At equal policies the loss of a token is minus its advantage.
    tokens = experience.mask.sum()
    torch.testing.assert_close(
        update.loss, -experience.advantages.sum() / tokens, rtol=0, atol=1e-6
    )
    assert trainer.callback_metrics["dynamic_sampling/trained_groups"] == signal.sum() / 4


@pytest.mark.parametrize("max_rounds", [1, 3])
def test_without_any_signal_rounds_end_and_the_optimizer_does_not_step(
    dapo, fit, weights, max_rounds
):
    """AdamW would move the weights by its decay, and later by its momentum alone."""
    recorder = Recorder()
    module = dapo(
        reward=PythonFunction(constant),
        max_rounds=max_rounds,
        optimizer=partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5),
    )
    module.configure_model()
    before = weights(module)
    trainer = fit(module, max_steps=-1, max_epochs=1, callbacks=[recorder])
    assert module.iteration == 4
    assert len(recorder.rounds) == 4 * max_rounds
    assert torch.equal(weights(module), before)
    assert trainer.global_step == 0
    assert trainer.callback_metrics["loss"] == 0
    assert trainer.callback_metrics["dynamic_sampling/trained_groups"] == 0


def test_every_sampled_rollout_is_in_the_metrics(dapo, fit):
    recorder = Recorder()
    module = dapo(reward=PythonFunction(after_a_five), max_rounds=3)
    trainer = fit(module, iterations=1, callbacks=[RewardMetrics(), Throughput(), recorder])
    rewards = torch.cat([scored.rewards for scored in recorder.rounds])
    tokens = sum(int(scored.mask.sum()) for scored in recorder.rounds)
    assert len(recorder.rounds) == 3
    metrics = trainer.callback_metrics
    torch.testing.assert_close(metrics["reward/mean"], rewards.mean())
    assert metrics["total/tokens"] == tokens
    rows = rewards.view(-1, 4)
    silent = (rows.amax(1) == rows.amin(1)).double().mean()
    torch.testing.assert_close(metrics["reward/zero_std_group_fraction"].double(), silent)


def test_resumed_run_is_the_uninterrupted_one(dapo, fit, weights, tmp_path):
    """Further prompts are drawn anew for each iteration, so a resumed run draws the same."""
    build = partial(dapo, reward=PythonFunction(after_a_five), max_rounds=3)
    whole, recorder = build(), Recorder()
    fit(whole, iterations=4, callbacks=[recorder])
    fit(build(), iterations=2).save_checkpoint(tmp_path / "two.ckpt")
    resumed, again = build(), Recorder()
    fit(resumed, iterations=4, ckpt_path=tmp_path / "two.ckpt", callbacks=[again])
    assert [s.responses for s in again.scored] == [s.responses for s in recorder.scored[2:]]
    assert torch.equal(weights(resumed), weights(whole))


def test_further_rounds_answer_other_prompts_with_other_responses(dapo, fit):
    recorder = Recorder()
    fit(dapo(reward=PythonFunction(constant), max_rounds=3), iterations=1, callbacks=[recorder])
    rounds = [(scored.prompts, scored.responses) for scored in recorder.rounds]
    assert len(set(rounds)) == 3
    assert all(len(set(prompts_of(scored))) == 6 for scored in recorder.rounds)


def test_truncated_responses_leave_their_group_and_the_loss(dapo, fit):
    """The advantages of a group are those of its finished responses alone."""
    recorder = Recorder()
    module = dapo(filter_truncated=True, max_rounds=1, group_size=8)
    fit(module, iterations=1, callbacks=[recorder])
    (batch,), (experience,) = recorder.scored, recorder.experiences
    assert 0 < batch.finished.sum() < len(batch)
    assert not experience.mask[~batch.finished].any()
    for group in range(6):
        rows = slice(8 * group, 8 * group + 8)
        finished, rewards = batch.finished[rows], batch.rewards[rows]
        if finished.sum() > 1 and rewards[finished].std() > 0:
            valid = rewards[finished]
            expected = (valid - valid.mean()) / (valid.std() + 1e-6)
            torch.testing.assert_close(
                experience.advantages[rows][finished][:, 0], expected, rtol=1e-5, atol=1e-5
            )


def test_the_soft_punishment_follows_the_length_limit(algorithm):
    module = algorithm(kind=DAPO, sampling=SamplingSettings(max_new_tokens=20))
    assert module.reward_shaping == (SoftOverlongPunishment(20, cache_tokens=4),)


@pytest.mark.parametrize("advantage", [NormalizedParts(), ProcessNormalized()])
def test_an_estimator_that_learns_where_whole_rewards_are_equal_is_refused(algorithm, advantage):
    """Its groups would be given up; and it is no matter of the shaping that DAPO has by itself."""
    with pytest.raises(ValueError, match=f"but {type(advantage).__name__} learns from their parts"):
        algorithm(kind=DAPO, advantage=advantage)


def test_no_round_at_all_is_refused(dapo):
    with pytest.raises(ValueError, match="max_rounds is 0, must be at least 1"):
        dapo(max_rounds=0)


def test_groups_of_a_round_stand_in_the_order_of_its_prompts():
    """Prompt i of a round lies on rank i % 2, as i // 2 there."""
    signal = torch.tensor([[True, False], [False, True]])
    assert gathered_groups(3, signal) == [
        Group(3, 0, 0, signal=True),
        Group(3, 1, 0, signal=False),
        Group(3, 0, 1, signal=False),
        Group(3, 1, 1, signal=True),
    ]


def test_groups_with_signal_are_chosen_first_and_in_order():
    groups = [Group(0, 0, place, signal=place in (1, 3, 4)) for place in range(5)]
    assert [group.place for group in choose_groups(groups, 2)] == [1, 3]
    assert [group.place for group in choose_groups(groups, 4)] == [1, 3, 4, 0]
