"""A checkpoint of another algorithm, model or tokenizer is refused by name."""

import pytest
import torch
from transformers import LlamaForSequenceClassification

from lit_rl.algorithms import DAPO, GRPO
from lit_rl.algorithms.identity import check_identity, model_name, tokenizer_name
from lit_rl.functional import fingerprint
from lit_rl.models import LoRA, RandomCausalLM
from lit_rl.rewards import InWorkers, PythonFunction, RewardModel
from tiny_job import LLAMA, num_fives

WIDE = {**LLAMA, "hidden_size": 32}
DEEP = {**LLAMA, "num_hidden_layers": 2}


@pytest.fixture
def checkpoint(algorithm, fit, source, tmp_path):
    path = tmp_path / "grpo.ckpt"
    fit(algorithm(), iterations=1).save_checkpoint(path)
    return path


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": DAPO}, "fit the algorithm of .* is GRPO, that of this run DAPO"),
        (
            {"source": RandomCausalLM(alphabet="0123456789>", config=WIDE)},
            "fit the model of .* hidden size 16, vocabulary 14, .* hidden size 32, vocabulary 14",
        ),
        (
            {"source": RandomCausalLM(alphabet="0123456789>", config=DEEP)},
            "fit the model of .* of 1 layers, .* of 2 layers",
        ),
        (
            {"source": RandomCausalLM(alphabet="9876543210>", config=LLAMA)},
            "fit the tokenizer of .* its tokenizer is 14 tokens, [0-9a-f]{16}, that of this run 14",
        ),
    ],
)
def test_checkpoint_of_something_else_is_refused_by_name(
    algorithm, fit, source, checkpoint, settings, message
):
    settings = {"source": source(), **settings}
    with pytest.raises(ValueError, match=message):
        fit(algorithm(**settings), iterations=2, ckpt_path=checkpoint)


def test_checkpoint_of_the_same_goes_on(algorithm, fit, source, checkpoint):
    module = algorithm()
    fit(module, iterations=2, ckpt_path=checkpoint)
    assert module.iteration == 2


@pytest.fixture
def with_reference(algorithm, fit, tmp_path):
    path = tmp_path / "reference.ckpt"
    fit(algorithm(kl_coef=0.1), iterations=1).save_checkpoint(path)
    return path


def test_checkpoint_of_a_run_with_another_reference_is_refused(algorithm, fit, with_reference):
    """Random weights of another seed, in the same architecture."""
    message = r"fit the reference of .* is weights [0-9a-f]{16}, that of this run weights [0-9a-f]"
    with pytest.raises(ValueError, match=message):
        fit(algorithm(kl_coef=0.1, seed=1), iterations=2, ckpt_path=with_reference)


def test_weight_of_the_kl_may_change_and_so_may_whether_there_is_a_reference(
    algorithm, fit, with_reference, checkpoint, source
):
    for settings, path in [
        ({"kl_coef": 0.2}, with_reference),
        ({"kl_coef": 0.0}, with_reference),
        ({"kl_coef": 0.1, "source": source()}, checkpoint),
    ]:
        module = algorithm(**settings)
        fit(module, iterations=2, ckpt_path=path)
        assert module.iteration == 2


@pytest.mark.parametrize("adapter", [None, LoRA(rank=2)])
def test_reference_is_hashed_once_and_before_it_may_move(algorithm, fit, monkeypatch, adapter):
    counted = []

    def counting(weights):
        counted.append([*weights])
        return fingerprint(weights)

    monkeypatch.setattr("lit_rl.algorithms.policy_module.fingerprint", counting)
    monkeypatch.setattr("lit_rl.models.adapters.fingerprint", counting)
    module = algorithm(kl_coef=0.1, adapter=adapter)
    trainer = fit(module, iterations=1)
    for _ in range(3):
        trainer.save_checkpoint(trainer.default_root_dir + "/any.ckpt")
    assert len(counted) == 1


def test_vocabulary_is_hashed_once(algorithm, fit, monkeypatch):
    hashed = []
    monkeypatch.setattr(
        "lit_rl.algorithms.rl_module.tokenizer_name",
        lambda tokenizer: hashed.append(tokenizer) or tokenizer_name(tokenizer),
    )
    trainer = fit(algorithm(), iterations=1)
    for _ in range(3):
        trainer.save_checkpoint(trainer.default_root_dir + "/any.ckpt")
    assert len(hashed) == 1


class Judge(PythonFunction):
    """A reward with a frozen model."""

    def __init__(self, weights):
        super().__init__(num_fives)
        object.__setattr__(self, "judges", {"judge": weights})

    @property
    def models(self):
        return self.judges


def test_checkpoint_of_a_run_with_another_reward_model_is_refused(algorithm, fit, tmp_path):
    path = tmp_path / "judged.ckpt"
    fit(algorithm(reward=Judge("1" * 64)), iterations=1).save_checkpoint(path)
    with pytest.raises(ValueError, match=r"is judge, weights 1{16}, that of this run judge, .* 2"):
        fit(algorithm(reward=Judge("2" * 64)), iterations=2, ckpt_path=path)
    module = algorithm(reward=Judge("1" * 64))
    fit(module, iterations=2, ckpt_path=path)
    assert module.iteration == 2


@pytest.fixture
def reward_model(source, tmp_path):
    """Build a reward model called judge in a worker, with random weights of a seed."""

    def build(seed):
        folder = tmp_path / str(seed) / "judge"
        torch.manual_seed(seed)
        config = source().model(0).config
        LlamaForSequenceClassification(config).save_pretrained(folder)
        source().tokenizer().save_pretrained(folder)
        return InWorkers(RewardModel(str(folder), label=0), timeout_seconds=60.0)

    return build


@pytest.mark.slow
def test_checkpoint_of_a_run_with_another_reward_model_in_workers_is_refused(
    algorithm, fit, reward_model, tmp_path
):
    path = tmp_path / "judged.ckpt"
    fit(algorithm(reward=reward_model(1)), iterations=1).save_checkpoint(path)
    message = (
        r"reward model is judge, weights ([0-9a-f]{16}), that of this run judge, weights (?!\1)"
    )
    with pytest.raises(ValueError, match=message):
        fit(algorithm(reward=reward_model(2)), iterations=2, ckpt_path=path)
    module = algorithm(reward=reward_model(1))
    fit(module, iterations=2, ckpt_path=path)
    assert module.iteration == 2


def test_checkpoint_of_another_program_is_refused(algorithm, fit, tmp_path):
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.0"}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="is not of an algorithm of lit_rl"):
        fit(algorithm(), ckpt_path=tmp_path / "other.ckpt")


def test_names_tell_models_and_tokenizers_apart(source):
    """By hand: 11 characters and three special tokens make 14."""
    assert model_name(source().model(0)) == (
        "LlamaForCausalLM of 1 layers, hidden size 16, vocabulary 14"
    )
    name = tokenizer_name(source().tokenizer())
    assert name.startswith("14 tokens, ")
    assert name == tokenizer_name(source(DEEP).tokenizer())


def test_what_is_not_stored_differs():
    with pytest.raises(ValueError, match="its model is None, that of this run X"):
        check_identity({}, {"model": "X"})
    check_identity({"algorithm": GRPO.__name__, "model": "X"}, {"model": "X"})
