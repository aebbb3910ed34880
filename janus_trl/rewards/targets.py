"""From the name of a reward to something that can be called, and the checks of its arguments and parameters."""

import functools
import importlib
import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterable
from typing import Any

from janus_trl.rewards.calling import IMAGE_ARGUMENTS, TRAINER_ARGUMENTS, named_parameters, takes_any_keyword
from janus_trl.rewards.specs import coerce, suggest


def check_args(label: str, target: Callable, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a recipe for a function or class, converted to the annotated types.

    Raises:
        ValueError: An unknown argument (with the nearest), a value of a wrong type, a missing one of a class.
    """
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


def check_parameters(label: str, function: Callable, task: str | None, columns: list[str] | None) -> None:
    """Check that every parameter without a default will be passed by the trainer or by a column.

    Raises:
        ValueError: It will not (with the columns present), needs pictures that `i2t` does not make, is positional-only,
            or there are no parameters at all.
    """
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
        raise ValueError(missing_columns(label, missing, columns))
    if not takes_any_keyword(function) and not named_parameters(function):
        raise ValueError(f"reward '{label}' takes no arguments; it needs at least `completions`.")


def missing_columns(label: str, missing: list[str], columns: list[str]) -> str:
    """The message for columns that a reward needs and the data set lacks."""
    wanted = ", ".join(f"'{name}'" for name in missing)
    return f"reward '{label}' needs the column {wanted}, which the data set lacks; {suggest(missing[0], columns)}"


def import_target(path: str, known: Iterable[str]) -> Any:
    """What `module:attribute` or `module.attribute` names, also in the working folder.

    Raises:
        ValueError: No such module or attribute (with the nearest; `known` are the registered names), or not callable.
    """
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not attribute:
        raise ValueError(
            f"unknown reward '{path}'; {suggest(path, known)} A function of your own is named as `module:function`."
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
            f"installed packages. Registered rewards: {', '.join(sorted(known))}."
        ) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [n for n, value in vars(target).items() if callable(value) and not n.startswith("_")]
            raise ValueError(f"reward '{path}': '{module_name}' has no '{part}'; {suggest(part, names)}")
        target = getattr(target, part)
    if not callable(target):
        raise ValueError(f"reward '{path}' is {target!r:.60}; it must be a function.")
    return target
