"""What is refused in a data set, with the rows that are at fault, before anything is trained on it."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

import datasets
import pyarrow as pa

NO_STREAMING = (
    "dataset_streaming: streaming data sets are not supported, because a group needs the same prompt several times in "
    "a row; load the data set whole, or a slice of it such as `dataset_train_split: train[:10000]`."
)


def check_dataset(dataset: Any, task: str, target: str | None = None) -> None:
    """Check the rows of a data set whose columns are named already; reads no picture but the first.

    Args:
        dataset: With the columns `prompt` and, for `i2t`, `images`.
        task: `t2i` or `i2t`.
        target: Column that must hold a picture in each row.

    Raises:
        ValueError: Streaming, no rows, no `prompt`, prompts that are no text or blank, a None among a row's pictures,
            input pictures for `t2i`; with row numbers counted from 0.
    """
    if not isinstance(dataset, datasets.Dataset):
        raise ValueError(NO_STREAMING)
    if len(dataset) == 0:
        raise ValueError("the data set has no rows; check the file and the split.")
    if "prompt" not in dataset.column_names:
        raise ValueError(f"the data set has no column 'prompt'; columns found: {', '.join(dataset.column_names)}.")
    prompts = list(dataset.with_format(None).select_columns(["prompt"])["prompt"])
    _refuse("prompts that are not text", (i for i, p in enumerate(prompts) if p is not None and not isinstance(p, str)))
    _refuse("empty prompts", (i for i, p in enumerate(prompts) if p is None or not p.strip()))
    if "choices" in dataset.column_names and task == "i2t":
        choices = list(dataset.with_format(None).select_columns(["choices"])["choices"])
        _refuse(
            "choices that are no list of texts", (i for i, c in enumerate(choices) if not isinstance(c, list | None))
        )
    if "images" in dataset.column_names:
        counts = list(_count_images(dataset, "images"))
        _refuse("None among their images", (row for row, (_, missing) in enumerate(counts) if missing))
        with_images = [row for row, (count, _) in enumerate(counts) if count]
        if task == "t2i":
            _refuse("input images, which task 't2i' would ignore (remove the column 'images')", with_images)
        elif with_images:
            dataset[with_images[0]]  # a wrong folder shows at once, and not at some later step
    if target is not None:
        _refuse(f"no picture in '{target}'", (i for i, (n, _) in enumerate(_count_images(dataset, target)) if not n))


def check_images(dataset: datasets.Dataset) -> None:
    """Read every picture once; takes as long as reading them all.

    Raises:
        ValueError: Names the row and the picture of the first failure.
    """
    for row in range(len(dataset)):
        try:
            dataset[row]
        except ValueError as error:
            raise ValueError(f"row {row}: {error}") from error


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


def _refuse(what: str, rows: Iterable[int]) -> None:
    rows = list(rows)
    if rows:
        shown = ", ".join(map(str, rows[:10])) + (", ..." if len(rows) > 10 else "")
        raise ValueError(f"{len(rows)} rows have {what}; rows (from 0): {shown}. Correct or drop them.")


def check_choice(field: str, value: str, valid: tuple[str, ...]) -> None:
    """Refuse a value that is none of the valid ones, naming the nearest."""
    if value not in valid:
        nearest = difflib.get_close_matches(str(value), valid, n=1)
        hint = f"; did you mean '{nearest[0]}'?" if nearest else "."
        raise ValueError(f"{field} is {value!r}; valid: {', '.join(valid)}{hint}")
