"""Faults that other software of this kind had: the smallest input of each, and the right value."""

import csv
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from datasets import Dataset
from lightning.pytorch.loggers import CSVLogger

from lit_rl.algorithms import GRPO, PPO
from lit_rl.callbacks import HealthMonitor, RatioMetrics, RewardMetrics, RLCallback
from lit_rl.functional import kl_k3
from lit_rl.generation import SamplingSettings
from lit_rl.models import PolicyBackbone, RandomCausalLM, SharedTrunk
from lit_rl.rewards import PythonFunction
from lit_rl.tasks import Task


def first_of_four(responses):
    """One winner in each group of four."""
    return [float(row % 4 == 0) for row in range(len(responses))]


def nothing(responses):
    return [0.0] * len(responses)


class Recorder(RLCallback):
    """Keeps what the hooks see."""

    def __init__(self):
        self.scored, self.experiences, self.updates = [], [], []

    def on_rollout(self, trainer, module, scored, experience):
        self.scored.append(scored)
        self.experiences.append(experience)

    def on_minibatch(self, trainer, module, update):
        self.updates.append(update)


@dataclass
class Given(Task):
    """Prompts as given, on both sides."""

    columns: dict = field(default_factory=dict)

    def train(self):
        return Dataset.from_dict(self.columns)

    held_out = train


# ----- advantages


def test_group_advantages_reach_the_loss_as_they_are(algorithm, fit):
    """Rewards 1, 0, 0, 0: mean 1/4, sample std 1/2, so 1.5 and -0.5; whitened once more, not."""
    recorder = Recorder()
    module = algorithm(reward=PythonFunction(first_of_four), num_minibatches=2)
    fit(module, iterations=1, callbacks=[recorder])
    winners, losers = 0, 0
    for update in recorder.updates:
        for part, _ in update.micro_batches:
            first = part.advantages[:, 0]
            assert torch.equal(part.advantages, first[:, None] * part.mask)
            winners += int(torch.isclose(first, torch.tensor(1.5), atol=1e-5).sum())
            losers += int(torch.isclose(first, torch.tensor(-0.5), atol=1e-5).sum())
    assert (winners, losers) == (6, 18)


@pytest.mark.parametrize("skip", [False, True])
def test_equal_rewards_change_nothing_and_are_reported(algorithm, fit, weights, skip):
    """Every advantage is 0, so is the gradient; skipped rows leave an update without rows."""
    module = algorithm(reward=PythonFunction(nothing), skip_zero_advantages=skip, num_minibatches=2)
    module.configure_model()
    before = weights(module)
    recorder = Recorder()
    with pytest.warns(UserWarning, match="for 2 iterations in a row all rewards within each group"):
        trainer = fit(
            module, callbacks=[recorder, RewardMetrics(), RatioMetrics(), HealthMonitor(patience=2)]
        )
    assert torch.equal(weights(module), before)
    assert [(float(u.loss), u.grad_norms["actor"]) for u in recorder.updates] == [(0.0, 0.0)] * 4
    assert trainer.callback_metrics["reward/zero_std_group_fraction"] == 1.0
    assert trainer.global_step == 4
    rows = sum(len(part) for update in recorder.updates for part, _ in update.micro_batches)
    assert rows == (0 if skip else 2 * 24)


# ----- KL to the reference


def test_kl_in_the_loss_moves_the_policy_to_the_reference_without_any_reward(
    algorithm, fit, weights
):
    """The rewards are equal: what gradient there is comes from the KL of the moved policy."""
    module = algorithm(
        reward=PythonFunction(nothing), kl_coef=1.0, optimizer=partial(torch.optim.SGD, lr=0.01)
    )
    module.configure_model()
    with torch.no_grad():
        for number, parameter in enumerate(module.policy.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    recorder = Recorder()
    fit(module, iterations=1, callbacks=[recorder])
    (update,), (experience,) = recorder.updates, recorder.experiences
    assert update.grad_norms["actor"] > 1e-3

    def distance(log_probs):
        return kl_k3(log_probs, experience.ref_log_probs)[experience.mask].mean()

    after = module.output_under(module.policy, experience).log_probs
    assert 0 < distance(after) < distance(experience.old_log_probs)
    # The value of the loss is the mean over sequences of the mean over tokens of that KL.
    per_token = kl_k3(experience.old_log_probs, experience.ref_log_probs) * experience.mask
    by_hand = (per_token.sum(1) / experience.mask.sum(1)).mean()
    torch.testing.assert_close(update.loss, by_hand, rtol=1e-4, atol=0)


def test_the_weight_of_the_kl_is_logged(algorithm, fit):
    trainer = fit(algorithm(kl_coef=0.25), iterations=1)
    assert trainer.callback_metrics["kl_coef"] == 0.25


def test_reference_and_policy_agree_at_the_start_at_any_temperature(algorithm, fit):
    """All log-probs are at the sampling temperature and have the shape of the mask."""
    recorder = Recorder()
    sampling = SamplingSettings(max_new_tokens=4, temperature=0.6)
    fit(algorithm(sampling=sampling, kl_coef=0.1), iterations=1, callbacks=[recorder])
    (experience,) = recorder.experiences
    mask = experience.mask
    assert len(set(mask.sum(1).tolist())) > 1  # of different lengths
    for name in ("ref_log_probs", "sampler_log_probs"):
        torch.testing.assert_close(
            getattr(experience, name) * mask, experience.old_log_probs, rtol=0, atol=1e-5
        )


# ----- responses


class EndsAtOnce(RandomCausalLM):
    """Says the end token after anything: all embeddings are equal, and no layer adds to them."""

    def load_model(self, config):
        model = super().load_model(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.fill_(1.0 if "norm" in name or "embed" in name else 0.0)
            model.lm_head.weight[config.eos_token_id] = 10.0
        return model


def test_an_end_token_at_once_is_a_text_to_reward_and_a_token_to_train(algorithm, fit, source):
    seen = []

    def reward(responses):
        seen.extend(responses)
        return first_of_four(responses)

    recorder = Recorder()
    ends_at_once = EndsAtOnce(alphabet="0123456789>", config=source().config)
    module = algorithm(source=ends_at_once, reward=PythonFunction(reward))
    trainer = fit(module, iterations=2, callbacks=[recorder])
    assert trainer.global_step == 2
    assert seen == [""] * 48
    for experience in recorder.experiences:
        assert experience.mask.tolist() == [[True]] * 24
        assert experience.response_ids.unique().tolist() == [2]  # the end token
        assert experience.advantages.ne(0).all()


def test_a_warning_says_that_every_response_is_cut_off(algorithm, fit):
    sampling = SamplingSettings(max_new_tokens=3, min_new_tokens=3)
    # Two iterations are the start of the run themselves, above which no reward has risen.
    callbacks = [RewardMetrics(), RatioMetrics(), HealthMonitor(patience=2)]
    with pytest.warns(UserWarning, match="a share of 1 of the responses is cut off at the limit"):
        trainer = fit(algorithm(sampling=sampling), callbacks=callbacks)
    assert trainer.callback_metrics["response/truncated_fraction"] == 1.0


def test_columns_reach_the_reward_once_per_response(algorithm, fit, data):
    """Each of four responses to a prompt comes with the columns of its prompt."""
    prompts = [f"{number:02d}>" for number in range(24)]
    levels = [number / 7 for number in range(24)]
    calls = []

    def reward(prompts, responses, answers, level):
        calls.append(len(responses))
        assert len(prompts) == len(answers) == len(level) == len(responses)
        for prompt, answer, own_level in zip(prompts, answers, level, strict=True):
            number = int(prompt.removesuffix(">"))
            assert answer == str(number)
            assert own_level == number / 7
        assert all(len(set(level[start : start + 4])) == 1 for start in range(0, len(level), 4))
        return first_of_four(responses)

    answers = [str(number) for number in range(24)]
    task = Given({"prompt": prompts, "answer": answers, "level": levels})
    fit(algorithm(reward=PythonFunction(reward)), iterations=2, datamodule=data(task=task))
    assert calls == [24, 24]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.filterwarnings("ignore:weights in bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rewards_keep_their_precision_whatever_the_model_computes_in(
    algorithm, fit, data, source, dtype, precision
):
    """1234.5678 is 1234.567749 in float32, and 1232 in bfloat16."""
    columns = {"prompt": ["1>"] * 6, "answer": ["1"] * 6, "level": [1234.5678] * 6}
    recorder = Recorder()
    module = algorithm(source=source(dtype=dtype), reward=PythonFunction(lambda level: level))
    fit(
        module,
        iterations=1,
        datamodule=data(task=Given(columns)),
        callbacks=[recorder],
        precision=precision,
    )
    assert recorder.scored[0].columns["level"] == (1234.5678,) * 24
    expected = torch.tensor(1234.5678, dtype=torch.float32)
    assert torch.equal(recorder.scored[0].rewards, expected.expand(24))


# ----- the loop


def test_one_prompt_per_iteration_is_enough(algorithm, fit, data):
    trainer = fit(algorithm(group_size=8), iterations=3, datamodule=data(batch_size=1))
    assert trainer.global_step == 3


def test_held_out_prompts_are_measured_at_the_iterations_asked_for(algorithm, fit, tmp_path):
    """Ten iterations, measured every five: after 5 and after 10, the last one included."""
    settings = {
        "limit_val_batches": 1.0,
        "val_check_interval": 5,
        "check_val_every_n_epoch": None,
        "log_every_n_steps": 1,
    }
    logger = CSVLogger(tmp_path, name="", version="")
    fit(algorithm(num_minibatches=2), iterations=10, logger=logger, **settings)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["val/greedy_accuracy"]] == ["5", "10"]
    assert [row["step"] for row in rows if row["loss"]] == [str(n) for n in range(1, 11)]


class PartlyFrozen(RandomCausalLM):
    """Embeddings and the lower of two layers are not trained."""

    def load_model(self, config):
        model = super().load_model(config)
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        return model


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (GRPO, {"kl_coef": 0.1}),
        (PPO, {"critic": PolicyBackbone()}),
        (PPO, {"critic": SharedTrunk()}),
    ],
    ids=["without critic", "own critic", "shared critic"],
)
def test_checkpointing_above_frozen_layers_trains_what_is_not_frozen(
    algorithm, fit, source, kind, settings
):
    """Recomputed or kept, all weights that are not frozen get the same gradient, and only they."""
    partly_frozen = PartlyFrozen(
        alphabet="0123456789>", config={**source().config, "num_hidden_layers": 2}
    )
    results = []
    for checkpointing in (False, True):
        module = algorithm(
            kind=kind,
            source=partly_frozen,
            reward=PythonFunction(first_of_four),
            gradient_checkpointing=checkpointing,
            update_epochs=2,
            **settings,
        )
        fit(module, iterations=2)
        results.append(dict(module.named_parameters()))
    plain, checkpointed = results
    torch.testing.assert_close(checkpointed, plain, rtol=0, atol=1e-6)
    frozen, initial = 0, dict(partly_frozen.model(module.seed).named_parameters())
    for name, before in initial.items():
        after = checkpointed[f"policy.model.{name}"]
        frozen += not before.requires_grad
        assert after.requires_grad == before.requires_grad
        assert torch.equal(after, before) != before.requires_grad, name
    assert frozen == 10  # the embeddings and nine tensors of a layer


@pytest.mark.filterwarnings("ignore:weights in bfloat16")
def test_small_updates_reach_float32_weights_and_vanish_in_bfloat16(
    algorithm, fit, source, weights
):
    """Ten AdamW steps of 1e-6 on weights near 0.2, whose neighbours are 1.5e-8 or 1e-3 apart."""
    moved = {}
    for dtype in ("float32", "bfloat16"):
        module = algorithm(
            source=source(dtype=dtype),
            reward=PythonFunction(first_of_four),
            optimizer=partial(torch.optim.AdamW, lr=1e-6, weight_decay=0.0),
        )
        module.configure_model()
        before = weights(module)
        fit(module, iterations=10)
        moved[dtype] = (weights(module) != before).float().mean()
    assert moved["float32"] > 0.9
    assert moved["bfloat16"] < 0.1
