"""What is refused in a data set, with the rows that are at fault, before anything is trained on it.

These checks go through the columns of all rows in batches; none keeps the rows in memory, and none opens pictures.
"""

import difflib
import logging
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

logger = logging.getLogger(__name__)
BAD_ROWS = ("error", "skip")
NO_STREAMING = (
    "dataset_streaming: streaming data sets are not supported, because a group needs the same prompt several times in "
    "a row; load the data set whole, or a slice of it such as `dataset_train_split: train[:10000]`."
)


def check_dataset(dataset: Any, task: str, target: str | None = None, open_first: bool = True) -> None:
    """Check the rows of a data set whose columns are named already; reads no picture but the first.

    Args:
        dataset: With the columns `prompt` and, for `i2t`, `images`.
        task: `t2i` or `i2t`.
        target: Column that must hold a picture in each row.
        open_first: Read the first row with pictures: a wrong folder shows at once, and not at some later step.

    Raises:
        ValueError: Streaming, no rows, no `prompt`, prompts that are no text or blank, a None among a row's pictures,
            input pictures for `t2i`; with row numbers counted from 0.
    """
    _check_columns(dataset)
    for what, rows in find_bad_rows(dataset, task, target):
        if len(rows):
            shown = ", ".join(map(str, rows[:10])) + (", ..." if len(rows) > 10 else "")
            raise ValueError(f"{len(rows)} rows have {what}; rows (from 0): {shown}. Correct or drop them.")
    if open_first and task == "i2t" and "images" in dataset.column_names:
        row = next((row for row, (count, _) in enumerate(_count_images(dataset, "images")) if count), None)
        if row is not None:
            read_row(dataset, row)


def drop_bad_rows(dataset: datasets.Dataset, task: str, target: str | None, name: str) -> datasets.Dataset:
    """The rows that `check_dataset` accepts; a warning says how many others there were, and why."""
    _check_columns(dataset)
    bad: set[int] = set()
    for what, rows in find_bad_rows(dataset, task, target):
        if len(rows):
            logger.warning("%s: %d rows have %s; they are skipped.", name, len(rows), what)
            bad.update(map(int, rows))
    if len(bad) == len(dataset):
        raise ValueError(f"{name}: none of the {len(dataset)} rows can be trained on; look at the warnings above.")
    return dataset.select(np.setdiff1d(np.arange(len(dataset)), sorted(bad))) if bad else dataset


def _check_columns(dataset: Any) -> None:
    if not isinstance(dataset, datasets.Dataset):
        raise ValueError(NO_STREAMING)
    if len(dataset) == 0:
        raise ValueError("the data set has no rows; check the file and the split.")
    if "prompt" not in dataset.column_names:
        raise ValueError(f"the data set has no column 'prompt'; columns found: {', '.join(dataset.column_names)}.")


def find_bad_rows(dataset: datasets.Dataset, task: str, target: str | None) -> Iterator[tuple[str, np.ndarray]]:
    """For each kind of fault what it is and the rows that have it, without opening pictures."""
    kind = dataset.features["prompt"]
    not_text = kind not in (datasets.Value("string"), datasets.Value("large_string"), datasets.Value("null"))
    yield "prompts that are not text", np.arange(len(dataset) if not_text else 0)
    if not not_text:
        yield "empty prompts", _where(dataset, "prompt", _is_blank)
    choices = dataset.features.get("choices")
    if choices is not None and task == "i2t" and not isinstance(choices, datasets.List | datasets.LargeList):
        yield "choices that are no list of texts", _where(dataset, "choices", pc.is_valid)
    if "images" in dataset.column_names:
        counts = np.fromiter(_count_images(dataset, "images"), dtype=[("count", "i8"), ("missing", "?")])
        yield "None among their images", np.flatnonzero(counts["missing"])
        if task == "t2i":
            what = "input images, which task 't2i' would ignore (remove the column 'images')"
            yield what, np.flatnonzero(counts["count"])
    if target is not None:
        present = np.fromiter((bool(count) for count, _ in _count_images(dataset, target)), dtype=bool)
        yield f"no picture in '{target}'", np.flatnonzero(~present)


def _where(dataset: datasets.Dataset, column: str, condition: Any) -> np.ndarray:
    """The rows whose value fulfils a condition on Arrow columns."""
    tables = dataset.select_columns([column]).with_format("arrow").iter(batch_size=10_000)
    return np.flatnonzero(np.concatenate([np.asarray(condition(table.column(0))) for table in tables]))


def _is_blank(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_null(texts.type):
        return pc.is_null(texts)
    return pc.fill_null(pc.equal(pc.utf8_trim_whitespace(texts), ""), True)


def read_row(dataset: datasets.Dataset, row: int) -> dict:
    """A row with its pictures.

    Raises:
        ValueError: A picture cannot be read; names the row.
    """
    try:
        return dataset[row]
    except ValueError as error:
        raise ValueError(f"row {row}: {error}") from error


def without_pictures(name: str, dataset: datasets.Dataset) -> datasets.Dataset:
    """Rows to draw, without columns for pictures, which have to be empty: drawing reads none. Opens no picture.

    Raises:
        ValueError: naming data set, column and row.
    """
    columns = [name for name in ("images", "image") if name in dataset.column_names]
    for column in columns:
        row = next((row for row, (count, _) in enumerate(_count_images(dataset, column)) if count), None)
        if row is not None:
            raise ValueError(
                f"{name}, row {row}: it has a picture in the column '{column}', but task 't2i' draws pictures and "
                "reads none. Remove the column, or rename it if a reward needs it."
            )
    return dataset.remove_columns(columns) if columns else dataset


def check_images(dataset: datasets.Dataset) -> None:
    """Read every picture once; takes as long as reading them all.

    Raises:
        ValueError: Names the row and the picture of the first failure.
    """
    for row in range(len(dataset)):
        read_row(dataset, row)


def _count_images(dataset: datasets.Dataset, column: str) -> Iterator[tuple[int, bool]]:
    """For each row the number of pictures and whether any is None; looks at what is null, and copies no bytes."""
    for batch in dataset.select_columns([column]).with_format("arrow").iter(batch_size=256):
        for cell in batch.column(0):
            if isinstance(cell, pa.ListScalar | pa.LargeListScalar) and cell.is_valid:
                yield len(cell), any(not _is_present(item) for item in cell.values)
            else:
                yield int(_is_present(cell)), False


def _is_present(cell: pa.Scalar) -> bool:
    if not cell.is_valid or isinstance(cell, pa.StructScalar) and cell.type.num_fields == 0:
        return False
    return not isinstance(cell, pa.StructScalar) or any(cell[i].is_valid for i in range(cell.type.num_fields))


def check_choice(field: str, value: str, valid: tuple[str, ...]) -> None:
    """Refuse a value that is none of the valid ones, naming the nearest."""
    if value not in valid:
        nearest = difflib.get_close_matches(str(value), valid, n=1)
        hint = f"; did you mean '{nearest[0]}'?" if nearest else "."
        raise ValueError(f"{field} is {value!r}; valid: {', '.join(valid)}{hint}")
