"""A reward written as a Python function."""

import asyncio
import difflib
import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress
from typing import Any

from lit_rl.rewards.base import Reward
from lit_rl.rewards.steps import Value
from lit_rl.types import Rollout

# What a function receives besides the columns of the data set; no column can have such a name.
ARGUMENTS = ("prompts", "responses", "answers", "finished", "response_ids")


@dataclass(frozen=True)
class PythonFunction(Reward):
    """The values that a function returns; a config names the function by its import path.

    The function is called once per rollout with keyword arguments: `prompts`, `responses`,
    `answers` (lists of str), `finished` (list of bool), `response_ids` (the ids of the tokens that
    count, a list per response: the positions of `Steps` are indices into it) and every column of
    the data set by its name, each a list with one entry per response. It receives those that its
    signature names, or all if it takes `**kwargs`. It returns one value per response, see `Reward`:
    a list, array or tensor. An `async` function is awaited.

    Args:
        function: a function, a method, or an object that can be called.
    """

    function: Callable[..., Sequence[Value] | Awaitable[Sequence[Value]]]

    @property
    def name(self) -> str:
        """The name of the function, or of the class of an object."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def check_columns(self, names: Collection[str]) -> None:
        """Refuse a function with a parameter that is no column of the data, nor in `ARGUMENTS`."""
        self._names({*ARGUMENTS, *names})

    def values(self, rollout: Rollout) -> Any:
        """Return what the function returns, unchecked."""
        result = self.function(**self._arguments(rollout))
        return _run(result) if inspect.isawaitable(result) else result

    def _arguments(self, rollout: Rollout) -> dict[str, Any]:
        available = {name: list(column) for name, column in rollout.columns.items()}
        rows = zip(rollout.response_ids.tolist(), rollout.mask.tolist(), strict=True)
        available |= {
            "prompts": list(rollout.prompts),
            "responses": list(rollout.responses),
            "answers": list(rollout.answers),
            "finished": rollout.finished.tolist(),
            "response_ids": [list(compress(ids, mask)) for ids, mask in rows],
        }
        return {name: available[name] for name in self._names(available)}

    def _names(self, available: Collection[str]) -> list[str]:
        """Return the arguments that the function takes.

        Raises:
            ValueError: for a parameter that is not available.
        """
        parameters = inspect.signature(self.function).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return [*available]
        for parameter in parameters:
            if parameter.default is parameter.empty and parameter.name not in available:
                near = difflib.get_close_matches(parameter.name, available, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(
                    f"{self.name} has a parameter {parameter.name}, but there are only "
                    f"{', '.join(sorted(available))}{hint}"
                )
        return [parameter.name for parameter in parameters if parameter.name in available]


def _run(awaitable: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        return await awaitable

    if not _in_a_loop():
        return asyncio.run(wait())
    # The loop of this thread, as in a notebook, cannot be entered twice.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, wait()).result()


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
