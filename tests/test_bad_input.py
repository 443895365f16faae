"""What a user can get wrong, where the user meets it: a clear error, and no work is lost.

Inputs that can be looked at before training are refused before there is a model. What only shows
while a run is under way ends it with weights and checkpoints whole.
"""

import re
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import lightning as L
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import yaml
from lightning.pytorch.strategies import SingleDeviceStrategy

from lit_rl.algorithms import GRPO
from lit_rl.algorithms.optimization import check_trainer
from lit_rl.callbacks import IterationCheckpoint
from lit_rl.cli import RLCLI
from lit_rl.generation import SamplingSettings
from lit_rl.models import RandomCausalLM
from lit_rl.rewards import ExactAnswer, PythonFunction, RewardModel, WeightedSum
from lit_rl.tasks import DataFiles, HuggingFaceData
from tiny_job import LLAMA, TRAINER, build_data, build_source

CONFIGS = Path(__file__).parent.parent / "configs"
READS_4 = build_source({**LLAMA, "max_position_embeddings": 4})


def build_algorithm(**settings):
    defaults = {
        "source": build_source(),
        "reward": ExactAnswer(),
        "group_size": 4,
        "sampling": SamplingSettings(max_new_tokens=4),
        "optimizer": partial(torch.optim.SGD, lr=0.5),
    }
    return GRPO(**{**defaults, **settings})


@pytest.fixture
def trainer(tmp_path):
    def build(**settings):
        defaults = {
            **TRAINER,
            "devices": 1,
            "default_root_dir": tmp_path,
            "limit_val_batches": 0,
            "max_steps": 4,
        }
        return L.Trainer(**{**defaults, **settings})

    return build


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.policy.parameters()])


# ----- data


GOOD = b'{"prompt": "12>", "answer": "2"}\n'


@pytest.mark.parametrize("stage", ["fit", "validate", "predict"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"prompts.jsonl has no rows"),
        (b'{"prompt": "12>", "result": "2"}\n', r"no column 'answer', it has \['prompt', 'result'"),
        (GOOD + b'{"prompt": "\xff>", "answer": "2"}\n', r"prompts.jsonl, line 2 is not UTF-8"),
        (GOOD + b'{"prompt": "12>", \n', r"prompts.jsonl, line 2 is not JSON"),
        (GOOD + b'["12>", "2"]\n', r"prompts.jsonl, line 2 is a JSON list, must be an object"),
        (GOOD + b'{"prompt": "12>", "answer": 0.5}\n', r"line 2: the answer 0.5 is of type float"),
        (GOOD + b'{"prompt": "1>", "answer": null}\n', r"line 2: the answer None is of type None"),
        (GOOD + b'{"prompt": 12, "answer": "2"}\n', r"line 2: the prompt 12 is neither text nor"),
        (GOOD + b'{"prompt": "x>", "answer": "2"}\n', r"characters \['x'\] of the text 'x>'"),
    ],
)
def test_a_bad_file_is_refused_in_every_stage_before_there_is_a_model(
    trainer, tmp_path, content, message, stage
):
    (tmp_path / "prompts.jsonl").write_bytes(content)
    task = DataFiles(train_file=str(tmp_path / "prompts.jsonl"), held_out_fraction=0.5)
    module = build_algorithm()
    with pytest.raises(ValueError, match=message):
        getattr(trainer(), stage)(module, build_data(task=task))
    assert not hasattr(module, "policy")


@pytest.mark.parametrize("kind", ["parquet", "data set"])
def test_other_kinds_of_data_are_refused_in_the_same_way(trainer, tmp_path, kind):
    table = pa.table({"prompt": ["12>"], "answer": [[2]]})
    if kind == "parquet":
        pa.parquet.write_table(table, tmp_path / "prompts.parquet")
        task = DataFiles(train_file=str(tmp_path / "prompts.parquet"), held_out_fraction=0.5)
    else:
        (tmp_path / "folder").mkdir()
        pa.parquet.write_table(table, tmp_path / "folder" / "train.parquet")
        task = HuggingFaceData(path=str(tmp_path / "folder"), held_out_fraction=0.5)
    module = build_algorithm()
    with pytest.raises(ValueError, match=r"row 0: the answer \[2\] is of type list"):
        trainer().fit(module, build_data(task=task))
    assert not hasattr(module, "policy")


@pytest.mark.parametrize(
    ("data", "algorithm", "message"),
    [
        # 2 prompts x 4 responses.
        (
            {"batch_size": 2},
            {"num_minibatches": 3},
            r"2 prompts x group_size 4 = 8 rollouts .* num_minibatches 3; num_minibatches 2 would",
        ),
        ({"batch_size": 25}, {}, "batch_size is 25, but there are only 24 training prompts"),
        ({"max_prompt_tokens": 3}, {}, r"6 of 6 held-out prompts are longer .* 3; .* of 4 tokens"),
        # A prompt has 4 tokens: the begin token, two digits and ">".
        (
            {},
            {"sampling": SamplingSettings(max_new_tokens=29)},
            r"has 4 tokens .* 29, together 33, but the model reads 32; such as max_new_tokens 28$",
        ),
        (
            {},
            {"sampling": SamplingSettings(max_new_tokens=3), "source": READS_4},
            r"3, together 7, .* reads 4; such as max_prompt_tokens 1 with overlong cut_left$",
        ),
        (
            {},
            {"sampling": SamplingSettings(max_new_tokens=4), "source": READS_4},
            r"such as max_prompt_tokens 2 with overlong cut_left and max_new_tokens 2$",
        ),
        (
            {},
            {"source": build_source({**LLAMA, "max_position_embeddings": 1})},
            r"together 8, but the model reads 1; such as a model that reads 8$",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_there_is_a_model(
    trainer, data, algorithm, message
):
    module = build_algorithm(**algorithm)
    with pytest.raises(ValueError, match=message):
        trainer().fit(module, build_data(**data))
    assert not hasattr(module, "policy")


def test_a_cut_prompt_that_leaves_room_for_the_response_is_read(trainer):
    """The example of the error above works: 2 + 2 tokens are the 4 of the model."""
    module = build_algorithm(source=READS_4, sampling=SamplingSettings(max_new_tokens=2))
    data = build_data(max_prompt_tokens=2, overlong="cut_left")
    with pytest.warns(UserWarning, match="overlong is cut_left"):
        trainer(max_steps=1).fit(module, data)
    assert module.iteration == 1


# ----- rewards


def raises(responses):
    raise ZeroDivisionError("by nought")


def one_value(responses):
    return [1.0]


def nan_in_row_one(responses):
    return [0.0, float("nan"), *[0.0] * (len(responses) - 2)]


def none_for_all(responses):
    return [None] * len(responses)


BAD_REWARDS = [
    (raises, RuntimeError, r"the reward raises raised ZeroDivisionError: by nought"),
    (one_value, ValueError, r"the reward one_value must give \d+ values, .* got 1 values"),
    (nan_in_row_one, ValueError, r"the reward nan_in_row_one gave nan for row 1, whose response"),
    (none_for_all, ValueError, r"the reward none_for_all applied to no response: all its values"),
]


@pytest.mark.parametrize(("function", "kind", "message"), BAD_REWARDS)
def test_a_bad_reward_ends_training_before_the_weights_change(trainer, function, kind, message):
    module = build_algorithm(reward=PythonFunction(function))
    module.configure_model()
    before = weights(module)
    with pytest.raises(kind, match=message):
        trainer().fit(module, build_data())
    assert torch.equal(weights(module), before)


@pytest.mark.parametrize(("function", "kind", "message"), BAD_REWARDS)
def test_a_bad_reward_shows_in_the_validation_before_training(trainer, function, kind, message):
    module = build_algorithm(reward=PythonFunction(function))
    with pytest.raises(kind, match=message):
        trainer(num_sanity_val_steps=-1, limit_val_batches=1.0).fit(module, build_data())
    assert module.iteration == 0


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_reward_that_is_not_there_is_refused_before_there_is_a_model(trainer, stage):
    module = build_algorithm(reward=WeightedSum({"judge": RewardModel("./no/such/folder")}))
    with pytest.raises(ValueError, match=r"no reward model to load at '\./no/such/folder'"):
        getattr(trainer(), stage)(module, build_data())
    assert not hasattr(module, "policy")


def test_a_reward_that_nobody_asks_is_not_looked_for(trainer):
    module = build_algorithm(reward=RewardModel("./no/such/folder"))
    (batch,) = trainer().predict(module, build_data())
    assert len(batch) == 6


def test_a_reward_that_fails_later_leaves_the_checkpoint_before_it(trainer, tmp_path):
    """Iterations 1 and 2 succeed; a repaired reward goes on with iteration 3."""
    calls = []

    def flaky(responses):
        calls.append(responses)
        if len(calls) == 3:
            raise ConnectionError("the judge is away")
        return [float(row % 2) for row in range(len(responses))]

    module = build_algorithm(reward=PythonFunction(flaky))
    callback = IterationCheckpoint(dirpath=str(tmp_path))
    with pytest.raises(RuntimeError, match="flaky raised ConnectionError: the judge is away"):
        trainer(callbacks=[callback], enable_checkpointing=True).fit(module, build_data())
    resumed = build_algorithm(reward=PythonFunction(flaky))
    trainer(max_steps=4).fit(resumed, build_data(), ckpt_path=tmp_path / "last.ckpt")
    assert resumed.iteration == 4
    assert len(calls) == 5


# ----- settings of the Trainer


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "16-true"])
def test_weights_of_another_format_are_not_made_by_the_trainer(trainer, precision):
    module = build_algorithm()
    with pytest.raises(ValueError, match=rf"{precision} is not .*source\.dtype.* bf16-mixed or 32"):
        trainer(precision=precision).fit(module, build_data())
    assert not hasattr(module, "policy")


def test_float16_with_a_loss_scale_is_refused():
    """On a CPU Lightning computes in bfloat16 instead, so the check is asked directly."""
    asked = MagicMock(spec=L.Trainer)
    asked.strategy, asked.precision = SingleDeviceStrategy("cpu"), "16-mixed"
    with pytest.raises(ValueError, match=r"16-mixed is not supported: float16 needs a loss scale"):
        check_trainer(asked)


# ----- the command line


def run(*arguments):
    stack = ["--config", str(CONFIGS / "algorithm" / "grpo.yaml")]
    return RLCLI(CONFIGS / "base.yaml", ["fit", *stack, *map(str, arguments)])


def test_a_bad_file_named_in_a_config_ends_the_command_with_file_and_line(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_bytes(GOOD + b'{"prompt": "12>", "answer": [2]}\n')
    task = {
        "class_path": "lit_rl.tasks.DataFiles",
        "init_args": {"train_file": "prompts.jsonl", "held_out_fraction": 0.5},
    }
    config = {"data": {"class_path": "lit_rl.data.PromptDataModule", "init_args": {"task": task}}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit) as stopped:
        run("--config", "mine.yaml")
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "error: prompts.jsonl, line 2: the answer [2] is of type list" in error
    assert "Traceback" not in error


def test_an_unknown_key_of_a_task_is_named_with_the_near_one(capsys):
    with pytest.raises(SystemExit) as stopped:
        run("--data.task.num_digit", 3)
    assert stopped.value.code == 2
    first_line = capsys.readouterr().err.splitlines()[0]
    assert re.match(r"error: num_digit is not a key of .*LargestDigit; .* num_digits", first_line)


@pytest.mark.usefixtures("without_type_checks")
def test_an_unknown_key_of_a_model_is_named_with_the_near_one(trainer):
    source = RandomCausalLM(alphabet="0123456789>", config={**LLAMA, "hiden_size": 8})
    module = build_algorithm(source=source)
    with pytest.raises(ValueError, match=r"'hiden_size' is unknown .* mean 'hidden_size'\?"):
        trainer().fit(module, build_data())
    assert not hasattr(module, "policy")


def test_callbacks_are_added_to_those_of_the_base(capsys):
    monitor = "lightning.pytorch.callbacks.LearningRateMonitor"
    names = []
    for extra in ([], ["--trainer.callbacks+=" + monitor]):
        with pytest.raises(SystemExit):
            run(*extra, "--print_config")
        config = yaml.safe_load(capsys.readouterr().out)
        names.append([callback["class_path"] for callback in config["trainer"]["callbacks"]])
    assert len(names[0]) > 5
    assert names[1] == [*names[0], monitor]
