"""The registered rewards, and everything from a recipe's `reward_funcs` to callables with weights."""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from janus_trl.rewards.calling import named_parameters, readable_name, unique_name, wrap_reward, wrapped_reward
from janus_trl.rewards.placement import outside_zero_init
from janus_trl.rewards.self_test import check_on_pictures
from janus_trl.rewards.specs import RewardSpec, parse_reward_specs, suggest
from janus_trl.rewards.targets import check_args, check_parameters, import_target, missing_columns

TASKS = ("t2i", "i2t")


@dataclass(frozen=True)
class RegisteredReward:
    """A reward known by name.

    Attributes:
        target: `module:function` or `module:Class` (whose instances are called), imported on first use.
        tasks: The tasks it can score.
        columns: Data columns that it needs.
        rows_check: Optional `module:function`, called with the data set before training.
    """

    target: str
    tasks: tuple[str, ...]
    columns: tuple[str, ...] = ()
    rows_check: str | None = None


LATIN = "janus_trl.rewards.captions:check_rows"

REGISTERED_REWARDS: dict[str, RegisteredReward] = {
    "tiny_world": RegisteredReward("janus_trl.rewards.tiny_world:tiny_world_reward", ("t2i",), ("demands",)),
    "pickscore": RegisteredReward("janus_trl.rewards.pickscore:PickScore", ("t2i",), rows_check=LATIN),
    "hps_v2": RegisteredReward("janus_trl.rewards.hps_v2:HPSv2", ("t2i",), rows_check=LATIN),
    "clip_score": RegisteredReward("janus_trl.rewards.clip_score:ClipScore", ("t2i",), rows_check=LATIN),
    "aesthetic": RegisteredReward("janus_trl.rewards.aesthetic:Aesthetic", ("t2i",)),
    "multiple_choice": RegisteredReward(
        "janus_trl.rewards.multiple_choice:multiple_choice_reward",
        ("i2t",),
        ("answer",),
        rows_check="janus_trl.rewards.multiple_choice:check_rows",
    ),
    "format": RegisteredReward("janus_trl.rewards.format:FormatReward", ("t2i", "i2t")),
    "numeric": RegisteredReward(
        "janus_trl.rewards.numeric:NumericReward",
        ("i2t",),
        ("answer",),
        rows_check="janus_trl.rewards.numeric:check_rows",
    ),
    "vlm_judge": RegisteredReward("janus_trl.rewards.vlm_judge:VLMJudge", ("t2i",)),
    "geneval": RegisteredReward(
        "janus_trl.rewards.geneval:GenEval",
        ("t2i",),
        ("include",),
        rows_check="janus_trl.rewards.geneval:check_rows",
    ),
    "ocr": RegisteredReward("janus_trl.rewards.ocr:OCR", ("t2i",), rows_check="janus_trl.rewards.ocr:check_rows"),
    "jpeg_size": RegisteredReward("janus_trl.rewards.jpeg_size:JpegSize", ("t2i",)),
}


@dataclass(frozen=True)
class RewardSet:
    """Reward functions with their weights, in the order of the recipe; names are `funcs[i].__name__`, all different."""

    funcs: list[Callable]
    weights: list[float]
    loaders: tuple[Callable[[], None], ...] = ()

    @property
    def names(self) -> list[str]:
        """The names under which TRL logs `rewards/<name>/mean`."""
        return [function.__name__ for function in self.funcs]

    def load(self) -> None:
        """Load the reward models now (else: at their first call). To be called once the policy is on its device.

        Rewards with a true attribute `self_test` then score a blank and a noise picture.

        Raises:
            ValueError: A model cannot be loaded, or a score is missing, not finite, or the same for both pictures.
        """
        with outside_zero_init():  # a detector of the user's own, too
            for loader in self.loaders:
                loader()
        for function in self.funcs:
            if getattr(wrapped_reward(function), "self_test", False):
                check_on_pictures(function)


def get_reward_funcs(
    specs: Any,
    task: str | None = None,
    columns: Iterable[str] | None = None,
    batch_size: int | None = None,
) -> RewardSet:
    """Build the rewards of a recipe. Reward models are not loaded yet: see `RewardSet.load`.

    Args:
        specs: One entry or a list: a registered name, a path (`my_pkg.mod.fn` or `module:function`, importable from the
            working folder), a mapping `{name, weight, alias, args}`, or a function.
        task: `t2i` or `i2t`; None skips the check that the rewards fit it.
        columns: Columns of the data set; None skips the check that the needed ones are present.
        batch_size: For rewards that have an argument `batch_size` and are not given one.

    Raises:
        ValueError: Unknown names, keys or arguments (with the valid ones and the nearest), values of a wrong type, a
            reward that does not fit the task, a missing column (with the columns present).
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(
            f"reward_batch_size = {batch_size} must be at least 1, or unset for each reward's own default."
        )
    parsed = parse_reward_specs(specs)
    present = None if columns is None else list(columns)
    functions = [_resolve(spec, task, present, batch_size) for spec in parsed]
    names = _names(parsed, functions)
    return RewardSet(
        funcs=[wrap_reward(function, name) for function, name in zip(functions, names, strict=True)],
        weights=[spec.weight for spec in parsed],
        loaders=tuple(function.load for function in functions if callable(getattr(function, "load", None))),
    )


def check_reward_specs(specs: Any, task: str | None = None, columns: Iterable[str] | None = None) -> None:
    """Check `reward_funcs` before anything heavy is loaded; same arguments and errors as `get_reward_funcs`.

    Imports the modules that the rewards live in, and loads no weights.
    """
    get_reward_funcs(specs, task, columns)


def check_reward_rows(specs: Any, dataset: Any) -> None:
    """Let the registered rewards look at the rows they will score, before training.

    Raises:
        ValueError: From a reward's own check, for example too many answers that cannot be read.
    """
    registered = filter(None, map(_registered, parse_reward_specs(specs)))
    for path in dict.fromkeys(reward.rows_check for reward in registered if reward.rows_check):
        import_target(path, REGISTERED_REWARDS)(dataset)


def _registered(spec: RewardSpec) -> RegisteredReward | None:
    return REGISTERED_REWARDS.get(spec.name) if isinstance(spec.name, str) else None


def _names(specs: list[RewardSpec], functions: list[Callable]) -> list[str]:
    """One name for each reward, all different: the alias, or what it is called, with a number where that is taken."""
    names: list[str] = []
    for spec, function in zip(specs, functions, strict=True):
        taken = names + [other.alias for other in specs if other.alias]
        base = spec.name if _registered(spec) else readable_name(function)
        names.append(spec.alias or unique_name(base, taken))
    return names


def _resolve(spec: RewardSpec, task: str | None, columns: list[str] | None, batch_size: int | None) -> Callable:
    if task is not None and task not in TASKS:
        raise ValueError(f"task is {task!r}; {suggest(str(task), TASKS)}")
    registered = _registered(spec)
    label = spec.name if isinstance(spec.name, str) else readable_name(spec.name)
    if registered:
        _check_fit(label, registered, task, columns)
        target = import_target(registered.target, REGISTERED_REWARDS)
    else:
        target = spec.name if callable(spec.name) else import_target(spec.name, REGISTERED_REWARDS)
    asked = spec.args
    if batch_size is not None and "batch_size" in named_parameters(target):
        asked = {"batch_size": batch_size, **asked}
    args = check_args(label, target, asked)
    # A class is built with the arguments, a function keeps them until it is called.
    if inspect.isclass(target):
        with outside_zero_init():  # it may load its model at once
            function = target(**args)
    else:
        function = functools.partial(target, **args) if args else target
    if not callable(function):
        raise ValueError(f"reward '{label}': instances of {target.__name__} cannot be called; define `__call__`.")
    check_parameters(label, function, task, columns)
    return function


def _check_fit(label: str, registered: RegisteredReward, task: str | None, columns: list[str] | None) -> None:
    if task is not None and task not in registered.tasks:
        fitting = [name for name, other in REGISTERED_REWARDS.items() if task in other.tasks]
        raise ValueError(
            f"reward '{label}' does not fit task '{task}': it scores {' and '.join(registered.tasks)}. "
            f"Rewards for '{task}': {', '.join(fitting)}."
        )
    missing = [column for column in registered.columns if columns is not None and column not in columns]
    if missing:
        raise ValueError(missing_columns(label, missing, columns or []))
