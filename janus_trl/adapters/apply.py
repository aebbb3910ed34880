"""Bring a whole data set from a published layout into our columns, without reading or copying its pictures."""

import difflib
import logging
import random
from collections.abc import Mapping

import datasets
import numpy as np

from janus_trl.adapters.layouts import FORMATS, Column, Layout
from janus_trl.data_checks import check_choice

logger = logging.getLogger(__name__)


def check_format(name: str | None, task: str) -> None:
    """Refuse an unknown `dataset_format`, naming the nearest, and one for the other task."""
    if name is None:
        return
    check_choice("dataset_format", name, tuple(FORMATS))
    if FORMATS[name].task != task:
        fitting = ", ".join(other for other, layout in FORMATS.items() if layout.task == task)
        raise ValueError(f"dataset_format '{name}' has rows for task '{FORMATS[name].task}'; for '{task}': {fitting}.")


def adapt(dataset: datasets.Dataset, name: str, seed: int = 0, given: Mapping[str, str | None] | None = None):
    """A data set of the layout `name` with our columns; pictures are neither read nor copied.

    Args:
        dataset: Rows as published.
        seed: Decides which of several prompts is taken and how options are ordered, row by row.
        given: Columns that the recipe names, by field (`text_column`, ...); they take the place of the usual names.

    Raises:
        ValueError: A column is missing (with those that are there), or no row could be converted.
    """
    layout, given = FORMATS[name], {key: value for key, value in (given or {}).items() if value}
    sources = {column.names[0]: _source(dataset, name, column, given) for column in layout.reads}
    names, sources = list(sources), {ours: source for ours, source in sources.items() if source is not None}

    def convert(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        made = []
        for at, index in enumerate(indices):
            row = {ours: batch[sources[ours]][at] if ours in sources else None for ours in names}
            made.append(layout.convert(row, random.Random(f"{seed}:{index}")))
        written = {name: [None if row is None else row[name] for row in made] for name in layout.writes}
        return {**written, "_made": [row is not None for row in made]}

    columns = dataset.select_columns(sorted(set(sources.values())))
    features = datasets.Features({**layout.writes, "_made": datasets.Value("bool")})
    made = columns.map(
        convert,
        with_indices=True,
        batched=True,
        remove_columns=columns.column_names,
        features=features,
        load_from_cache_file=False,  # the cache does not know when a layout has changed
        desc=f"dataset_format {name}",
    )
    kept = np.flatnonzero(made.with_format("numpy")["_made"][:])
    if len(kept) < len(made):
        if not len(kept):
            raise ValueError(
                f"dataset_format '{name}': no row could be converted; look at the columns "
                f"{', '.join(sources.values())}."
            )
        logger.warning("dataset_format '%s': %d of %d rows were dropped, as their answer is no number or no option.",
                       name, len(made) - len(kept), len(made))  # fmt: skip
    made = made.remove_columns("_made")
    made = _with_rest(made, dataset, layout, set(sources.values()), given.get("image_column"))
    return made if len(kept) == len(made) else made.select(kept)


def _source(dataset: datasets.Dataset, name: str, column: Column, given: Mapping[str, str]) -> str | None:
    names = (given[column.field],) if column.field in given else column.names
    found = next((candidate for candidate in names if candidate in dataset.column_names), None)
    if found is None and (column.required or column.field in given):
        what = column.field or "the layout"
        raise ValueError(
            f"dataset_format '{name}' needs a column '{' or '.join(names)}' ({what}); columns found: "
            f"{', '.join(dataset.column_names)}{_hint(names[0], dataset)}"
        )
    return found


def _hint(name: str, dataset: datasets.Dataset) -> str:
    nearest = difflib.get_close_matches(name, dataset.column_names, n=1)
    return f"; did you mean '{nearest[0]}'?" if nearest else "."


def _with_rest(made: datasets.Dataset, dataset: datasets.Dataset, layout: Layout, used: set[str], given: str | None):
    """Add the picture column under our name, and the other columns if the layout keeps them."""
    names = () if layout.picture is None else (given,) if given else layout.picture_names
    picture = next((name for name in names if name in dataset.column_names), None)
    if given and layout.picture and picture is None:
        raise ValueError(
            f"image_column is '{given}'; columns found: {', '.join(dataset.column_names)}{_hint(given, dataset)}"
        )
    keep = [picture] if picture else []
    if layout.keeps_rest:
        taken = {*layout.writes, *layout.picture_names, *used, layout.picture}
        keep += [name for name in dataset.column_names if name not in taken and name != picture]
    if not keep:
        return made
    rest = dataset.select_columns(keep)
    if picture and picture != layout.picture:
        rest = rest.rename_column(picture, layout.picture)
    return datasets.concatenate_datasets([made, rest], axis=1)
