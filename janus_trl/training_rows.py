"""The training rows of a GRPO trainer in the form in which TRL samples them."""

from datasets import Dataset, IterableDataset

from .data_checks import NO_STREAMING
from .group_filtering import ROW_NUMBER
from .prompts import conversational


def training_rows(dataset: Dataset, task: str, numbered: bool) -> Dataset:
    """Rows to train on.

    Args:
        numbered: add the column that `GroupFilter` needs.

    Raises:
        ValueError: a streamed data set.
    """
    if isinstance(dataset, IterableDataset):
        raise ValueError(NO_STREAMING)
    rows = conversational(dataset, task)
    if not numbered:
        return rows
    rows = rows.remove_columns([name for name in (ROW_NUMBER,) if name in rows.column_names])
    return rows.add_column(ROW_NUMBER, list(range(len(rows))))
