"""Each combination that is as a rule not meant gives a sentence, and its neighbour none."""

from pathlib import Path

import pytest
import torch

from lit_rl.advantages import BatchMean, ReturnToGo
from lit_rl.aggregations import FixedLength, SequenceMean, TokenMean
from lit_rl.algorithms import GRPO, GSPO, PPO, TRPO, PenalizedTRPO, RLModule, SamplerLogProbs
from lit_rl.callbacks import AdaptiveKL, FixedKL, LinearKL, StopOnKL
from lit_rl.callbacks.suspicious_settings import suspicious_settings
from lit_rl.cli import RLCLI
from lit_rl.generation import SamplingSettings
from lit_rl.kl_penalties import KLInReward
from lit_rl.models import RandomCausalLM
from lit_rl.policy_losses import (
    ClippedSurrogate,
    GeometricMeanClipped,
    OffPolicySequenceMask,
    Surrogate,
)
from lit_rl.rewards import ExactAnswer

CONFIGS = Path(__file__).parents[2] / "configs"
ALGORITHMS = sorted(file.name for file in (CONFIGS / "algorithm").glob("*.yaml"))


@pytest.fixture
def suspicious(trainer, monkeypatch):
    """Return the sentences for two updates per rollout in a run of 100 iterations."""
    monkeypatch.setattr(RLModule, "num_iterations", 100)

    def of(kind=GRPO, *callbacks, rates=(), **settings):
        module = kind(
            source=RandomCausalLM(alphabet="01", config={"model_type": "llama"}),
            reward=ExactAnswer(),
            **{"update_epochs": 2, "kl_coef": 0.0, "group_size": 4, **settings},
        )
        trainer.callbacks = list(callbacks)
        module.trainer = trainer
        groups = [
            {"params": [torch.zeros(1, requires_grad=True)], "name": name, "lr": rate}
            for name, rate in rates
        ]
        trainer.strategy.optimizers = [torch.optim.SGD(groups)] if groups else []
        return suspicious_settings(trainer, module)

    return of


def only(sentences):
    (sentence,) = sentences
    assert ". " not in sentence
    return sentence


@pytest.mark.parametrize("kind", [GRPO, GSPO, PPO, TRPO, PenalizedTRPO])
def test_nothing_is_said_of_what_is_usual(suspicious, kind):
    assert suspicious(kind) == []
    # Three decimals of KL per token and a learning rate are usual, too.
    assert suspicious(kind, rates=[("actor", 1e-6), ("critic", 1e-5)]) == []


def test_dual_clip_without_negative_advantages(suspicious):
    dual = ClippedSurrogate(dual_clip=3.0)
    returns = ReturnToGo()
    sentence = only(suspicious(advantage=returns, policy_loss=dual))
    assert sentence.startswith("dual_clip 3.0 acts on negative advantages alone")
    assert suspicious(advantage=ReturnToGo(baseline=BatchMean()), policy_loss=dual) == []
    assert suspicious(advantage=returns) == []
    assert suspicious(policy_loss=dual) == []


def test_a_reference_whose_kl_weighs_nothing(suspicious):
    sentence = only(suspicious(GRPO, FixedKL(0.0)))
    assert sentence.startswith("FixedKL loads the reference")
    assert suspicious(GRPO, FixedKL(0.01)) == []
    # It may rise from 0.
    assert suspicious(GRPO, LinearKL(0.0, 0.1, 10)) == []


def test_a_kl_in_the_reward_that_hardly_pulls(suspicious):
    settings = {"kl_coef": 0.05, "kl": KLInReward("k3")}
    assert only(suspicious(PPO, **settings)).startswith("the KL in the reward is estimated by k3")
    assert suspicious(PPO, kl_coef=0.0, kl=KLInReward("k3")) == []
    assert suspicious(PPO, kl_coef=0.05) == []


def test_sequence_ratios_with_a_token_mean(suspicious):
    sentence = only(suspicious(GSPO, aggregation=TokenMean()))
    assert sentence.startswith("SequenceClipped has one ratio for a whole response, but TokenMean")
    masked = OffPolicySequenceMask(GeometricMeanClipped(), max_kl=0.1)
    assert only(suspicious(policy_loss=masked, aggregation=TokenMean())).startswith("GeometricMean")
    assert suspicious(GSPO, aggregation=SequenceMean()) == []
    assert suspicious(GSPO, aggregation=FixedLength(8)) == []
    assert suspicious(GRPO, aggregation=TokenMean()) == []


def test_a_clip_that_never_acts(suspicious):
    sentence = only(suspicious(update_epochs=1))
    assert "every ratio is 1, so that the clip of ClippedSurrogate never acts" in sentence
    # The sampler's log-probs may differ, and a second minibatch sees another policy.
    assert suspicious(update_epochs=1, old_log_probs=SamplerLogProbs()) == []
    assert suspicious(update_epochs=1, num_minibatches=2) == []
    assert suspicious(update_epochs=1, policy_loss=Surrogate()) == []


def test_ratios_without_bound(suspicious):
    sentence = only(suspicious(policy_loss=Surrogate()))
    assert sentence.startswith("Surrogate takes 2 updates per rollout without a clip")
    assert suspicious(GRPO, StopOnKL(0.02), policy_loss=Surrogate()) == []


def test_a_target_per_token_that_looks_like_one_per_response(suspicious):
    sampling = SamplingSettings(max_new_tokens=100)

    def adaptive(target, unit):
        return AdaptiveKL(0.1, target=target, unit=unit, horizon=10_000)

    sentence = only(suspicious(GRPO, adaptive(6.0, "nats_per_token"), sampling=sampling))
    assert "target of AdaptiveKL is 6 nats per token, 600 in a response of 100 tokens" in sentence
    assert suspicious(GRPO, adaptive(0.05, "nats_per_token")) == []
    assert "limit of StopOnKL is 2 nats" in only(suspicious(GRPO, StopOnKL(2.0)))
    assert suspicious(GRPO, StopOnKL(0.02)) == []
    assert "max_kl is 1 nats" in only(suspicious(TRPO, max_kl=1.0))
    assert "target_kl is 3 nats" in only(suspicious(PenalizedTRPO, target_kl=3.0))


def test_a_target_per_response_that_looks_like_one_per_token(suspicious):
    def adaptive(target):
        return AdaptiveKL(0.1, target=target, unit="nats_per_response", horizon=10_000)

    sentence = only(suspicious(GRPO, adaptive(0.05)))
    assert "is 0.05 nats per response, of up to 128 tokens" in sentence
    assert suspicious(GRPO, adaptive(6.0)) == []


def test_a_learning_rate_of_zero(suspicious):
    sentence = only(suspicious(PPO, rates=[("actor", 1e-6), ("critic", 0.0)]))
    assert sentence.startswith("the learning rate of the critic is 0")


def test_a_warm_up_that_the_run_does_not_outlast(suspicious):
    # 100 iterations of two updates.
    sentence = only(suspicious(warmup_steps=200))
    assert sentence.startswith("warmup_steps 200 is not less than the 200 optimizer steps")
    assert suspicious(warmup_steps=199) == []
    assert only(suspicious(PPO, critic_warmup=100)).startswith("critic_warmup 100 is not less")
    assert suspicious(PPO, critic_warmup=99) == []


def test_filters_of_the_sampler(suspicious):
    sampling = SamplingSettings(temperature=0.7, top_p=0.9, top_k=50)
    sentence = only(suspicious(sampling=sampling))
    assert sentence.startswith("responses are drawn with top_k 50 and top_p 0.9 at temperature 0.7")
    # The temperature alone is that of the log-probs of the update, too.
    assert suspicious(sampling=SamplingSettings(temperature=0.7)) == []
    assert only(suspicious(sampling=SamplingSettings(greedy=True))).startswith("sampling is greedy")


@pytest.fixture
def sentences_of(tmp_path, monkeypatch):
    """Return what is said of configurations upon the base, without a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RLCLI, "_run_subcommand", lambda cli, subcommand: None)
    monkeypatch.setattr(RLModule, "num_iterations", 100)

    def of(*files):
        stack = [text for file in files for text in ("--config", str(CONFIGS / file))]
        cli = RLCLI(CONFIGS / "base.yaml", ["fit", *stack])
        cli.trainer.strategy.optimizers = [
            cli.model.optimizer([{"params": [torch.zeros(1)], "name": "actor"}])
        ]
        cli.model.trainer = cli.trainer
        return suspicious_settings(cli.trainer, cli.model)

    return of


@pytest.mark.parametrize("file", ALGORITHMS)
def test_nothing_is_said_of_the_configurations_of_algorithms(sentences_of, file):
    assert sentences_of(f"algorithm/{file}") == []


@pytest.mark.parametrize(
    ("algorithm", "file", "says_so"),
    [
        ("grpo", "compat/verl.yaml", False),
        ("ppo", "compat/verl_ppo.yaml", False),
        ("ppo", "update/smollm2_ppo.yaml", False),
        # One update per rollout leaves the clip of GRPO nothing to do, as the files are meant to.
        ("grpo", "compat/trl.yaml", True),
        ("grpo", "update/single.yaml", True),
    ],
)
def test_one_update_per_rollout_is_what_is_said_of_others(sentences_of, algorithm, file, says_so):
    sentences = sentences_of(f"algorithm/{algorithm}.yaml", file)
    assert [s[:31] for s in sentences] == ["with one update per rollout eve"] * says_so


def test_a_filter_on_top_of_a_configuration_is_said(sentences_of, tmp_path):
    file = tmp_path / "filter.yaml"
    file.write_text(
        "model: {init_args: {sampling: {top_p: 0.9}, optimizer: {init_args: {lr: 0.0}}}}"
    )
    rate, filters = sentences_of("algorithm/grpo.yaml", file)
    assert rate.startswith("the learning rate of the actor is 0")
    assert filters.startswith("responses are drawn with top_p 0.9,")
