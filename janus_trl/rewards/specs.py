"""Reading rewards from a recipe: names, weights, arguments, and the errors that help to correct them."""

import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

SPEC_KEYS = ("name", "weight", "alias", "args", "task")


@dataclass(frozen=True)
class RewardSpec:
    """One reward as asked for.

    Attributes:
        name: A registered name, an importable path or a function.
        weight: Its factor in the sum that is trained on; 0 logs it only.
        args: Arguments of the function or class.
        alias: Its name in metrics; needed to tell two entries of the same reward apart.
        task: What it scores in a run of both tasks; None for every task that it fits.
    """

    name: str | Callable
    weight: float = 1.0
    args: dict[str, Any] = field(default_factory=dict)
    alias: str | None = None
    task: str | None = None


def suggest(given: str, valid: Iterable[str]) -> str:
    """`valid: a, b, c; did you mean 'b'?` for an unknown name."""
    names = sorted(valid)
    nearest = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"; did you mean '{nearest[0]}'?" if nearest else "."
    return f"valid: {', '.join(names) or '(none)'}{hint}"


def parse_reward_specs(specs: Any) -> list[RewardSpec]:
    """Turn the `reward_funcs` of a recipe into `RewardSpec`s.

    Args:
        specs: One entry or a list of entries. An entry is a name, a path (`my_pkg.mod.fn` or `module:function`), a
            mapping `{name, weight, alias, args, task}` (also as YAML text), a `RewardSpec` or a Python function.

    Raises:
        ValueError: Nothing given, an unknown key, a missing name, a weight that is not a finite number, an alias that
            would break metric names or is given twice.
    """
    if not isinstance(specs, list | tuple):
        specs = [] if specs is None else [specs]
    parsed = [_parse_one(spec) for spec in specs]
    if not parsed:
        raise ValueError("reward_funcs is empty: name at least one reward, for example `reward_funcs: [format]`.")
    aliases = [spec.alias for spec in parsed if spec.alias]
    if twice := [alias for alias in aliases if aliases.count(alias) > 1]:
        raise ValueError(f"reward_funcs: alias '{twice[0]}' is given twice; each reward is logged under its own name.")
    return parsed


def _parse_one(spec: Any) -> RewardSpec:
    if isinstance(spec, RewardSpec):
        return spec
    if isinstance(spec, str) and spec.lstrip().startswith("{"):
        try:
            spec = yaml.safe_load(spec)  # JSON is YAML
        except yaml.YAMLError as error:
            raise ValueError(f"reward_funcs: {spec!r} is no valid mapping ({' '.join(str(error).split())}).") from error
    if isinstance(spec, str) and spec.strip():
        return RewardSpec(spec.strip())
    if isinstance(spec, Mapping):
        return _parse_mapping(spec)
    if callable(spec):
        return RewardSpec(spec)
    raise ValueError(f"reward_funcs: {spec!r} is not a reward; give a name or a mapping with {', '.join(SPEC_KEYS)}.")


def _parse_mapping(spec: Mapping) -> RewardSpec:
    for key in spec:
        if key not in SPEC_KEYS:
            raise ValueError(f"reward_funcs: unknown key '{key}' in {dict(spec)!r}; {suggest(str(key), SPEC_KEYS)}")
    name = spec.get("name")
    if not callable(name) and not (isinstance(name, str) and name.strip()):
        raise ValueError(f"reward_funcs: {dict(spec)!r} has no 'name'; write `name: pickscore`, for example.")
    args = spec.get("args") or {}
    if not isinstance(args, Mapping):
        raise ValueError(f"reward_funcs: args of '{name}' is {args!r}; it must be a mapping of names to values.")
    weight = coerce(spec.get("weight", 1.0), float, f"reward_funcs: weight of '{name}'")
    alias = spec.get("alias")
    if alias is not None and not (isinstance(alias, str) and re.fullmatch(r"[\w.-]+", alias)):
        raise ValueError(
            f"reward_funcs: alias of '{name}' is {alias!r}; use letters, digits, '_', '-' and '.': metrics and "
            "files are named after it."
        )
    task = spec.get("task")
    if task not in (None, "t2i", "i2t"):
        raise ValueError(f"reward_funcs: task of '{name}' is {task!r}; {suggest(str(task), ('t2i', 'i2t'))}")
    return RewardSpec(name if callable(name) else name.strip(), weight, dict(args), alias, task)


def coerce(value: Any, annotation: Any, where: str) -> Any:
    """Convert a recipe value to the annotated type: YAML leaves a nested `1e-1` a string.

    Types other than str, int, float, bool, None, Literal, list and unions of these are passed through unchanged.

    Raises:
        ValueError: `where`, the value and the type that was expected.
    """
    origin, options = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, options, where)
    if origin is typing.Literal:
        if value in options:
            return value
        raise ValueError(f"{where} is {value!r}; {suggest(str(value), map(str, options))}")
    if origin is list and isinstance(value, list | tuple):
        return [coerce(item, options[0], where) for item in value]
    converter = _CONVERTERS.get(list if origin is list else annotation)
    if converter is None:
        return value
    try:
        return converter(value)
    except (TypeError, ValueError) as error:
        expected = getattr(annotation, "__name__", str(annotation))
        raise ValueError(f"{where} is {value!r}; it must be of type {expected}.") from error


def _coerce_union(value: Any, options: tuple, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    for option in options:
        if option in (int, float, str, bool) and type(value) is option:
            return value
    last: ValueError | None = None
    for option in options:
        if option is not type(None):
            try:
                return coerce(value, option, where)
            except ValueError as error:
                last = error
    raise last or ValueError(f"{where} is {value!r}; it must be None.")


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError(value)
    return float(value)


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or float(value) != int(float(value)):
        raise ValueError(value)
    return int(float(value))


def _to_bool(value: Any) -> bool:
    words = {"true": True, "false": False, "yes": True, "no": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise ValueError(value)


def _to_str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _not_a_list(value: Any) -> Any:
    raise ValueError(value)


_CONVERTERS: dict[Any, Callable[[Any], Any]] = {
    float: _to_float,
    int: _to_int,
    bool: _to_bool,
    str: _to_str,
    list: _not_a_list,
}
