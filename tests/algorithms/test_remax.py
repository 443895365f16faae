"""The greedy response sets the baseline, and is not trained on."""

import pytest
import torch

from lit_rl.advantages import GreedyBaseline
from lit_rl.algorithms import GRPO, ReMax
from lit_rl.callbacks import RLCallback
from lit_rl.reward_shaping import ScaleReward
from lit_rl.rewards import PythonFunction


class Recorder(RLCallback):
    def __init__(self):
        self.scored, self.experiences = [], []

    def on_rollout(self, trainer, module, scored, experience):
        self.scored.append(scored)
        self.experiences.append(experience)


def length(responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


def test_the_advantage_is_the_reward_less_that_of_the_greedy_response(algorithm, fit):
    recorder, asked = Recorder(), []

    def reward(responses):
        asked.append(responses)
        return length(responses)

    module = algorithm(kind=ReMax, reward=PythonFunction(reward), group_size=2)
    fit(module, iterations=1, callbacks=[recorder])
    (scored,), (experience,) = recorder.scored, recorder.experiences
    sampled, greedy = asked
    assert (len(sampled), len(greedy)) == (12, 6)
    baseline = torch.tensor(length(greedy)).repeat_interleave(2)
    assert torch.equal(scored.baseline_rewards, baseline)
    expected = (torch.tensor(length(sampled)) - baseline)[:, None] * experience.mask
    torch.testing.assert_close(experience.advantages, expected)
    assert expected.ne(0).any()


def test_the_baseline_is_shaped_as_the_rewards_are(algorithm, fit):
    """Every response earns 3: none is better than the greedy one, in whichever unit."""
    recorder = Recorder()
    reward = PythonFunction(lambda responses: [3.0] * len(responses))
    module = algorithm(kind=ReMax, reward=reward, reward_shaping=[ScaleReward(0.1)])
    fit(module, iterations=1, callbacks=[recorder])
    torch.testing.assert_close(recorder.scored[0].baseline_rewards, torch.full((24,), 0.3))
    assert not recorder.experiences[0].advantages.any()


def test_a_prompt_whose_baseline_is_missing_is_left_out(algorithm, fit):
    """The reward applies to no greedy response of a prompt with an odd number."""
    recorder, calls = Recorder(), []

    def reward(prompts, responses):
        calls.append(None)
        if len(calls) == 1:
            return length(responses)
        return [
            None if int(prompt[:-1]) % 2 else value
            for prompt, value in zip(prompts, length(responses), strict=True)
        ]

    fit(
        algorithm(kind=ReMax, reward=PythonFunction(reward), group_size=2),
        iterations=1,
        callbacks=[recorder],
    )
    (scored,), (experience,) = recorder.scored, recorder.experiences
    odd = torch.tensor([bool(int(prompt[:-1]) % 2) for prompt in scored.prompts])
    assert 0 < odd.sum() < 12
    assert torch.equal(scored.missing, odd)
    assert torch.equal(experience.mask.any(1), ~odd)


def test_an_iteration_without_any_baseline_is_skipped_and_counted(algorithm, fit, weights):
    """The reward is asked twice an iteration: the fourth time about the second greedy responses."""
    calls, seen = [], []

    def reward(responses):
        calls.append(None)
        return [None] * len(responses) if len(calls) == 4 else length(responses)

    class Weights(RLCallback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(weights(pl_module).clone())

    module = algorithm(kind=ReMax, reward=PythonFunction(reward), group_size=2)
    with pytest.warns(UserWarning, match="in iteration 2 the reward"):
        fit(module, iterations=3, callbacks=[Weights()])
    assert module.skipped_iterations == 1
    assert torch.equal(seen[1], seen[0])
    assert not torch.equal(seen[2], seen[1])


def test_the_estimator_is_refused_by_an_algorithm_without_a_baseline_response(algorithm):
    with pytest.raises(ValueError, match="GreedyBaseline reads a BaselinedRollout"):
        algorithm(kind=GRPO, advantage=GreedyBaseline())
