"""The registered rewards, and everything from a recipe's `reward_funcs` to callables with weights."""

import functools
import importlib
import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from janus_trl.rewards.calling import (
    IMAGE_ARGUMENTS,
    TRAINER_ARGUMENTS,
    named_parameters,
    readable_name,
    takes_any_keyword,
    wrap_reward,
)
from janus_trl.rewards.specs import RewardSpec, coerce, parse_reward_specs, suggest

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


REGISTERED_REWARDS: dict[str, RegisteredReward] = {
    "tiny_world": RegisteredReward("janus_trl.rewards.tiny_world:tiny_world_reward", ("t2i",), ("demands",)),
    "pickscore": RegisteredReward(
        "janus_trl.rewards.pickscore:PickScore", ("t2i",), rows_check="janus_trl.rewards.pickscore:check_rows"
    ),
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
        """Load the reward models now (else: at their first call). To be called once the policy is on its device."""
        for loader in self.loaders:
            loader()


def get_reward_funcs(specs: Any, task: str | None = None, columns: Iterable[str] | None = None) -> RewardSet:
    """Build the rewards of a recipe. Reward models are not loaded yet: see `RewardSet.load`.

    Args:
        specs: One entry or a list: a registered name, a path (`my_pkg.mod.fn` or `module:function`, importable from the
            working folder), a mapping `{name, weight, args}`, or a function.
        task: `t2i` or `i2t`; None skips the check that the rewards fit it.
        columns: Columns of the data set; None skips the check that the needed ones are present.

    Raises:
        ValueError: Unknown names, keys or arguments (with the valid ones and the nearest), values of a wrong type, a
            reward that does not fit the task, a missing column (with the columns present).
    """
    parsed = parse_reward_specs(specs)
    functions = [_resolve(spec, task, None if columns is None else list(columns)) for spec in parsed]
    names: list[str] = []
    for spec, function in zip(parsed, functions, strict=True):
        names.append(_unique(spec.name if _registered(spec) else readable_name(function), names))
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
    for spec in parse_reward_specs(specs):
        registered = _registered(spec)
        if registered and registered.rows_check:
            _import_target(registered.rows_check)(dataset)


def _registered(spec: RewardSpec) -> RegisteredReward | None:
    return REGISTERED_REWARDS.get(spec.name) if isinstance(spec.name, str) else None


def _resolve(spec: RewardSpec, task: str | None, columns: list[str] | None) -> Callable:
    if task is not None and task not in TASKS:
        raise ValueError(f"task is {task!r}; {suggest(str(task), TASKS)}")
    registered = _registered(spec)
    label = spec.name if isinstance(spec.name, str) else readable_name(spec.name)
    if registered:
        _check_fit(label, registered, task, columns)
        target = _import_target(registered.target)
    else:
        target = spec.name if callable(spec.name) else _import_target(spec.name)
    args = _check_args(label, target, spec.args)
    # A class is built with the arguments, a function keeps them until it is called.
    function = target(**args) if inspect.isclass(target) else functools.partial(target, **args) if args else target
    if not callable(function):
        raise ValueError(f"reward '{label}': instances of {target.__name__} cannot be called; define `__call__`.")
    _check_parameters(label, function, task, columns)
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
        raise ValueError(_missing_columns(label, missing, columns or []))


def _check_args(label: str, target: Callable, args: dict[str, Any]) -> dict[str, Any]:
    parameters = named_parameters(target)
    valid = [name for name in parameters if name not in TRAINER_ARGUMENTS + IMAGE_ARGUMENTS]
    hints = _type_hints(target)
    checked = {}
    for name, value in args.items():
        if name not in valid:
            raise ValueError(f"reward '{label}': unknown argument '{name}'; {suggest(str(name), valid)}")
        checked[name] = coerce(value, hints.get(name, Any), f"reward '{label}': argument '{name}'")
    if inspect.isclass(target):
        missing = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and n not in checked]
        if missing:
            raise ValueError(f"reward '{label}': missing argument '{missing[0]}'; set it under `args:`.")
    return checked


def _type_hints(target: Callable) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError):  # names imported for type checkers only, or no annotations at all
        return {}


def _check_parameters(label: str, function: Callable, task: str | None, columns: list[str] | None) -> None:
    """Check that every parameter without a default will be passed by the trainer or by a column."""
    bound = set(function.keywords) if isinstance(function, functools.partial) else set()
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ValueError(f"reward '{label}': parameter '{name}' is positional-only; rewards are called by keyword.")
        if name in named_parameters(function) and parameter.default is inspect.Parameter.empty and name not in bound:
            required.append(name)
    if task == "i2t" and any(name in IMAGE_ARGUMENTS for name in required):
        raise ValueError(f"reward '{label}' does not fit task 'i2t': it needs generated_images, which only t2i makes.")
    passed = set(TRAINER_ARGUMENTS + IMAGE_ARGUMENTS)
    missing = [name for name in required if name not in passed and name not in (columns or ())]
    if missing and columns is not None:
        raise ValueError(_missing_columns(label, missing, columns))
    if not takes_any_keyword(function) and not named_parameters(function):
        raise ValueError(f"reward '{label}' takes no arguments; it needs at least `completions`.")


def _missing_columns(label: str, missing: list[str], columns: list[str]) -> str:
    wanted = ", ".join(f"'{name}'" for name in missing)
    return f"reward '{label}' needs the column {wanted}, which the data set lacks; {suggest(missing[0], columns)}"


def _import_target(path: str) -> Any:
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not attribute:
        raise ValueError(
            f"unknown reward '{path}'; {suggest(path, REGISTERED_REWARDS)} "
            "A function of your own is named as `module:function`."
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # launched scripts have their own folder on the path, not the working folder
    try:
        target = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, and something that it imports does not
        raise ValueError(
            f"reward '{path}': there is no module '{error.name}' in the working folder {os.getcwd()} or among the "
            f"installed packages. Registered rewards: {', '.join(sorted(REGISTERED_REWARDS))}."
        ) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [n for n, value in vars(target).items() if callable(value) and not n.startswith("_")]
            raise ValueError(f"reward '{path}': '{module_name}' has no '{part}'; {suggest(part, names)}")
        target = getattr(target, part)
    if not callable(target):
        raise ValueError(f"reward '{path}' is {target!r:.60}; it must be a function.")
    return target


def _unique(base: str, taken: list[str]) -> str:
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    return name
