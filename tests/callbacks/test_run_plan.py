"""What a run says of itself before it begins."""

import lightning as L
import pytest

from lit_rl.algorithms import GRPO
from lit_rl.callbacks import FixedKL, LinearKL, RunPlan
from lit_rl.callbacks.run_plan import first_kl_coef
from lit_rl.data import PromptDataModule
from lit_rl.generation import SamplingSettings
from lit_rl.models import RandomCausalLM
from lit_rl.rewards import ExactAnswer
from lit_rl.tasks import LargestDigit

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


@pytest.fixture
def say(tmp_path, capsys):
    """Train for one iteration with a plan and return what was printed."""

    def run(*callbacks, **settings):
        module = GRPO(
            source=RandomCausalLM(alphabet="0123456789>", config=LLAMA),
            reward=ExactAnswer(),
            sampling=SamplingSettings(max_new_tokens=4),
            group_size=4,
            **settings,
        )
        trainer = L.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=tmp_path,
            limit_train_batches=1,
            limit_val_batches=0,
            max_epochs=1,
            callbacks=[RunPlan(), *callbacks],
        )
        task = LargestDigit(num_digits=2, num_train=24, num_held_out=6)
        data = PromptDataModule(task, batch_size=6, eval_batch_size=6, max_prompt_tokens=8)
        trainer.fit(module, data)
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
