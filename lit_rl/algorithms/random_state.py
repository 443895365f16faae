"""The global random numbers, which a reward or a model with dropout may draw from.

Sampling and the order of the data do not: they are seeded by iteration.
"""

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import distributed


def random_states(device: torch.device) -> list[dict[str, Any]]:
    """Return the states of all generators of each rank; every rank has to join.

    Args:
        device: that of this rank, whose generator is stored where it is an accelerator of CUDA.
    """
    state: Any = np.random.get_state()
    kind, keys, *rest = state
    own = {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],  # plain numbers, which weights_only loads
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    if not (distributed.is_available() and distributed.is_initialized()):
        return [own]
    states: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(states, own)
    return states


def restore_random_states(
    states: list[dict[str, Any]], *, rank: int, world_size: int, device: torch.device
) -> None:
    """Go on with the random numbers of this rank; those of other ranks in number mean nothing."""
    if len(states) != world_size:
        rank_zero_warn(
            f"the checkpoint was written by {len(states)} ranks, this run has {world_size}: what "
            "draws from the global random numbers, such as dropout, draws others than it would have"
        )
        return
    own = states[rank]
    random.setstate(own["python"])
    np.random.set_state(tuple(own["numpy"]))
    torch.set_rng_state(own["torch"].cpu())
    if device.type == "cuda" and "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"].cpu(), device)
