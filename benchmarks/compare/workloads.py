"""The work that both trainers do: weights, prompts, lengths of the responses, reward."""

import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rl.models import CausalLMSource, RandomCausalLM, SmolLM2, save_pretrained
from lit_rl.tasks import LargestDigit

BASE_CONFIG = Path(__file__).parents[2] / "configs" / "base.yaml"
KL_COEF = 0.04
LEARNING_RATE = 1e-6
END_ID = 0
"""The end token where lengths are planned row by row: the first of the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One iteration: prompts, answered `group_size` times each, and one update on all responses.

    A response has `max_new_tokens` tokens, or, where `min_new_tokens` is less, a planned number of
    them between the two, the last being the end token. The `random` model is one that a script
    makes itself.
    """

    about: str
    num_prompts: int
    prompt_tokens: int
    min_new_tokens: int
    max_new_tokens: int
    group_size: int = 8
    model: Literal["smollm2", "tiny", "random"] = "smollm2"
    algorithm: Literal["GRPO", "PPO"] = "GRPO"
    warm_up: int = 1
    """Iterations of each process that are not counted."""

    @property
    def num_rollouts(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def ragged(self) -> bool:
        return self.min_new_tokens < self.max_new_tokens


SHORT = {"num_prompts": 2, "prompt_tokens": 42, "min_new_tokens": 32, "max_new_tokens": 32}

WORKLOADS = {
    "short": Workload(about="SmolLM2-135M, 2 prompts of 42 tokens x 8, 32 new tokens", **SHORT),
    "long-prompt": Workload(
        about="SmolLM2-135M, 2 prompts of 256 tokens x 8, 32 new tokens",
        **{**SHORT, "prompt_tokens": 256},
    ),
    "ragged": Workload(
        about="SmolLM2-135M, 2 prompts of 42 tokens x 8, 4 to 96 new tokens",
        **{**SHORT, "min_new_tokens": 4, "max_new_tokens": 96},
    ),
    "tiny": Workload(
        about="the embedded model of configs/base.yaml, 64 prompts of 5 tokens x 8, 4 new tokens",
        model="tiny",
        num_prompts=64,
        prompt_tokens=5,
        min_new_tokens=4,
        max_new_tokens=4,
        warm_up=3,
    ),
    "ppo": Workload(
        about="SmolLM2-135M with a critic of its own, 2 prompts of 42 tokens x 8, 32 new tokens",
        algorithm="PPO",
        **SHORT,
    ),
}


def _source(workload: Workload) -> CausalLMSource:
    if workload.model == "smollm2":
        return SmolLM2()
    settings = yaml.safe_load(BASE_CONFIG.read_text())["model"]["init_args"]["source"]["init_args"]
    return RandomCausalLM(**settings)


def write_model(workload: Workload, folder: Path) -> PreTrainedModel:
    """Write the folder of the model that both trainers load, and return the model.

    Where lengths are planned, the first token of the vocabulary is the end token, with logit 0
    everywhere: a pretrained model never draws it by itself.
    """
    source = _source(workload)
    model, tokenizer = source.model(seed=0), source.tokenizer()
    if workload.ragged:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(END_ID)
        model.generation_config.eos_token_id = END_ID
        model.get_output_embeddings().weight.data[END_ID] = 0.0
    save_pretrained(model, tokenizer, folder)
    return model


def prompts(workload: Workload, tokenizer: PreTrainedTokenizerBase, number: int) -> list[str]:
    """Return prompts of exactly `prompt_tokens` tokens; those of the tiny model may repeat."""
    if workload.model == "tiny":
        texts = itertools.cycle(LargestDigit().train()["prompt"])
    else:
        texts = (_sums(workload.prompt_tokens, tokenizer, seed) for seed in itertools.count())
    chosen = list(itertools.islice(texts, number))
    lengths = {len(ids) for ids in tokenizer(chosen)["input_ids"]}
    if lengths != {workload.prompt_tokens}:
        raise ValueError(f"prompts of {sorted(lengths)} tokens, not {workload.prompt_tokens}")
    return chosen


def _sums(num_tokens: int, tokenizer: PreTrainedTokenizerBase, seed: int) -> str:
    numbers = random.Random(seed)
    pairs = [(numbers.randint(1, 99), numbers.randint(1, 99)) for _ in range(num_tokens)]
    text = "\n".join(f"{one}+{other}={one + other}" for one, other in pairs) + "\n12+34="
    own = num_tokens - len(tokenizer("")["input_ids"])  # the rest are special tokens
    return tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][-own:])


def planned_lengths(workload: Workload, seed: int, iteration: int) -> list[int]:
    """Return the tokens of each response of an iteration, in the order of the rows.

    Args:
        workload: the work.
        seed: seed of the plan, the same for the two processes of a pair.
        iteration: number of the iteration, from 0, warm-up included.
    """
    lengths = range(workload.min_new_tokens, workload.max_new_tokens + 1)
    return random.Random(f"{seed} {iteration}").choices(lengths, k=workload.num_rollouts)


def check_lengths(planned: list[int], actual: list[int], trainer: str) -> None:
    """Refuse a comparison of unequal work."""
    if planned != actual:
        raise RuntimeError(f"{trainer} generated {actual} tokens per response, not {planned}")


def reward(text: str) -> float:
    """A number that differs within a group and costs nothing."""
    return float(sum(map(ord, text)) % 10)
