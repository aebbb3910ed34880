"""Data sets: load, bring the columns into one form, refuse what would train wrongly.

Rows have `prompt` (the user's own text, no template). `i2t` rows have `images` (a list, empty for none) and usually
`answer` and `choices`; for supervised training there is `reasoning`, and `image` (t2i) or `completion` (i2t). All other
columns are kept for the rewards. Pictures come out as RGB whenever a row is read (see `load_image`).
"""

import difflib
import os
from functools import partial
from pathlib import Path
from typing import Any

import datasets

from janus_trl.data_checks import NO_STREAMING, check_choice, check_dataset, check_images
from janus_trl.images import load_image

__all__ = [
    "check_dataset",
    "check_dataset_file",
    "check_images",
    "load_dataset_splits",
    "load_image",
    "load_training_dataset",
]

TASKS = ("t2i", "i2t")
STAGES = ("grpo", "sft")
BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def load_training_dataset(script_args: Any, task: str, stage: str = "grpo", with_test: bool = True) -> dict:
    """`load_dataset_splits` with the fields of the script arguments (`dataset_name`, `text_column`, ...).

    Returns:
        `{"train": Dataset, "test": Dataset or None}`; without `with_test` the test split is not loaded.
    """
    return load_dataset_splits(
        script_args.dataset_name,
        task=task,
        stage=stage,
        dataset_config=script_args.dataset_config,
        train_split=script_args.dataset_train_split,
        test_split=script_args.dataset_test_split if with_test else None,
        text_column=script_args.text_column,
        image_column=script_args.image_column,
        answer_column=script_args.answer_column,
        choices_column=script_args.choices_column,
        streaming=script_args.dataset_streaming,
    )


def load_dataset_splits(
    dataset_name: str,
    *,
    task: str,
    stage: str = "grpo",
    dataset_config: str | None = None,
    train_split: str = "train",
    test_split: str | None = None,
    text_column: str = "prompt",
    image_column: str | None = None,
    answer_column: str = "answer",
    choices_column: str | None = None,
    streaming: bool = False,
) -> dict[str, datasets.Dataset | None]:
    """Load and check the splits of a data set.

    Args:
        dataset_name: `tiny` (the embedded world: splits train, validation, test), a file (.txt with one prompt per
            line, .jsonl, .json, .csv, .parquet), a folder, or a Hub id.
        task: `t2i` or `i2t`.
        stage: `grpo` or `sft`, which needs target columns too.
        train_split: Name of a split, also a slice such as `train[:90%]`.
        test_split: The same; None for no test split.
        text_column: Becomes `prompt`. A .txt file has only this one.
        image_column: Becomes `images` (one picture or a list per row), or the target `image` for t2i in stage `sft`.
            By default `images` or `image`, whichever is there.
        answer_column: Becomes `answer`.
        choices_column: Becomes `choices`, a list of option texts per row.
        streaming: Refused, with the reason.

    Raises:
        ValueError: One line that names the field, the value and what is there instead: missing files, splits and
            columns, empty prompts and missing pictures with their rows, input pictures for t2i.
    """
    check_choice("task", task, TASKS)
    check_choice("stage", stage, STAGES)
    if streaming:
        raise ValueError(NO_STREAMING)
    check_dataset_file(dataset_name, dataset_config)
    columns = _wanted_columns(task, stage, text_column, image_column, answer_column, choices_column)
    splits: dict[str, datasets.Dataset | None] = {"train": None, "test": None}
    for key, split in (("train", train_split), ("test", test_split)):
        if split is not None:
            dataset = _load(dataset_name, dataset_config, f"dataset_{key}_split", split, task, stage)
            splits[key] = _prepare(dataset, columns, task, stage, dataset_name)
    return splits


def check_dataset_file(dataset_name: str | None, dataset_config: str | None = None) -> None:
    """Cheap check of `dataset_name`: a local file must exist, hold something and be of a known type.

    Raises:
        ValueError: One line naming the field and the value.
    """
    if not dataset_name:
        raise ValueError("dataset_name is missing; give `tiny`, a file, a folder or a Hub id.")
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


def _load(name: str, config: str | None, field: str, split: str, task: str, stage: str) -> datasets.Dataset:
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
    return _drop_trailing_blank_lines(dataset) if path.suffix.lower() == ".txt" else dataset


def _drop_trailing_blank_lines(dataset: datasets.Dataset) -> datasets.Dataset:
    lines = list(dataset["text"])
    count = len(lines)
    while count and not lines[count - 1].strip():
        count -= 1
    return dataset.select(range(count))


def _wanted_columns(
    task: str, stage: str, text: str, image: str | None, answer: str, choices: str | None
) -> dict[str, tuple[str, str | None, bool]]:
    """`{our name: (field, column given, required)}`."""
    target = stage == "sft" and task == "t2i"
    wanted = {"prompt": ("text_column", text, True)}
    wanted["image" if target else "images"] = ("image_column", image, target or image is not None)
    wanted["answer"] = ("answer_column", answer, answer != "answer")
    wanted["choices"] = ("choices_column", choices, choices is not None)
    if stage == "sft" and task == "i2t":
        wanted["completion"] = ("completion", "completion", True)
    return wanted


def _prepare(dataset: Any, columns: dict, task: str, stage: str, name: str) -> datasets.Dataset:
    if not isinstance(dataset, datasets.Dataset):
        raise ValueError(NO_STREAMING)
    if Path(name).suffix.lower() == ".txt":
        dataset = dataset.rename_column("text", columns["prompt"][1])
    for ours, (field, given, required) in columns.items():
        dataset = _map_column(dataset, ours, field, given, required, task)
    if "images" not in dataset.column_names and task == "i2t":
        dataset = dataset.add_column("images", [None] * len(dataset))
    if stage == "sft" and "reasoning" not in dataset.column_names:
        dataset = dataset.add_column("reasoning", [""] * len(dataset))
    path = Path(name).expanduser()
    folder = str(path.parent if path.is_file() else path) if path.exists() else None
    dataset = _undecoded(dataset).with_transform(partial(_read_rows, folder=folder))
    check_dataset(dataset, task, target="image" if "image" in columns else None)
    return dataset


def _map_column(dataset: datasets.Dataset, ours: str, field: str, given: str | None, required: bool, task: str):
    if ours == "images" and given is None and "images" not in dataset.column_names and task == "i2t":
        given = "image"  # the usual name of a single picture per row
    source = given or ours
    if source not in dataset.column_names:
        if required:
            nearest = difflib.get_close_matches(source, dataset.column_names, n=1)
            hint = f"; did you mean '{nearest[0]}'?" if nearest else "."
            found = ", ".join(dataset.column_names)
            raise ValueError(f"{field} is '{source}', which the data set lacks; columns found: {found}{hint}")
        return dataset
    if source == ours:
        return dataset
    if ours in dataset.column_names:
        dataset = dataset.remove_columns(ours)  # the column that was asked for takes its place
    return dataset.rename_column(source, ours)


def _undecoded(dataset: datasets.Dataset) -> datasets.Dataset:
    """The same data set with pictures left as stored bytes and paths, so that `load_image` sees them."""

    def plain(feature: Any) -> Any:
        if isinstance(feature, datasets.Image):
            return datasets.Image(decode=False)
        return datasets.List(plain(feature.feature)) if isinstance(feature, datasets.List) else feature

    info = dataset.info.copy()
    info.features = datasets.Features({name: plain(feature) for name, feature in dataset.features.items()})
    # The stored form is the same: no cast, which would write all pictures to disk again.
    return datasets.Dataset(dataset.flatten_indices().data, info=info, split=dataset.split)


def _read_rows(batch: dict[str, list], folder: str | None) -> dict[str, list]:
    """Transform of a batch of rows: pictures to RGB, `images` to lists."""
    if "images" in batch:
        batch["images"] = [[_read(cell, folder) for cell in _as_list(cells)] for cells in batch["images"]]
    if "image" in batch:
        batch["image"] = [None if cell is None else _read(cell, folder) for cell in batch["image"]]
    return batch


def _read(cell: Any, folder: str | None) -> Any:
    path = cell.get("path") if isinstance(cell, dict) and cell.get("bytes") is None else cell
    if folder and isinstance(path, str) and len(path) < 4096 and os.path.isfile(os.path.join(folder, path)):
        return load_image(os.path.join(folder, path))  # paths are relative to the file or folder that holds the rows
    return load_image(cell)


def _as_list(cells: Any) -> list:
    return [] if cells is None else cells if isinstance(cells, list) else [cells]
