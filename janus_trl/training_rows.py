"""The data sets of a GRPO trainer in the form in which TRL samples them, for one task or both."""

from collections.abc import Mapping

from datasets import Dataset, IterableDataset

from .data_checks import NO_STREAMING, without_pictures
from .group_filtering import ROW_NUMBER
from .prompts import conversational, with_row_ids
from .task_mixture import check_task_datasets, held_out_by_task, join_tasks


def training_rows(dataset: Dataset | dict[str, Dataset], task: str, prompts: int, numbered: bool) -> Dataset:
    """Rows to train on.

    Args:
        prompts: prompts of a rollout, which every task has to have.
        numbered: add the column that `GroupFilter` needs.

    Raises:
        ValueError: a streamed data set, pictures in rows to draw, or for `both` what is no data set of each task, and
            else several data sets.
    """
    _refuse_streams(dataset)
    _refuse_several("train_dataset", dataset, task)
    if task == "both":
        check_task_datasets("train_dataset", dataset, prompts)
    dataset = _drawn_from_text("train_dataset", dataset, task)
    if task == "both":
        rows = join_tasks(dataset)
    else:
        rows = conversational(dataset, task)
    if not numbered:
        return rows
    rows = rows.remove_columns([name for name in (ROW_NUMBER,) if name in rows.column_names])
    return rows.add_column(ROW_NUMBER, list(range(len(rows))))


def held_out_rows(dataset: Dataset | dict[str, Dataset] | None, task: str) -> Dataset | dict[str, Dataset] | None:
    """Rows to evaluate on, numbered; a data set per task for `both`."""
    _refuse_streams(dataset)
    _refuse_several("eval_dataset", dataset, task)
    if dataset is not None and task == "both":
        check_task_datasets("eval_dataset", dataset)
    dataset = _drawn_from_text("eval_dataset", dataset, task)
    if dataset is None or task != "both":
        return with_row_ids(conversational(dataset, task))
    return held_out_by_task(dataset)


def rows_of_tasks(dataset: Dataset, task: str) -> dict[str, list[int]]:
    """Numbers of the training rows of each task."""
    if task != "both":
        return {task: list(range(len(dataset)))}
    rows: dict[str, list[int]] = {}
    for i, of_row in enumerate(dataset.with_format(None)["task"]):
        rows.setdefault(of_row, []).append(i)
    return rows


def with_image_list(row: dict) -> dict:
    """The row with a list of pictures, empty where it has none: TRL cannot join None to a prompt."""
    return {**row, "images": row["images"] or []} if "images" in row else row


def _drawn_from_text(name: str, dataset: Dataset | dict[str, Dataset] | None, task: str):
    """Rows to draw without columns of pictures, in which TRL would look for input pictures."""
    if isinstance(dataset, dict):
        return {of: _drawn_from_text(name, part, of) for of, part in dataset.items()}
    return without_pictures(name, dataset) if task == "t2i" and dataset is not None else dataset


def _refuse_several(name: str, dataset, task: str) -> None:
    if isinstance(dataset, Mapping) and task != "both":
        raise ValueError(
            f"{name} has the keys {sorted(dataset)}, but task = {task!r} takes one datasets.Dataset. Pass one of them, "
            "or set task: both for {'t2i': Dataset, 'i2t': Dataset}."
        )


def _refuse_streams(dataset) -> None:
    parts = dataset.values() if isinstance(dataset, dict) else [dataset]
    if any(isinstance(part, IterableDataset) for part in parts):
        raise ValueError(NO_STREAMING)
