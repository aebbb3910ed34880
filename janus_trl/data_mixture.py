"""Mixtures of data sets: `dataset_mixture: [{name, weight, format, ...}, ...]` in a recipe."""

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from typing import Any

import datasets

from janus_trl.data_checks import check_choice

COLUMNS = ("text_column", "image_column", "answer_column", "choices_column")
KEYS = ("name", "weight", "task", "config", "format", "train_split", "test_split", *COLUMNS)


@dataclasses.dataclass(frozen=True)
class MixtureEntry:
    """One data set of a mixture; `source` says how to load it, and `task` which rows it has (None: the run's)."""

    source: Any
    weight: float
    train_split: str | None
    test_split: str | None
    task: str | None = None

    def split(self, key: str) -> str | None:
        """The split that is used for `train` or `test`."""
        return self.train_split if key == "train" else self.test_split


def parse_mixture(
    mixture: list[Mapping] | None, name: str | None, source: Any, train_split: str | None, test_split: str | None
) -> list[MixtureEntry]:
    """The entries of a mixture, or the one entry of a plain `dataset_name`; what an entry leaves out is as given here.

    Raises:
        ValueError: Both or no data are given, an entry is no mapping, has an unknown key, no name or a bad weight.
    """
    if not mixture:
        return [MixtureEntry(source, 1.0, train_split, test_split)]
    if name:
        raise ValueError(f"dataset_name is '{name}' and dataset_mixture is set too; keep one of them.")
    if not isinstance(mixture, list | tuple):
        raise ValueError(f"dataset_mixture is {mixture!r}; give a list of mappings with name and weight.")
    return [_parse_entry(entry, i, source, train_split, test_split) for i, entry in enumerate(mixture)]


def _parse_entry(entry: Any, index: int, source: Any, train_split: str | None, test_split: str | None) -> MixtureEntry:
    where = f"dataset_mixture[{index}]"
    if isinstance(entry, str) and entry.lstrip().startswith("{"):  # from the command line
        try:
            entry = json.loads(entry)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is {entry!r}, which is not valid JSON ({error}).") from error
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} is {entry!r}; write a mapping such as {{name: prompts.txt, weight: 0.5}}.")
    for key in entry:
        if key not in KEYS:
            nearest = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f"; did you mean '{nearest[0]}'?" if nearest else "."
            raise ValueError(f"{where} has the unknown key '{key}'; valid: {', '.join(KEYS)}{hint}")
    if not entry.get("name"):
        raise ValueError(f"{where} has no name; give a file, a folder or a Hub id.")
    own = {key: entry[key] for key in ("name", "config", "format", *COLUMNS) if key in entry}
    return MixtureEntry(
        dataclasses.replace(source, **own),
        _weight(entry.get("weight", 1.0), where),
        entry.get("train_split", train_split),
        entry.get("test_split", test_split),
        entry.get("task"),
    )


def entries_of_task(entries: list[MixtureEntry], task: str) -> list[MixtureEntry]:
    """The entries without a task or of this one: a supervised run of both tasks loads the rows of each in turn.

    Raises:
        ValueError: An entry has an unknown task, or none is left.
    """
    for i, entry in enumerate(entries):
        if entry.task is not None:
            check_choice(f"dataset_mixture[{i}]: task", entry.task, ("t2i", "i2t"))
    fitting = [entry for entry in entries if entry.task in (None, task)]
    if not fitting:
        raise ValueError(f"dataset_mixture has no entry for task '{task}'; add one, or change the task of the run.")
    return fitting


def _weight(value: Any, where: str) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0) or isinstance(value, bool):
        raise ValueError(f"{where} has weight {value!r}; it must be a number above 0 (weights need not sum to 1).")
    return weight


def mixed(rows: list[datasets.Dataset], weights: list[float] | None, seed: int, names: list[str]) -> datasets.Dataset:
    """Rows of all data sets in turn, each row whole, drawn in shares of `weights` until every row has come up once.

    A data set that is used up before the others starts again, so that the shares hold to the end. Without weights the
    data sets follow one another. Columns that one of them lacks are None in its rows. The order depends on
    `seed` alone.

    Raises:
        ValueError: Two data sets have a column of the same name and different types.
    """
    _check_types(rows, names)
    if weights is None:
        return datasets.concatenate_datasets(rows)
    shares = [weight / sum(weights) for weight in weights]
    return datasets.interleave_datasets(rows, probabilities=shares, seed=seed, stopping_strategy="all_exhausted")


def _check_types(rows: list[datasets.Dataset], names: list[str]) -> None:
    seen: dict[str, tuple[Any, str]] = {}
    for dataset, name in zip(rows, names, strict=True):
        for column, feature in dataset.features.items():
            kind = _kind(feature)
            if column in seen and None not in (kind, seen[column][0]) and kind != seen[column][0]:
                raise ValueError(
                    f"dataset_mixture: column '{column}' is {feature} in '{name}', but another type in "
                    f"'{seen[column][1]}'; rename or drop it in one of them."
                )
            if column not in seen or seen[column][0] is None:
                seen[column] = (kind, name)


def _kind(feature: Any) -> str | None:
    """The type as text; None for a column of nothing but null, which goes with every type."""
    text = str(feature)
    return None if "null" in text else text
