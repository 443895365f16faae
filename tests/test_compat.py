"""The presets in configs/compat give the numbers of the library that they are named after.

`golden/trl-1.16.0.json` was computed by calling `_compute_loss` of TRL's trainers with the defaults
of their configs; `golden/verl-0.9.1.json` is that of `test_golden`.
"""

import json
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml

from lit_rl.advantages import GAE, GroupNormalized
from lit_rl.aggregations import FixedLength, SequenceMean, TokenMean, Totals
from lit_rl.algorithms import CurrentLogProbs, RecomputedLogProbs
from lit_rl.cli import RLCLI
from lit_rl.generation import SamplingSettings
from lit_rl.kl_penalties import KLInLoss, KLInReward
from lit_rl.policy_losses import (
    ClippedSurrogate,
    ClippedWeight,
    GeometricMeanClipped,
    SequenceClipped,
    SoftGate,
)
from lit_rl.types import (
    CriticExperience,
    Experience,
    PolicyOutput,
    ScoredRollout,
    ValuedRollout,
    at_last_token,
)
from lit_rl.value_losses import ClippedSquaredError

CONFIGS = Path(__file__).parent.parent / "configs"
GOLDEN = Path(__file__).parent / "golden"
VERL = json.loads((GOLDEN / "verl-0.9.1.json").read_text())["cases"]
TRL = json.loads((GOLDEN / "trl-1.16.0.json").read_text())["cases"]


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    """The algorithm that a preset makes of another configuration, not trained."""

    @cache
    def build(name, algorithm="grpo"):
        files = [CONFIGS / "algorithm" / f"{algorithm}.yaml", CONFIGS / "compat" / f"{name}.yaml"]
        stack = [text for file in files for text in ("--config", str(file))]
        return RLCLI(CONFIGS / "base.yaml", ["fit", *stack]).model

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("compat"))
        patch.setattr(RLCLI, "_run_subcommand", lambda cli, subcommand: None)
        yield build


# Where a value stands, in the packages of the two libraries:
# verl/trainer/config/ppo_trainer.yaml, actor/actor.yaml, actor/dp_actor.yaml,
# critic/critic.yaml, rollout/rollout.yaml and verl/trainer/ppo/core_algos.py;
# trl/trainer/grpo_config.py and grpo_trainer.py.
VERL_SETTINGS = {
    "policy_loss": ClippedSurrogate(clip_low=0.2, clip_high=0.2, dual_clip=3.0),
    "aggregation": TokenMean(),  # actor.loss_agg_mode token-mean
    "kl_coef": 0.0,  # actor.use_kl_loss, algorithm.use_kl_in_reward: False
    "entropy_coef": 0.0,  # actor.entropy_coeff
    "old_log_probs": RecomputedLogProbs(),  # algorithm.rollout_correction.bypass_mode False
    "update_epochs": 1,  # actor.ppo_epochs
    "num_minibatches": 4,  # data.train_batch_size 1024 / actor.ppo_mini_batch_size 256
    "max_grad_norm": 1.0,  # actor.grad_clip
    "filter_truncated": False,
    "sampler_correction": None,  # algorithm.rollout_correction.rollout_is null
    "reward_shaping": (),
    "top_entropy_fraction": 1.0,
}
SETTINGS = {
    ("verl", "grpo"): {
        **VERL_SETTINGS,
        "advantage": GroupNormalized(epsilon=1e-6),  # compute_grpo_outcome_advantage
        "kl": KLInLoss(estimator="k3"),  # actor.kl_loss_type low_var_kl
    },
    ("verl_ppo", "ppo"): {
        **VERL_SETTINGS,
        "advantage": GAE(gamma=1.0, lam=1.0),  # algorithm.gamma, algorithm.lam
        "value_loss": ClippedSquaredError(clip=0.5),  # critic.cliprange_value
        "value_coef": 1.0,
        "critic_warmup": 0,  # trainer.critic_warmup
        "kl": KLInReward(estimator="k1"),  # algorithm.kl_penalty kl
        "group_size": 1,  # rollout.n
    },
    ("trl", "grpo"): {
        "advantage": GroupNormalized(epsilon=1e-4),  # scale_rewards group
        "policy_loss": ClippedSurrogate(clip_low=0.2, clip_high=0.2),  # epsilon; delta None
        "aggregation": TokenMean(),  # loss_type dapo
        "kl": KLInLoss(estimator="k3", unbiased_gradient=True),  # use_bias_correction_kl True
        "kl_coef": 0.0,  # beta
        "entropy_coef": 0.0,
        "group_size": 8,  # num_generations
        "old_log_probs": CurrentLogProbs(),  # _generate_and_score_completions, without vLLM
        "update_epochs": 1,  # num_iterations
        "num_minibatches": 1,  # steps_per_generation None: gradient_accumulation_steps
        "max_grad_norm": 1.0,  # of transformers.TrainingArguments
        "filter_truncated": False,  # mask_truncated_completions
        "sampler_correction": None,  # without vLLM
        "reward_shaping": (),
        "top_entropy_fraction": 1.0,  # top_entropy_quantile
    },
}


@pytest.mark.parametrize(("name", "algorithm"), SETTINGS)
def test_settings_are_those_of_the_library(name, algorithm, preset):
    module = preset(name, algorithm)
    expected = SETTINGS[name, algorithm]
    assert {setting: getattr(module, setting) for setting in expected} == expected
    # Both sample from the whole distribution: temperature 1.0, no top-k, top-p 1.0.
    assert module.sampling == SamplingSettings(max_new_tokens=4, stop_strings=[])


@pytest.mark.parametrize(("name", "algorithm"), SETTINGS)
def test_every_setting_of_the_file_is_compared(name, algorithm, preset):
    """What stands in a preset and in no list above would be a value without a source."""
    settings = yaml.safe_load((CONFIGS / "compat" / f"{name}.yaml").read_text())
    named = set(settings["model"]["init_args"]) - {"sampling"}
    assert named <= set(SETTINGS[name, algorithm])


def float64(values):
    return None if values is None else torch.tensor(values, dtype=torch.float64)


def experience_of(inputs):
    """The inputs of a case of a policy loss as an experience; an advantage may be a response's."""
    mask = torch.tensor(inputs["mask"]).bool()
    advantages = float64(inputs["advantages"])
    if advantages.ndim == 1:
        advantages = advantages[:, None]
    return Experience(
        prompt_ids=torch.ones(len(mask), 1, dtype=torch.long),
        prompt_mask=torch.ones(len(mask), 1, dtype=torch.bool),
        response_ids=torch.zeros(mask.shape, dtype=torch.long),
        mask=mask,
        sampler_log_probs=torch.zeros(mask.shape, dtype=torch.float64),
        advantages=torch.where(mask, advantages, 0.0),
        old_log_probs=float64(inputs["old_logprobs"]),
        ref_log_probs=float64(inputs.get("ref_logprobs")),
    )


def assert_loss(loss_of, case):
    """Compare value and gradient of `loss_of(log_probs, experience, totals)` with a case."""
    experience = experience_of(case["inputs"])
    log_probs = float64(case["inputs"]["logprobs"]).requires_grad_()
    loss = loss_of(log_probs, experience, Totals.of(experience.mask))
    loss.backward()
    exact = {"rtol": 0, "atol": 1e-7}
    torch.testing.assert_close(loss.detach(), float64(case["outputs"]["loss"]), **exact)
    gradient = float64(case["outputs"]["grad_logprobs"])
    torch.testing.assert_close(log_probs.grad, gradient, **exact)


def whole_loss(module):
    """The loss of the loop, the KL and the entropy bonus included."""

    def loss_of(log_probs, experience, totals):
        output = PolicyOutput(log_probs=log_probs, entropy=torch.ones_like(log_probs))
        return module.loss(output, experience, totals)

    return loss_of


def trl_case(**params):
    """The case of these parameters, with several updates per rollout where there are both."""
    return [case for case in TRL if case["params"] == params][-1]


ONE_UPDATE = [case for case in TRL if case["inputs"]["old_logprobs"] is None]


def scored_rollout(rewards, mask, group_size):
    rows = len(mask)
    return ScoredRollout(
        prompt_ids=torch.ones(rows, 1, dtype=torch.long),
        prompt_mask=torch.ones(rows, 1, dtype=torch.bool),
        response_ids=torch.zeros(mask.shape, dtype=torch.long),
        mask=mask,
        sampler_log_probs=torch.zeros(mask.shape, dtype=torch.float64),
        finished=torch.ones(rows, dtype=torch.bool),
        prompts=("",) * rows,
        responses=("",) * rows,
        answers=("",) * rows,
        columns={},
        group_size=group_size,
        rewards=rewards,
        token_rewards=at_last_token(rewards, mask),
        step_rewards=torch.full(mask.shape, torch.nan, dtype=torch.float64),
        reward_parts={},
        missing=torch.zeros(rows, dtype=torch.bool),
    )


def test_verl_gives_the_loss_of_verl(preset):
    """Golden: the token mean of the clipped surrogate."""
    defaults = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "aggregation": "token-mean"}
    (case,) = [c for c in VERL if c["kind"] == "policy_loss/vanilla" and c["params"] == defaults]
    assert_loss(whole_loss(preset("verl")), case)


def test_verl_clips_large_ratios_of_bad_tokens(preset):
    """By hand: A = -1: ratio 4 has loss 3 and no gradient, ratio 2 has loss 2 and gradient 2."""
    ratios, advantages = torch.tensor([[4.0, 2.0]]).double(), [[-1.0, -1.0]]
    experience = experience_of(
        {"mask": [[1, 1]], "advantages": advantages, "old_logprobs": [[0.0, 0.0]]}
    )
    log_probs = ratios.log().requires_grad_()
    loss = whole_loss(preset("verl"))(log_probs, experience, Totals.of(experience.mask))
    loss.backward()
    torch.testing.assert_close(loss.detach(), float64((3 + 2) / 2))
    torch.testing.assert_close(log_probs.grad, float64([[0.0, 2 / 2]]))


def test_verl_gives_the_advantages_of_verl(preset):
    """Golden: group std with ddof 1 and epsilon 1e-6 added to it."""
    module = preset("verl")
    defaults = {"scale_by_std": True, "ddof": 1, "eps": 1e-6}
    cases = [c for c in VERL if c["kind"] == "grpo" and c["params"] == defaults]
    assert cases
    for case in cases:
        rows = torch.tensor(case["inputs"]["group"]).argsort(stable=True)
        group_size = len(rows) // len(set(case["inputs"]["group"]))
        mask = torch.tensor(case["inputs"]["mask"]).bool()[rows]
        scored = scored_rollout(float64(case["inputs"]["scores"])[rows], mask, group_size)
        expected = float64(case["outputs"]["advantages"])[rows]
        torch.testing.assert_close(module.advantage(scored), expected, rtol=0, atol=1e-7)


def test_verl_ppo_gives_the_advantages_and_returns_of_verl(preset):
    """Golden: gamma and lambda 1, whitened over the tokens."""
    module = preset("verl_ppo", "ppo")
    (case,) = [
        c
        for c in VERL
        if c["kind"] == "gae" and (c["params"]["gamma"], c["params"]["lam"]) == (1, 1)
    ]
    inputs, outputs = case["inputs"], case["outputs"]
    mask = torch.tensor(inputs["mask"]).bool()
    rewards = torch.where(mask, float64(inputs["rewards"]), 0.0)
    rollout = scored_rollout(rewards.sum(1), mask, group_size=1)
    valued = rollout.extended(
        ValuedRollout, values=float64(inputs["values"]), end_values=torch.zeros(len(mask)).double()
    )
    valued = replace(valued, token_rewards=rewards)
    for actual, name in (
        (module.advantage(valued), "whitened_advantages"),
        (module.advantage.returns(valued), "returns"),
    ):
        expected = float64(outputs[name])
        torch.testing.assert_close(actual[mask], expected[mask], rtol=0, atol=1e-7)


def test_verl_ppo_gives_the_value_loss_of_verl(preset):
    """Golden: clip 0.5, half the squared error, token mean."""
    module = preset("verl_ppo", "ppo")
    defaults = {"clip": 0.5, "aggregation": "token-mean", "factor": 0.5}
    (case,) = [c for c in VERL if c["kind"] == "value_loss" and c["params"] == defaults]
    inputs = {name: float64(values) for name, values in case["inputs"].items()}
    mask, zeros = inputs["mask"].bool(), torch.zeros_like(inputs["values"])
    experience = experience_of(
        {"mask": case["inputs"]["mask"], "advantages": zeros.tolist(), "old_logprobs": None}
    ).extended(CriticExperience, old_values=inputs["old_values"], returns=inputs["returns"])
    loss = module.aggregation(
        module.value_loss(inputs["values"], experience), mask, Totals.of(mask)
    )
    expected = float64(case["outputs"]["loss"])
    torch.testing.assert_close(module.value_coef * loss, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("case", [c for c in ONE_UPDATE if "loss_type" not in c["params"]])
def test_trl_gives_the_loss_of_trl(case, preset):
    """Golden: one update per rollout, without and with a KL, which TRL multiplies by the ratio."""
    module = copy(preset("trl"))
    module.kl_coef = case["params"].get("beta", module.kl_coef)
    assert_loss(whole_loss(module), case)


@pytest.mark.parametrize("params", [{}, {"delta": 1.5}])
def test_trl_gives_the_clipped_loss_of_trl(params, preset):
    """Golden: the ratios of the old policy are out of bounds; delta is our dual clip."""
    module = copy(preset("trl"))
    module.policy_loss = replace(module.policy_loss, dual_clip=params.get("delta"))
    assert_loss(whole_loss(module), trl_case(**params))


def test_trl_gives_the_advantages_of_trl(preset):
    """By hand: of 1, 0, 0, 0 the mean is 1/4 and the std (ddof 1) 1/2; TRL adds 1e-4 to it."""
    scored = scored_rollout(float64([1.0, 0.0, 0.0, 0.0]), torch.ones(4, 1).bool(), group_size=4)
    expected = float64([[0.75 / 0.5001]] + 3 * [[-0.25 / 0.5001]])
    torch.testing.assert_close(preset("trl").advantage(scored), expected, rtol=0, atol=1e-12)


# What the settings of TRL's other losses are here, which docs/algorithms.md says.
@pytest.mark.parametrize(
    ("policy_loss", "aggregation", "params"),
    [
        (ClippedSurrogate(), SequenceMean(), {"loss_type": "grpo"}),
        (
            ClippedSurrogate(),
            FixedLength(length=16),
            {"loss_type": "dr_grpo", "max_completion_length": 16},
        ),
        # epsilon_high is the largest weight itself, 1 + clip_high here; nothing bounds it below.
        (ClippedWeight(clip_high=0.3), TokenMean(), {"loss_type": "cispo", "epsilon_high": 1.3}),
        (SoftGate(), SequenceMean(), {"loss_type": "sapo"}),
        (
            SequenceClipped(clip_low=0.1, clip_high=0.2),
            SequenceMean(),
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon": 0.1,
                "epsilon_high": 0.2,
            },
        ),
        (GeometricMeanClipped(), SequenceMean(), {"epsilon": 0.4}),
    ],
)
def test_other_losses_of_trl_are_ours(policy_loss, aggregation, params):
    def loss_of(log_probs, experience, totals):
        return aggregation(policy_loss(log_probs, experience), experience.mask, totals)

    assert_loss(loss_of, trl_case(**params))


def test_cispo_of_trl_by_default_is_a_fifth_of_the_plain_gradient():
    """Golden: epsilon_high is epsilon 0.2 there, and the largest weight, so every weight is 0.2."""
    case = trl_case(loss_type="cispo")
    mask, advantages = torch.tensor(case["inputs"]["mask"]), float64(case["inputs"]["advantages"])
    expected = -0.2 * advantages[:, None] * mask / mask.sum()
    gradient = float64(case["outputs"]["grad_logprobs"])
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
