"""Calls the rewards of a step side by side, and keeps what goes wrong until all ranks can hear of it.

Raised at once, an exception would leave the other ranks in TRL's gather of the rewards, until a time-out with another
message. TRL gets numbers: infinity marks a NaN or infinity that a reward returned, minus infinity a row that it failed
to score. `settle` turns both into what is trained on and what is said.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from trl.trainer.utils import is_async_callable

from .rewards.calling import (
    Scores,
    check_values,
    completion_text,
    readable_name,
    unique_name,
    wrap_reward,
    wrapped_reward,
)
from .rewards.event_loop import submit
from .rewards.placement import Placement
from .rewards.targets import check_parameters

logger = logging.getLogger(__name__)

NOT_FINITE, FAILED = math.inf, -math.inf
SEARCH_SECONDS = 5.0  # spent on finding the row that made a reward raise


@dataclass
class Outcome:
    """What one call of a reward came to.

    Attributes:
        values: One number or None per row, with faults and counts.
        seconds: Wall time of the call.
        error: What it raised.
        failed: Rows without a value because it raised, ran out of time, or says so in `Scores.failed`.
        timed_out: Whether the time limit cut it off.
        note: Row and error for a message; empty if nothing was raised.
    """

    values: Scores
    seconds: float
    error: BaseException | None = None
    failed: tuple[int, ...] = ()
    timed_out: bool = False
    note: str = ""

    def for_trl(self) -> list[float | None]:
        """The values with the marks of `settle`."""
        values = [NOT_FINITE if row in self.values.faults else value for row, value in enumerate(self.values)]
        return [FAILED if row in self.failed else value for row, value in enumerate(values)]


class GuardedReward:
    """One reward as TRL calls it: never raises, never `async`; the first of a step's rewards runs all of them."""

    def __init__(self, function: Callable, name: str, calls: "RewardCalls"):
        self.function, self.calls = function, calls
        self.__name__ = name
        self.outcome: Outcome | None = None
        self._call = function if hasattr(function, "wrapped_reward") else wrap_reward(function, name)
        self.is_async = is_async_callable(self._call)
        placement = getattr(wrapped_reward(function), "placement", None)
        # A model on the CPU leaves the GPU to the others; what is not known to be one stays in this thread.
        self.beside = isinstance(placement, Placement) and placement.target.type == "cpu"

    def __call__(self, **arguments: Any) -> list[float | None]:
        if self is self.calls.rewards[0]:
            self.calls.run(arguments)
        elif self.outcome is None:
            self.outcome = self.score(arguments)
        return self.outcome.for_trl()

    def score(self, arguments: dict[str, Any]) -> Outcome:
        """Call a function that is not `async`."""
        start = time.perf_counter()
        try:
            values = check_values(self.__name__, self._call(**arguments), len(arguments["completions"]))
        except Exception as error:  # raised again, or counted, by `settle`
            return self._failure(arguments, start, error)
        return Outcome(values, time.perf_counter() - start, failed=values.failed)

    async def score_async(self, arguments: dict[str, Any], timeout: float | None) -> Outcome:
        """Await an `async` function, for `timeout` seconds at most."""
        start = time.perf_counter()
        task = asyncio.ensure_future(self._call(**arguments))
        done, _ = await asyncio.wait({task}, timeout=timeout)
        if not done:
            task.cancel()
            return self._failure(arguments, start)
        try:
            values = check_values(self.__name__, task.result(), len(arguments["completions"]))
        except (Exception, asyncio.CancelledError) as error:
            return self._failure(arguments, start, error)
        return Outcome(values, time.perf_counter() - start, failed=values.failed)

    def _failure(self, arguments: dict[str, Any], start: float, error: BaseException | None = None) -> Outcome:
        rows = len(arguments["completions"])
        spent = time.perf_counter() - start
        scores = Scores([None] * rows, counts=getattr(error, "counts", None))
        return Outcome(scores, spent, error, tuple(range(rows)), timed_out=error is None)

    def score_rows(self, arguments: dict[str, Any], until_first: bool) -> None:
        """After an exception: score row by row for a few seconds, which tells the rows that raise.

        An exception with an attribute `row` (None: no row of its own) is not searched for.
        """
        outcome, deadline = self.outcome, time.perf_counter() + SEARCH_SECONDS
        raising, scored = [], {}
        for row in outcome.failed:
            if (left := deadline - time.perf_counter()) <= 0 or (raising and until_first):
                break
            one = one_row(arguments, row)
            alone = self.calls.wait(self.score_async(one, left)) if self.is_async else self.score(one)
            if alone.error is not None:
                raising.append(row)
            elif not alone.timed_out:
                scored[row] = alone.values
        if raising:
            outcome.error.row = raising[0]
        if not until_first:
            outcome.failed = tuple(row for row in outcome.failed if row not in scored or scored[row].failed)
            outcome.values = Scores(
                [scored[row][0] if row in scored else None for row in range(len(outcome.values))],
                {row: values.faults[0] for row, values in scored.items() if values.faults},
            )


class RewardCalls:
    """The rewards of one trainer, and how they are called.

    Args:
        on_error: `raise` ends the run on all ranks, `none` leaves the rows that raise out of training.
        timeout: Seconds for each call of an `async` reward; None for no limit.
    """

    def __init__(self, on_error: str = "raise", timeout: float | None = None):
        self.on_error, self.timeout = on_error, timeout
        self.rewards: list[GuardedReward] = []
        self._said: set[tuple[str, str]] = set()

    def run(self, arguments: dict[str, Any]) -> None:
        """Call all rewards: `async` ones together, those on the CPU in a thread beside those that are not."""
        waiting = [(r, submit(r.score_async(arguments, self.timeout))) for r in self.rewards if r.is_async]
        here = [reward for reward in self.rewards if not reward.is_async and not reward.beside]
        beside = [reward for reward in self.rewards if not reward.is_async and reward.beside]
        with ThreadPoolExecutor(1) as pool:
            waiting += [(reward, pool.submit(reward.score, arguments)) for reward in beside if here]
            for reward in here or beside:
                reward.outcome = reward.score(arguments)
            for reward, future in waiting:
                reward.outcome = future.result()
        for reward in self.rewards:
            error = reward.outcome.error
            if error is not None and not hasattr(error, "row") and not isinstance(error, torch.OutOfMemoryError):
                reward.score_rows(arguments, until_first=self.on_error == "raise")
            self._say(reward, arguments)

    def _say(self, reward: GuardedReward, arguments: dict[str, Any]) -> None:
        """Keep what is to be raised, and warn once of what is only counted."""
        outcome, name = reward.outcome, reward.__name__
        if outcome.error is not None:
            row = getattr(outcome.error, "row", None)
            where = "" if row is None else f", row {row}{shown_prompt(arguments, row)}"
            outcome.note = f"{where}: {type(outcome.error).__name__}: {outcome.error}"
        for row, value in outcome.values.faults.items():
            self._once(
                name,
                "nan",
                f"returned {value} for row {row}{shown_prompt(arguments, row)}: such rows are not trained on",
            )
        if outcome.timed_out:
            self._once(
                name, "timeouts", f"took longer than reward_timeout = {self.timeout} s: its rows are not trained on"
            )
        if outcome.error is not None and self.on_error != "raise":
            self._once(name, "errors", f"failed{outcome.note}: such rows are not trained on")

    def _once(self, name: str, kind: str, message: str) -> None:
        if (name, kind) not in self._said:
            self._said.add((name, kind))
            logger.warning("reward '%s' %s (counted in rewards/%s/%s; said once).", name, message, name, kind)

    def wait(self, coroutine: Coroutine) -> Any:
        """The result of a coroutine on the loop of the `async` rewards."""
        return submit(coroutine).result()


def guard(
    functions: Sequence[Callable],
    on_error: str = "raise",
    timeout: float | None = None,
    task: str | None = None,
    columns: Sequence[str] | None = None,
) -> list[GuardedReward]:
    """The rewards as TRL is to call them, with readable names that differ.

    Args:
        functions: Of `get_reward_funcs`, or plain functions.
        on_error, timeout: See `RewardCalls`.
        task, columns: Of the data; plain functions are checked against them.

    Raises:
        ValueError: A reward that is no function (a name, a network), or needs a column that is not there.
    """
    calls = RewardCalls(on_error, timeout)
    names: list[str] = []
    for function in functions:
        if isinstance(function, str | torch.nn.Module) or not callable(function):
            kind = f"the name {function!r}" if isinstance(function, str) else f"a {type(function).__name__}"
            raise ValueError(
                f"reward_funcs holds {kind}, where a function is needed. Build rewards by name with "
                "janus_trl.rewards.get_reward_funcs(...).funcs; call a network from a function that owns it."
            )
        names.append(unique_name(readable_name(function), names))
        if not hasattr(function, "wrapped_reward"):
            check_parameters(names[-1], function, task, None if columns is None else list(columns))
        calls.rewards.append(GuardedReward(function, names[-1], calls))
    return calls.rewards


def one_row(arguments: dict[str, Any], row: int) -> dict[str, Any]:
    """The arguments of one row; what a call would log is dropped."""
    rows = len(arguments["completions"])
    one = {k: [v[row]] if isinstance(v, list) and len(v) == rows else v for k, v in arguments.items()}
    return one | {name: _log_nothing for name in ("log_extra", "log_metric") if name in one}


def _log_nothing(*_: Any) -> None:
    """Stands in for TRL's `log_extra` and `log_metric`."""


def shown_prompt(arguments: dict[str, Any], row: int) -> str:
    """The prompt of a row for a message, cut to 60 characters."""
    prompt = arguments["prompts"][row]
    text = prompt if isinstance(prompt, str) else completion_text(prompt[-1:])
    return f" (prompt {text!r:.60})"
