"""Where rows come from: the embedded world, files, folders and the Hub."""

import difflib
import os
from pathlib import Path

import datasets

from janus_trl.data_checks import check_choice

BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def check_dataset_file(dataset_name: str | None, dataset_config: str | None = None) -> None:
    """Cheap check of `dataset_name`: a local file must exist, hold something and be of a known type.

    Raises:
        ValueError: One line naming the field and the value.
    """
    if not dataset_name:
        raise ValueError("dataset_name is missing; give `tiny`, a file, a folder or a Hub id, or a `dataset_mixture`.")
    path = Path(dataset_name).expanduser()
    known = ", ".join(BUILDERS)
    if path.is_file():
        if path.suffix.lower() not in BUILDERS:
            raise ValueError(f"dataset_name is '{dataset_name}'; files of type {known} can be read.")
        if path.stat().st_size == 0:
            raise ValueError(f"dataset_name is '{dataset_name}'; the file is empty.")
    elif not path.is_dir() and dataset_name != "tiny" and _looks_local(dataset_name):
        siblings = os.listdir(path.parent) if path.parent.is_dir() else []
        nearest = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f" Did you mean '{path.parent / nearest[0]}'?" if nearest else ""
        raise ValueError(
            f"dataset_name is '{dataset_name}'; there is no such file or folder (working folder: {os.getcwd()}).{hint}"
        )
    if dataset_config is not None and (path.is_file() or dataset_name == "tiny"):
        raise ValueError(
            f"dataset_config is '{dataset_config}', but '{dataset_name}' has no configurations; remove it."
        )


def _looks_local(name: str) -> bool:
    # A Hub id is `name` or `owner/name`, without a file suffix.
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).suffix.lower() in BUILDERS


def is_text_file(name: str) -> bool:
    """Whether the rows are the lines of a plain text file."""
    return Path(name).suffix.lower() == ".txt"


def folder_of(name: str) -> str | None:
    """The local folder that holds the rows, where paths of pictures start; None for the Hub."""
    path = Path(name).expanduser()
    return str(path.parent if path.is_file() else path) if path.exists() else None


def load_source(name: str, config: str | None, field: str, split: str, task: str, stage: str) -> datasets.Dataset:
    """One split of one data set, as it is stored.

    Args:
        field: The recipe field that names the split, for errors.

    Raises:
        ValueError: One line: it cannot be loaded, and why.
    """
    path = Path(name).expanduser()
    if name == "tiny" and not path.exists():
        from janus_trl.tiny.datasets import tiny_dataset, tiny_sft_dataset

        check_choice(field, split, ("train", "validation", "test"))
        return (tiny_sft_dataset if stage == "sft" else tiny_dataset)(task, split)
    try:
        if path.is_file():
            builder = BUILDERS[path.suffix.lower()]
            dataset = datasets.load_dataset(builder, data_files={"train": str(path)}, split=split)
        elif (path / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(str(path))
            check_choice(field, split, tuple(saved))
            dataset = saved[split]
        elif (path / "state.json").is_file():
            dataset = datasets.load_from_disk(str(path))
        else:
            dataset = datasets.load_dataset(str(path) if path.is_dir() else name, config, split=split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"dataset_name is '{name}' ({field}: {split}); it cannot be loaded: {reason}.") from error
    return _without_trailing_blank_lines(dataset) if is_text_file(name) else dataset


def _without_trailing_blank_lines(dataset: datasets.Dataset) -> datasets.Dataset:
    count = len(dataset)
    while count and not dataset[count - 1]["text"].strip():
        count -= 1
    return dataset.select(range(count))
