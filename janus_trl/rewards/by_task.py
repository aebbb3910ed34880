"""Rewards of a run of both tasks: each scores rows of the tasks that it fits, and gives None for the others."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from janus_trl.rewards.registry import REGISTERED_REWARDS, RewardSet, check_reward_specs, get_reward_funcs
from janus_trl.rewards.specs import RewardSpec, parse_reward_specs


def get_rewards_by_task(
    specs: Any, columns: Mapping[str, Iterable[str]], batch_size: int | None = None
) -> tuple[RewardSet, dict[str, list]]:
    """Build the rewards of a recipe for several tasks.

    A reward scores the task in its `task:` key; without one, every task that it fits: a registered reward says so
    itself, any other fits where the columns that it takes are there.

    Args:
        columns: columns of the data of each task.
        batch_size: see `get_reward_funcs`.

    Returns:
        The rewards, and the specs that score each task.

    Raises:
        ValueError: as `get_reward_funcs`, or a task that no reward scores.
    """
    parsed = parse_reward_specs(specs)
    tasks = [_fitting(spec, columns) for spec in parsed]
    by_task = {task: [spec for spec, fit in zip(parsed, tasks, strict=True) if task in fit] for task in columns}
    for task, scoring in by_task.items():
        if not scoring:
            fitting = [name for name, reward in REGISTERED_REWARDS.items() if task in reward.tasks]
            raise ValueError(f"reward_funcs has no reward for task '{task}'; add one of: {', '.join(fitting)}.")
    rewards = get_reward_funcs(parsed, batch_size=batch_size)
    functions = [_only(function, fit) for function, fit in zip(rewards.funcs, tasks, strict=True)]
    return RewardSet(functions, rewards.weights, rewards.loaders), by_task


def _fitting(spec: RewardSpec, columns: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    registered = REGISTERED_REWARDS.get(spec.name) if isinstance(spec.name, str) else None
    wanted = [spec.task] if spec.task else list(columns)
    if registered and not spec.task:
        wanted = [task for task in wanted if task in registered.tasks]
    fitting, refusal = [], None
    for task in wanted:
        try:
            check_reward_specs([spec], task, columns.get(task))
            fitting.append(task)
        except ValueError as error:
            if registered:  # it is meant for the task, so what it lacks has to be mended
                raise
            refusal = refusal or error
    if not fitting and refusal is not None:
        raise refusal
    return tuple(fitting)


def _only(function: Callable, tasks: tuple[str, ...]) -> Callable:
    """`function` for batches of `tasks`; a batch holds one task, which its column `task` names."""

    def scores(columns: dict[str, Any]) -> bool:
        return not columns.get("task") or columns["task"][0] in tasks

    if inspect.iscoroutinefunction(function):

        async def reward(completions, **columns):
            if not scores(columns):
                return [None] * len(completions)
            return await function(completions=completions, **columns)
    else:

        def reward(completions, **columns):
            return function(completions=completions, **columns) if scores(columns) else [None] * len(completions)

    reward.__name__ = reward.__qualname__ = function.__name__
    reward.__doc__ = function.__doc__
    reward.wrapped_reward = function  # what the guard asks for its model, and takes for checked
    return reward
