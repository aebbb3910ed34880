"""How one reward function is called, and what it may return."""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

# What GRPOTrainer passes by keyword beside the data columns (TRL 1.16, `_calculate_rewards`).
TRAINER_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
# What the image rollout adds.
IMAGE_ARGUMENTS = ("generated_images",)

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Scores(list):
    """The values of a reward, one number or None per completion, and what is to be told beside them.

    Attributes:
        faults: row -> the NaN or infinity that the reward returned there; the value in the list is None.
        counts: what to log, summed over all ranks, as `rewards/<name>/<key>`.
        failed: rows that the reward applies to and could not score (a call that failed): unlike other rows with None
            they are not trained on, since the sum without this reward would stand below that of the group.
    """

    def __init__(
        self,
        values=(),
        faults: dict[int, float] | None = None,
        counts: dict[str, float] | None = None,
        failed: Sequence[int] = (),
    ):
        super().__init__(values)
        self.faults, self.counts, self.failed = dict(faults or {}), dict(counts or {}), tuple(failed)


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """Text of a completion, given as a string or as messages `[{"role": "assistant", "content": ...}]`."""
    if isinstance(completion, str):
        return completion
    parts: list[str] = []
    for message in completion:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text") or "" for part in content)
        parts.append(content)
    return "".join(parts)


def named_parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """Parameters of `function` that can be passed by keyword."""
    return {name: p for name, p in inspect.signature(function).parameters.items() if p.kind in _NAMED}


def takes_any_keyword(function: Callable) -> bool:
    """Whether `function` has a `**columns` parameter."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def readable_name(function: Callable) -> str:
    """A name for metrics: partials and callable objects have no `__name__` of their own."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None) or type(function).__name__
    return name.strip("<>")  # "<lambda>" would break file names and trackers


def unique_name(base: str, taken: Sequence[str]) -> str:
    """`base`, or `base_2`, `base_3`, … where that is taken."""
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    return name


def wrap_reward(function: Callable, name: str) -> Callable:
    """Wrap a reward so that it gets only what it declares and returns one checked value per completion.

    Args:
        function: The reward; without `**columns` it receives only the arguments that it declares. May be `async`.
        name: Becomes `__name__`, under which TRL logs `rewards/<name>/mean`.

    Returns:
        A function of keyword arguments returning `Scores` with one entry per completion; the reward itself is in its
        attribute `wrapped_reward`.

    Raises:
        ValueError: From the wrapped call, when the values break the contract (see `check_values`).
    """
    accepted = None if takes_any_keyword(function) else set(named_parameters(function))
    bound = set(function.keywords) if isinstance(function, functools.partial) else set()

    def select(arguments: dict[str, Any]) -> dict[str, Any]:
        # A value set in the recipe wins over a data column of the same name.
        return {k: v for k, v in arguments.items() if k not in bound and (accepted is None or k in accepted)}

    inner = wrapped_reward(function)
    if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__):

        async def reward(prompts: list, completions: list, completion_ids: list | None = None, **columns: Any):
            arguments = dict(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
            return check_values(name, await function(**select(arguments)), len(completions))
    else:

        def reward(prompts: list, completions: list, completion_ids: list | None = None, **columns: Any):
            arguments = dict(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
            return check_values(name, function(**select(arguments)), len(completions))

    reward.__name__ = reward.__qualname__ = name
    reward.__doc__ = function.__doc__
    reward.wrapped_reward = function
    return reward


def wrapped_reward(function: Callable) -> Callable:
    """The reward inside `wrap_reward` and `functools.partial`."""
    while isinstance(function, functools.partial) or hasattr(function, "wrapped_reward"):
        function = function.func if isinstance(function, functools.partial) else function.wrapped_reward
    return function


def check_values(name: str, values: Any, expected: int) -> Scores:
    """Check what a reward returned: one number or None for each of `expected` completions.

    NaN and infinity are faults: they become None in the values, and stand in `Scores.faults`.

    Raises:
        ValueError: A single value, a wrong number of values, a nested list, a tensor that is not one-dimensional,
            something that is not a number. The message names the reward, what it returned and the row.
    """
    faults, counts, failed = (getattr(values, name, ()) for name in ("faults", "counts", "failed"))
    rule = f"expected a list of {expected} numbers (or None), one per completion"
    if hasattr(values, "shape"):  # tensor or array
        if len(values.shape) != 1:
            raise ValueError(f"reward '{name}' returned values of shape {tuple(values.shape)}; {rule}.")
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise ValueError(f"reward '{name}' returned {_describe(values)}; {rule}.")
    if len(values) != expected:
        raise ValueError(f"reward '{name}' returned {len(values)} values; {rule}.")
    numbers = [_check_value(name, row, value) for row, value in enumerate(values)]
    found = {row: number for row, number in enumerate(numbers) if number is not None and not math.isfinite(number)}
    return Scores([None if i in found else n for i, n in enumerate(numbers)], {**dict(faults), **found}, counts, failed)


def _check_value(name: str, row: int, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, str) or len(getattr(value, "shape", ())) > 0 or not hasattr(type(value), "__float__"):
        raise ValueError(
            f"reward '{name}' returned {_describe(value)} for row {row}; expected a number, or None if unscorable."
        )
    return float(value)


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape) > 0:
        return f"values of shape {tuple(shape)}"
    if isinstance(value, list | tuple):
        return f"a nested {type(value).__name__} {value!r:.60}"
    return f"a single {type(value).__name__} {value!r:.60}"
