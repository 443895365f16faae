"""A reward in processes of its own, which can be ended."""

import os
import pickle
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

from lit_rl.rewards.base import Reward
from lit_rl.rewards.checked_scores import shown
from lit_rl.rewards.keeper import Settings
from lit_rl.rewards.on_error import OnError, check_on_error, with_failures
from lit_rl.rewards.steps import Value
from lit_rl.rewards.weighted_sum import WeightedSum
from lit_rl.rewards.worker_pool import WorkerPool
from lit_rl.types import Rollout


@dataclass(frozen=True)
class InWorkers(Reward):
    """Another reward, in worker processes with a limit of time and memory for each response.

    It may loop for ever, crash, exit or fill the memory: that fails one response, and the next one
    finds a new worker. A process that it starts is ended at the latest when the response is judged,
    but for those that its `setup` starts. All processes end with the run, also one that is killed.

    The reward is asked about one response at a time, on the CPU, so one that compares responses
    with each other does not fit. What it remembers, it remembers per worker. It is sent by pickle:
    it and the functions and classes that it names stand in modules that can be imported, not in the
    script that runs. Parts of a `WeightedSum` are wrapped one by one.

    Args:
        reward: what judges.
        num_workers: processes, on each rank.
        timeout_seconds: longest time for one response; the `setup` of the reward does not count.
        memory_limit_mib: what each process may allocate for one response, in MiB, beyond what it
            has when the reward is set up; None: no limit. It needs Linux.
        on_error: what happens when judging a response fails. `raise`: the run ends with an error
            that names the response. `exclude`: the response is missing, see `Failed`, and a warning
            says so the first time.

    Raises:
        ValueError: for a setting outside its range, a `WeightedSum`, and in `setup` for a reward
            that pickle cannot send or that does not get ready in a worker.
    """

    reward: Reward
    num_workers: int = 1
    timeout_seconds: float = 10.0
    memory_limit_mib: int | None = 1024
    on_error: OnError = "raise"

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"num_workers is {self.num_workers}, must be at least 1, such as 4")
        if not 0 < self.timeout_seconds < float("inf"):
            raise ValueError(f"timeout_seconds is {self.timeout_seconds}, must be above 0, as 10.0")
        if self.memory_limit_mib is not None and self.memory_limit_mib < 1:
            raise ValueError(
                f"memory_limit_mib is {self.memory_limit_mib}, must be at least 1, such as 1024; "
                "null for no limit"
            )
        check_on_error(self.on_error)
        if isinstance(self.reward, WeightedSum):
            raise ValueError(
                "InWorkers takes one reward, not a WeightedSum: let the parts of the sum be "
                "InWorkers, such as parts: {right: InWorkers(reward=MathEquivalence)}"
            )
        check_system(self.memory_limit_mib)

    @property
    def name(self) -> str:
        """The name of the reward."""
        return self.reward.name

    @property
    def models(self) -> dict[str, str]:
        """Those of the reward, as the workers have read them."""
        return self._pool.models

    def setup(self) -> None:
        """Start the workers and set the reward up in each of them."""
        self._pool.start()

    def check_columns(self, names: Collection[str]) -> None:
        """Let the reward refuse what it cannot read, in this process."""
        self.reward.check_columns(names)

    def teardown(self) -> None:
        """End the workers."""
        self._pool.end()

    def begin(self, rollout: Rollout) -> Callable[[], list[Value]]:
        """Let the workers judge while this process does other work; see `Reward`."""
        values = self._pool.begin(rollout)
        return lambda: with_failures(values(), rollout, self.on_error)

    def values(self, rollout: Rollout) -> list[Value]:
        """Return what the reward gives each response, or that it failed."""
        return self.begin(rollout)()

    @cached_property
    def _pool(self) -> WorkerPool:
        try:
            reward = pickle.dumps(self.reward)
        except Exception as error:
            raise ValueError(
                f"the reward {self.name} cannot be sent to a worker process: {shown(error)}. What "
                "it holds must be importable by name: a function or class at the top of a module, "
                "no lambda and nothing that is open, such as a file; `setup` may open it"
            ) from error
        return WorkerPool(
            Settings(
                self.name, reward, self.num_workers, self.timeout_seconds, self.memory_limit_mib
            )
        )


def check_system(memory_limit_mib: int | None) -> None:
    """Refuse a system on which workers, or their limit of memory, do not work.

    Raises:
        ValueError: if it has no fork; if there is a limit and it is not Linux.
    """
    if not hasattr(os, "fork"):
        raise ValueError(f"worker processes need fork, as on Linux, which {sys.platform} lacks")
    if memory_limit_mib is not None and sys.platform != "linux":
        raise ValueError(
            f"memory_limit_mib {memory_limit_mib} needs Linux and this is {sys.platform}: set it "
            "to null"
        )
