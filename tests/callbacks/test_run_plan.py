"""What a run says of itself before it begins."""

import json

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lit_rl.algorithms import GRPO
from lit_rl.callbacks import FixedKL, LinearKL, RunPlan
from lit_rl.callbacks.footprint import ALONE, footprint, strategy_of
from lit_rl.callbacks.run_plan import first_kl_coef
from lit_rl.data import PromptDataModule
from lit_rl.generation import SamplingSettings
from lit_rl.memory import planned
from lit_rl.models import LoRA
from lit_rl.rewards import ExactAnswer
from lit_rl.strategies import FSDP2, DeepSpeed
from lit_rl.tasks import LargestDigit
from tiny_job import LLAMA, TRAINER, build_data, build_source


def algorithm(adapter=None, **settings):
    return GRPO(
        source=build_source(),
        reward=ExactAnswer(),
        sampling=SamplingSettings(max_new_tokens=4),
        group_size=4,
        adapter=adapter,
        **settings,
    )


@pytest.fixture
def say(tmp_path, capsys):
    """Train for one iteration with a plan and return what was printed."""

    def run(*callbacks, **settings):
        module = algorithm(**settings)
        trainer = L.Trainer(
            **{**TRAINER, "max_epochs": 1},
            default_root_dir=tmp_path,
            limit_train_batches=1,
            limit_val_batches=0,
            callbacks=[RunPlan(), *callbacks],
        )
        trainer.fit(module, build_data())
        # The text of the cells, without the frame and the ends of lines.
        return " ".join(capsys.readouterr().out.replace("│", " ").split())

    return run


def test_formula_and_ledger_are_printed(say, recwarn):
    text = say(kl_coef=0.04, num_minibatches=2)
    assert "0.04 * k3(policy, reference)" in text
    assert "24 responses" in text
    assert "minibatches of 12 = 2 optimizer" in text
    assert "1 iterations = 24 responses trained on, 2 optimizer steps" in text
    assert not [w for w in recwarn.list if w.category is UserWarning]


def test_the_memory_is_that_of_the_calculator(say):
    text = say(kl_coef=0.04, num_minibatches=2)
    options = {
        "source": {"alphabet": "0123456789>", "config": LLAMA},
        "sampling": {"max_new_tokens": 4},
        "group_size": 4,
        "kl_coef": 0.04,
        "num_minibatches": 2,
        "update_epochs": 1,
    }
    given = [f"--model.{name}={json.dumps(value)}" for name, value in options.items()]
    data = ["--data.batch_size", "6", "--data.max_prompt_tokens", "8"]
    held = footprint(*planned(["--trainer.accelerator", "cpu", *given, *data]))
    stages = held.stages(ALONE, 1)
    stage = max(stages, key=stages.get)
    assert f"peak {stages[stage] / 2**20:.3g} MiB per device, when it is to {stage}" in text
    for name in ("weights", "reference", "gradients", "optimizer", "activations", "cache"):
        assert f"{name} {held.parts(ALONE, 1)[name] / 2**20:.3g}" in text


def test_it_takes_no_random_numbers():
    module = algorithm(LoRA(rank=2))
    module.configure_model()
    data = PromptDataModule(LargestDigit(), batch_size=6, eval_batch_size=6, max_prompt_tokens=8)
    before = torch.get_rng_state()
    footprint(module, data)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        (SingleDeviceStrategy(), "auto"),
        (DDPStrategy(), "ddp"),
        (FSDP2(), "fsdp2"),
        (DeepSpeed(stage=1), "deepspeed_1"),
        (DeepSpeed(stage=3, offload=True), "deepspeed_3"),
    ],
)
def test_each_strategy_is_one_of_the_calculator(strategy, name):
    assert strategy_of(strategy).name == name


def test_what_is_suspicious_is_warned_of(say):
    with pytest.warns(UserWarning, match="with one update per rollout every ratio is 1"):
        say(kl_coef=0.0, num_minibatches=1, update_epochs=1)


def test_the_weight_is_that_of_a_controller(trainer, make):
    module = make.module(kl_coef=0.3)
    assert first_kl_coef(trainer, module) == 0.3
    trainer.callbacks = [FixedKL(0.05)]
    assert first_kl_coef(trainer, module) == 0.05
    trainer.callbacks = [LinearKL(0.5, 0.0, 4)]
    module.iteration = 1
    assert first_kl_coef(trainer, module) == 0.375
