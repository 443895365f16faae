"""Rollouts with numbers chosen by hand, and a module that runs the hooks without a model."""

from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from lit_rl.algorithms.hooks import call_hooks
from lit_rl.policy_losses import ClippedSurrogate
from lit_rl.strategies import Parallelism
from lit_rl.types import (
    ActorCriticOutput,
    CriticExperience,
    Experience,
    PolicyOutput,
    ScoredRollout,
    Update,
    at_last_token,
)
from lit_rl.value_losses import ClippedSquaredError

NAN = float("nan")


def make_scored(rewards, lengths=None, group_size=2, missing=(), parts=None, **fields):
    """A scored rollout; every response has two tokens unless `lengths` says otherwise."""
    count = len(rewards)
    lengths = torch.tensor(lengths or [2] * count)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    texts = tuple(str(row) for row in range(count))
    defaults = {
        "prompt_ids": torch.zeros(count, 1, dtype=torch.long),
        "prompt_mask": torch.ones(count, 1, dtype=torch.bool),
        "response_ids": torch.zeros(mask.shape, dtype=torch.long),
        "mask": mask,
        "sampler_log_probs": torch.zeros(mask.shape),
        "finished": torch.ones(count, dtype=torch.bool),
        "prompts": tuple(f"prompt {text}" for text in texts),
        "responses": tuple(f"response {text}" for text in texts),
        "answers": tuple(f"answer {text}" for text in texts),
        "columns": {},
        "group_size": group_size,
        "rewards": torch.tensor(rewards),
        "token_rewards": at_last_token(torch.tensor(rewards), mask),
        "step_rewards": torch.full(mask.shape, NAN),
        "reward_parts": {name: torch.tensor(part) for name, part in (parts or {}).items()},
        "missing": torch.tensor([row in missing for row in range(count)]),
    }
    return ScoredRollout(**{**defaults, **fields})


def make_experience(mask, old=None, ref=None, sampler=None, advantages=None):
    """An experience from nested lists of log-probs; the sampler agrees with the old ones."""
    mask = torch.tensor(mask, dtype=torch.bool)
    sampler = old if sampler is None else sampler
    optional = {"old_log_probs": old, "ref_log_probs": ref}
    zeros = torch.zeros(mask.shape)
    return Experience(
        prompt_ids=torch.zeros(len(mask), 1, dtype=torch.long),
        prompt_mask=torch.ones(len(mask), 1, dtype=torch.bool),
        response_ids=torch.zeros(mask.shape, dtype=torch.long),
        mask=mask,
        sampler_log_probs=zeros if sampler is None else torch.tensor(sampler),
        advantages=zeros if advantages is None else torch.tensor(advantages),
        **{
            name: None if value is None else torch.tensor(value) for name, value in optional.items()
        },
    )


def make_critic_experience(mask, old_values, returns, **log_probs):
    """An experience with what the critic said at the time of the rollout, and its targets."""
    return make_experience(mask, **log_probs).extended(
        CriticExperience, old_values=torch.tensor(old_values), returns=torch.tensor(returns)
    )


def make_update(*micro_batches, index=0):
    """An update from pairs of an experience and log-probs, or (log-probs, entropy)."""
    outputs = []
    for experience, log_probs in micro_batches:
        new, entropy = log_probs if isinstance(log_probs, tuple) else (log_probs, None)
        new = torch.tensor(new)
        entropy = torch.zeros_like(new) if entropy is None else torch.tensor(entropy)
        outputs.append((experience, PolicyOutput(log_probs=new, entropy=entropy)))
    return as_update(outputs, index)


def make_critic_update(*micro_batches, index=0):
    """An update from pairs of an experience and the critic's values."""
    outputs = []
    for experience, values in micro_batches:
        zeros = torch.zeros(experience.mask.shape)
        values = torch.tensor(values)
        output = ActorCriticOutput(log_probs=zeros, entropy=zeros, values=values)
        outputs.append((experience, output))
    return as_update(outputs, index)


def as_update(micro_batches, index):
    return Update(
        passes=tuple(micro_batches),
        loss=torch.tensor(0.0),
        grad_norms={"actor": 0.0},
        index=index,
    )


@pytest.fixture
def make():
    """Builders of the containers."""
    return SimpleNamespace(
        scored=make_scored,
        experience=make_experience,
        critic_experience=make_critic_experience,
        update=make_update,
        critic_update=make_critic_update,
        module=RecordingModule,
    )


class RecordingModule:
    """What callbacks read of an algorithm; keeps what they log."""

    device = torch.device("cpu")

    def __init__(self, policy_loss=None, uses_reference=False, **attributes):
        self.policy_loss = policy_loss or ClippedSurrogate()
        self.sampler_correction = None
        self.uses_reference = uses_reference
        self.value_loss = ClippedSquaredError()
        self.steps_per_iteration = 4
        self.stop_updates = False
        self.trains_policy = True
        self.iteration = 0
        vars(self).update(attributes)
        self.logged = {}

    def log_dict(self, values, **settings):
        assert settings == {"on_step": True, "on_epoch": False, "batch_size": 1}
        assert not self.logged.keys() & values.keys()
        self.logged |= values


@pytest.fixture
def trainer(tmp_path):
    """A trainer that has not run anything, with `tmp_path` as its run folder."""
    return L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )


@pytest.fixture
def iterate(trainer, make):
    """Run one iteration of a callback over given updates and return what it logged.

    `scored` is one rollout, or a list of those of several rounds of sampling.
    """

    def run(callback, *updates, scored=None, experience=None, module=None):
        module = module or make.module()
        module.logged = {}
        rounds = scored if isinstance(scored, list) else [scored or make.scored([0.0, 1.0])]
        experience = experience or make.experience([[1]])
        callback.on_train_batch_start(trainer, module, None, 0)
        for sampled in rounds:
            callback.on_scored(trainer, module, sampled)
        callback.on_rollout(trainer, module, rounds[-1], experience)
        for update in updates:
            callback.on_minibatch(trainer, module, update)
        module.iteration += 1
        callback.on_iteration_end(trainer, module)
        return module.logged

    return run


class TinyModule(L.LightningModule):
    """An algorithm without a language model: two optimizer steps per iteration on one weight."""

    num_iterations = None
    steps_per_iteration = 2
    uses_reference = False
    has_critic = False

    def __init__(self, accuracies=()):
        super().__init__()
        self.automatic_optimization = False
        self.parallelism = Parallelism()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.policy_loss = ClippedSurrogate()
        self.value_loss = ClippedSquaredError()
        self.sampler_correction = None
        self.stop_updates = False
        self.iteration = 0
        self.accuracies = list(accuracies)
        self.validation_samples = []

    def training_step(self, batch, batch_idx):
        scored = make_scored([0.0, 1.0], parts={"exact": [0.0, 1.0]})
        experience, output = self.experience_and_output(scored.mask)
        call_hooks(self.trainer, "on_scored", self, scored)
        call_hooks(self.trainer, "on_rollout", self, scored, experience)
        for index in range(self.steps_per_iteration):
            optimizer = self.optimizers()
            self.manual_backward(self.weight)
            optimizer.step()
            optimizer.zero_grad()
            update = as_update([(experience, output)], index=index)
            call_hooks(self.trainer, "on_minibatch", self, update)
        self.iteration += 1
        self.log_dict({"step": float(self.iteration), "iteration": float(self.iteration)})
        call_hooks(self.trainer, "on_iteration_end", self)

    def experience_and_output(self, mask):
        ones = torch.ones(mask.shape)
        experience = make_experience(mask.tolist(), old=(-ones).tolist())
        output = PolicyOutput(log_probs=-ones, entropy=ones)
        if not self.has_critic:
            return experience, output
        valued = {"old_values": ones, "returns": ones}
        return (
            experience.extended(CriticExperience, **valued),
            output.extended(ActorCriticOutput, values=ones),
        )

    def validation_step(self, batch, batch_idx):
        pass

    def on_validation_epoch_end(self):
        accuracy = self.accuracies.pop(0) if self.accuracies else 0.5
        self.log_dict(
            {
                "step": float(self.iteration),
                "val/greedy_accuracy": accuracy,
                "val/greedy_accuracy_standard_error": 0.05,
            }
        )

    def predict_step(self, batch, batch_idx):
        return [{"prompt": f"{int(row)}>", "response": "a\nb", "length": 2} for row in batch]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["iteration"] = self.iteration

    def on_load_checkpoint(self, checkpoint):
        self.iteration = checkpoint["iteration"]


@pytest.fixture
def tiny_module():
    return TinyModule


@pytest.fixture
def fit(tmp_path):
    """Train for some iterations in `tmp_path` and return the trainer."""

    def run(module, *callbacks, iterations=4, ckpt_path=None, predict=False, **settings):
        defaults = {
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": any(
                isinstance(callback, L.pytorch.callbacks.Checkpoint) for callback in callbacks
            ),
            "enable_progress_bar": any(
                isinstance(callback, L.pytorch.callbacks.ProgressBar) for callback in callbacks
            ),
            "enable_model_summary": False,
            "default_root_dir": tmp_path,
            "max_epochs": 1,
            "limit_train_batches": iterations,
            "num_sanity_val_steps": 0,
            "val_check_interval": 2,
            "check_val_every_n_epoch": None,
            "log_every_n_steps": 1,
            "callbacks": list(callbacks),
        }
        trainer = L.Trainer(**{**defaults, **settings})
        train, held_out = DataLoader(torch.arange(100.0)), DataLoader(torch.arange(3.0))
        if predict:
            trainer.predict(module, held_out)
        else:
            trainer.fit(module, train, held_out, ckpt_path=ckpt_path)
        return trainer

    return run


class StillTrainer(L.Trainer):
    """A trainer that trains nothing, whose metrics are given."""

    callback_metrics = None


class Watched:
    """A run of which only the metrics are there: each iteration is a dictionary of them."""

    def __init__(self, folder, monitor, group_size_needed=2, **attributes):
        self.monitor = monitor
        self.trainer = StillTrainer(accelerator="cpu", logger=False, default_root_dir=folder)
        self.trainer.callback_metrics = {}
        self.trainer.state.fn = TrainerFn.FITTING
        self.module = SimpleNamespace(
            iteration=0,
            advantage=SimpleNamespace(min_group_size=group_size_needed),
            evaluation=SimpleNamespace(success_reward=1.0),
            max_grad_norm=1.0,
        )
        vars(self.module).update(attributes)

    def iterate(self, *rows):
        for row in rows:
            self.module.iteration += 1
            self._log(row)
            self.monitor.on_train_batch_start(self.trainer, self.module, None, 0)
            self.monitor.on_train_batch_end(self.trainer, self.module, None, None, 0)

    def validate(self, accuracy, standard_error=0.01):
        name = "val/greedy_accuracy"
        self._log({name: accuracy, f"{name}_standard_error": standard_error})
        self.monitor.on_validation_end(self.trainer, self.module)

    def _log(self, metrics):
        self.trainer.callback_metrics |= {
            name: torch.tensor(value) for name, value in metrics.items()
        }


@pytest.fixture
def watched(tmp_path):
    return partial(Watched, tmp_path)
