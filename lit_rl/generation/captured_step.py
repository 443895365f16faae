"""The pass over one new token of every response, captured as a CUDA graph and replayed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_rl.generation.fixed_width_cache import FixedWidthCache
from lit_rl.models import Policy
from lit_rl.models.response_states import flat_states

WARM_UPS = 2
"""Runs before a capture, in which libraries allocate what they keep."""


class CapturedStep:
    """Logits of the next token of every response; captured whenever the number of them changes.

    Args:
        policy: the policy; its weights stay as and where they are.
        cache: the responses.
    """

    def __init__(self, policy: Policy, cache: FixedWidthCache) -> None:
        self.policy = policy
        self.cache = cache
        self._newest: Int[Tensor, " running"] | None = None
        self._replay: Callable[[], Tensor] | None = None

    def __call__(self, newest: Int[Tensor, " running"]) -> Float[Tensor, "running vocab"]:
        """Return the logits behind the newest token of each response.

        Args:
            newest: the tokens.

        Returns:
            Logits, which the next call overwrites.

        Raises:
            ValueError: for a model whose pass cannot be captured.
        """
        self.cache.step()
        if self._newest is None or len(self._newest) != len(newest):
            self._replay = None  # frees the memory of the graph before
            self._newest = newest.clone()
            self._replay = self._captured()
        assert self._replay is not None
        self._newest.copy_(newest)
        return self._replay()

    def _captured(self) -> Callable[[], Tensor]:
        try:
            return captured(self._logits, self.cache.prompt_of_place.device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(
                f"a pass of {type(self.policy.model).__name__} cannot be captured as a CUDA graph, "
                "as where it reads numbers back from the device or allocates on the host: use "
                "--model.generator.cuda_graphs false"
            ) from error

    def _logits(self) -> Float[Tensor, "running vocab"]:
        """Repeatable: writes what it has written before, as long as no further token begins."""
        assert self._newest is not None
        self.cache.forget_biases()
        states = flat_states(self.policy.base_model, self._newest, self.cache.positions, self.cache)
        return self.policy.head(states)


def captured(function: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Return what does on a device all that a function did there, to the same memory.

    Args:
        function: launches work on the current stream of the device without waiting for any; it is
            run a few times, and what it writes must not depend on how often.
        device: a CUDA device.

    Returns:
        Repeats the work and returns the result, the same tensor at every call.
    """
    with torch.cuda.device(device):
        stream, current = _side_stream(device), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as one that judges responses or watches NCCL, go on meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            result = function()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures of a process: cuBLAS keeps memory of its own for every stream."""
    return torch.cuda.Stream(device)


@contextmanager
def weights_cast_once(device: torch.device) -> Iterator[None]:
    """Under autocast, keep a cast weight for all passes meanwhile in place of one.

    For passes without gradient and between which no weight changes. A graph then reads the cast
    weights, and does not cast them at every replay.

    Args:
        device: where the weights are.
    """
    kind = device.type
    with torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=True,
    ):
        # What a pass outside of this one has kept may have another life.
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            torch.clear_autocast_cache()
