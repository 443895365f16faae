"""What each part of the engine saves on an accelerator; about five minutes.

    python benchmarks/gpu.py

GRPO on a random Llama of half a billion weights, bfloat16 products, 8 prompts of 512 tokens with 8
responses of 256 tokens each. One setting is changed at a time. The table is printed and written to
`benchmarks/results/gpu.md`. `--accelerator cpu --small` shows on any machine that the script runs.
"""

import argparse
import functools
import logging
import shlex
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import lightning as L
import torch
from datasets import Dataset

from compare.lit_rl_side import bare_trainer, rewards, slow_rewards
from compare.report import PACKAGES, environment, table
from lit_rl.algorithms import GRPO, CurrentLogProbs
from lit_rl.algorithms.hooks import RLCallback
from lit_rl.data import PromptDataModule
from lit_rl.generation import CachedGenerator, SamplingSettings, TransformersGenerator
from lit_rl.models import RandomCausalLM
from lit_rl.rewards import InWorkers, PythonFunction
from lit_rl.tasks import Task

RESULT = Path(__file__).parent / "results" / "gpu.md"
STAGES = {"generate": "generate", "score": "score", "prepare": "log_probs", "update": "update"}
CHARACTERS = "".join(map(chr, range(0x4E00, 0x9000)))
SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    "generator: TransformersGenerator": lambda: {"generator": TransformersGenerator()},
    "generator.cuda_graphs: true": lambda: {"generator": CachedGenerator(cuda_graphs=True)},
    "layout: padded": lambda: {"layout": "padded"},
    "layout: packed_flex": lambda: {"layout": "packed_flex"},
    "cuda_graphs and packed_flex": lambda: {
        "generator": CachedGenerator(cuda_graphs=True),
        "layout": "packed_flex",
    },
    "gradient_checkpointing: true": lambda: {"gradient_checkpointing": True},
    "activation_offload: true": lambda: {"activation_offload": True},
    "both": lambda: {"gradient_checkpointing": True, "activation_offload": True},
    "slow rewards in workers": lambda: {"reward": InWorkers(PythonFunction(slow_rewards))},
    "the same, prompts_at_a_time: 2": lambda: {
        "reward": InWorkers(PythonFunction(slow_rewards)),
        "prompts_at_a_time": 2,
    },
}
NEED_A_GPU = ("cuda_graphs", "packed_flex", "activation_offload", "both")
WIDE = {"hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 16}
NARROW = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
PROMPTS, GROUP_SIZE, WARM_UP, ITERATIONS = 8, 8, 1, 3


class Noise(Task):
    """Prompts of random characters, no two of them alike."""

    def __init__(self, length: int) -> None:
        self.length = length

    def train(self) -> Dataset:
        number = PROMPTS * (WARM_UP + ITERATIONS)
        generator = torch.Generator().manual_seed(0)
        picks = torch.randint(len(CHARACTERS), (number, self.length - 1), generator=generator)
        texts = ["".join(CHARACTERS[pick] for pick in row) for row in picks.tolist()]
        return Dataset.from_dict({"prompt": texts, "answer": [""] * number})

    def held_out(self) -> Dataset:
        return self.train().select([0])


class Measurement(RLCallback):
    """Seconds of each stage, the device having done its work, and the peak of its memory."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.peak_bytes = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for method, part in STAGES.items():
            setattr(pl_module, method, self._timed(part, getattr(pl_module, method)))

    def _now(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        return perf_counter()

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        begin = self._now()
        yield
        self.seconds[name].append(self._now() - begin)

    def _timed(self, stage: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._stage(stage):
                return method(*args, **kwargs)

        return timed

    def on_train_batch_start(self, *args: Any) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.begin = self._now()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seconds["iteration"].append(self._now() - self.begin)
        if self.on_gpu:
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())

    def row(self, name: str, new_tokens: int) -> list[str]:
        """Return a line of the table."""
        medians = {stage: median(values[WARM_UP:]) for stage, values in self.seconds.items()}
        rate = PROMPTS * GROUP_SIZE * new_tokens / medians["generate"]
        stages = [f"{medians[stage]:.3f}" for stage in (*STAGES.values(), "iteration")]
        return [name, *stages, f"{rate:,.0f}", f"{self.peak_bytes / 2**30:.2f}"]


def measured(settings: dict[str, Any], *, on_gpu: bool, small: bool) -> Measurement:
    """Train with some settings."""
    prompt_tokens, new_tokens = lengths(small)
    config = {
        "model_type": "llama",
        **(NARROW if small else WIDE),
        "num_attention_heads": 4 if small else 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    }
    chosen = {"reward": PythonFunction(rewards), **settings}
    module = GRPO(
        source=RandomCausalLM(config=config, alphabet=CHARACTERS),
        sampling=SamplingSettings(max_new_tokens=new_tokens, min_new_tokens=new_tokens),
        group_size=GROUP_SIZE,
        kl_coef=0.04,
        update_epochs=1,
        num_minibatches=1,
        old_log_probs=CurrentLogProbs(),
        micro_batch_tokens=16384,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-6, fused=True),
        **chosen,
    )
    measurement = Measurement(on_gpu)
    trainer = bare_trainer(
        measurement,
        accelerator="gpu" if on_gpu else "cpu",
        precision="bf16-mixed" if on_gpu else "32-true",
    )
    data = PromptDataModule(
        task=Noise(prompt_tokens),
        batch_size=PROMPTS,
        eval_batch_size=1,
        max_prompt_tokens=prompt_tokens,
    )
    trainer.fit(module, data)
    return measurement


def lengths(small: bool) -> tuple[int, int]:
    """Return tokens of a prompt and of a response."""
    return (16, 4) if small else (512, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--small", action="store_true", help="a tiny model and short texts")
    arguments = parser.parse_args()
    on_gpu = arguments.accelerator == "gpu"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("no GPU is here: run this on a machine with one, or try --accelerator cpu --small")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    rows = []
    for name, settings in SETTINGS.items():
        if not on_gpu and any(word in name for word in NEED_A_GPU):
            continue
        rows.append(
            measured(settings(), on_gpu=on_gpu, small=arguments.small).row(
                name, lengths(arguments.small)[1]
            )
        )
        print(" ".join(rows[-1]), flush=True)
    head = ["seconds", *STAGES.values(), "iteration", "generated tokens/s", "peak GiB"]
    place = environment(*PACKAGES)
    device = torch.cuda.get_device_name() if on_gpu else place["machine"]
    versions = ", ".join(f"{package} {number}" for package, number in place["versions"].items())
    command = shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    text = f"# GPU\n\n`{command}`, {place['date']}. {device}; {versions}.\n\n{table(head, rows)}\n"
    print(f"\n{text}")
    if on_gpu and not arguments.small:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
