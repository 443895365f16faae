"""One rollout that both trainers learn from, to compare their losses and gradients."""

import math
import random
from collections.abc import Iterable

import torch
from torch import nn

from compare.workloads import Workload

RELATIVE = {"loss": 1e-5, "gradient norm": 1e-4}
"""Allowed difference, as a part of the number; SmolLM2 in float32 has up to 3e-6 and 7e-6."""
ABSOLUTE = 1e-6
"""Allowed difference of a small number: the advantages are of the order of 1 and add up to 0."""


def response_ids(workload: Workload, vocab: int) -> list[list[list[int]]]:
    """Return responses of random tokens and lengths: by prompt, by place in the group."""
    numbers = random.Random(0)
    longest = workload.max_new_tokens
    return [
        [
            [numbers.randrange(3, vocab) for _ in range(numbers.randint(2, longest))]
            for _ in range(workload.group_size)
        ]
        for _ in range(workload.num_prompts)
    ]


@torch.no_grad()
def perturb(parameters: Iterable[nn.Parameter]) -> None:
    """Move the policy away from its reference, so that the KL is not 0."""
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        parameter *= 1 + 0.05 * torch.randn(parameter.shape, generator=generator)


def check_agreement(trl: dict[str, float], lit_rl: dict[str, float]) -> None:
    """Compare loss and gradient norm of one update on the same rollout.

    Raises:
        RuntimeError: if they differ: the two would not do the same work.
    """
    for name, allowed in RELATIVE.items():
        if not math.isclose(lit_rl[name], trl[name], rel_tol=allowed, abs_tol=ABSOLUTE):
            raise RuntimeError(
                f"on the same rollout the {name} of TRL is {trl[name]}, that of lit_rl "
                f"{lit_rl[name]}: they differ by more than {allowed} of it"
            )
