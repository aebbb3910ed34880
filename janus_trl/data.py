"""Data sets: load, bring the columns into one form, refuse what would train wrongly.

Rows have `prompt` (the user's own text, no template). `i2t` rows have `images` (a list, empty for none) and usually
`answer` and `choices`; for supervised training there is `reasoning`, and `image` (t2i) or `completion` (i2t). All other
columns are kept for the rewards. Pictures come out as RGB whenever a row is read (see `load_image`).

`load_dataset_splits` needs no model. `janus_trl.data_report.validated` then looks at the rows as the model will see
them, and neutralises control strings.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import datasets

from janus_trl.adapters import adapt, check_format
from janus_trl.data_checks import BAD_ROWS, NO_STREAMING, check_choice, check_dataset, check_images, drop_bad_rows
from janus_trl.data_mixture import MixtureEntry, entries_of_task, mixed, parse_mixture
from janus_trl.data_rows import undecoded, with_reader_settings, with_row_reader, with_stored_pictures
from janus_trl.data_sources import check_dataset_file, folder_of, is_text_file, load_source
from janus_trl.images import limit_image_size, load_image

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


@dataclass(frozen=True)
class Source:
    """One data set and how its columns are called (see `load_dataset_splits`)."""

    name: str | None
    config: str | None = None
    format: str | None = None
    text_column: str = "prompt"
    image_column: str | None = None
    answer_column: str = "answer"
    choices_column: str | None = None

    def renamed(self) -> dict[str, str | None]:
        """The columns that the recipe names, by field; None where it has the default."""
        return {
            "text_column": None if self.text_column == "prompt" else self.text_column,
            "image_column": self.image_column,
            "answer_column": None if self.answer_column == "answer" else self.answer_column,
            "choices_column": self.choices_column,
        }


def load_training_dataset(script_args: Any, task: str, stage: str = "grpo", with_test: bool = True) -> dict:
    """`load_dataset_splits` with the fields of the script arguments (`dataset_name`, `text_column`, ...).

    Returns:
        `{"train": Dataset, "test": Dataset or None}`; without `with_test` the test split is not loaded.
    """
    limit_image_size(script_args.max_image_pixels)
    splits = load_dataset_splits(
        script_args.dataset_name,
        task=task,
        stage=stage,
        dataset_config=script_args.dataset_config,
        dataset_format=script_args.dataset_format,
        mixture=script_args.dataset_mixture,
        train_split=script_args.dataset_train_split,
        test_split=script_args.dataset_test_split,
        with_test=with_test,
        text_column=script_args.text_column,
        image_column=script_args.image_column,
        answer_column=script_args.answer_column,
        choices_column=script_args.choices_column,
        streaming=script_args.dataset_streaming,
        bad_rows=script_args.bad_rows,
        seed=script_args.dataset_seed,
    )
    limit = {"max_pixels": script_args.max_image_pixels}
    return {key: None if rows is None else with_reader_settings(rows, **limit) for key, rows in splits.items()}


def load_dataset_splits(
    dataset_name: str | None = None,
    *,
    task: str,
    stage: str = "grpo",
    dataset_config: str | None = None,
    dataset_format: str | None = None,
    mixture: list[Mapping] | None = None,
    train_split: str | None = "train",
    test_split: str | None = None,
    with_test: bool = True,
    text_column: str = "prompt",
    image_column: str | None = None,
    answer_column: str = "answer",
    choices_column: str | None = None,
    streaming: bool = False,
    bad_rows: str = "error",
    seed: int = 0,
) -> dict[str, datasets.Dataset | None]:
    """Load and check the splits of a data set, or of a mixture of several.

    Args:
        dataset_name: `tiny` (the embedded world: splits train, validation, test), a file (.txt with one prompt per
            line, .jsonl, .json, .csv, .parquet), a folder, or a Hub id.
        task: `t2i` or `i2t`.
        stage: `grpo` or `sft`, which needs target columns too.
        dataset_format: A published layout (see `janus_trl.adapters`); unset for data that has our columns.
        mixture: In place of `dataset_name`, mappings with `name`, `weight` and whatever differs from the other
            arguments: `config`, `format`, `train_split`, `test_split`, the columns; and `task`, if the entry is for one
            task only. See `janus_trl.data_mixture`.
        train_split: Name of a split, also a slice such as `train[:90%]`.
        test_split: The same; None for no test split.
        text_column: Becomes `prompt`. A .txt file has only this one.
        image_column: Becomes `images` (one picture or a list per row), or the target `image` for t2i in stage `sft`.
            By default `images` or `image`, whichever is there.
        answer_column: Becomes `answer`.
        choices_column: Becomes `choices`, a list of option texts per row.
        streaming: Refused, with the reason.
        bad_rows: What to do with rows without prompt or with missing pictures: `error` refuses the data set, `skip`
            drops them and says how many.
        seed: Of the choices that a layout makes, and of the order of a mixture.

    Raises:
        ValueError: One line that names the field, the value and what is there instead: missing files, splits and
            columns, empty prompts and missing pictures with their rows, input pictures for t2i.
    """
    check_choice("task", task, TASKS)
    check_choice("stage", stage, STAGES)
    check_choice("bad_rows", bad_rows, BAD_ROWS)
    if streaming:
        raise ValueError(NO_STREAMING)
    source = Source(
        dataset_name, dataset_config, dataset_format, text_column, image_column, answer_column, choices_column
    )
    entries = entries_of_task(parse_mixture(mixture, dataset_name, source, train_split, test_split), task)
    for entry in entries:
        check_dataset_file(entry.source.name, entry.source.config)
        check_format(entry.source.format, task)
    used = {"train": entries, "test": entries if with_test else []}
    return {key: _load_split(used[key], key, task, stage, bad_rows, seed) for key in used}


def _load_split(
    entries: list[MixtureEntry], key: str, task: str, stage: str, bad_rows: str, seed: int
) -> datasets.Dataset | None:
    """The rows of all entries that have the split `train` or `test`; None if none has it."""
    used = [entry for entry in entries if entry.split(key) is not None]
    rows = [_load_entry(entry, key, task, stage, bad_rows, seed, alone=len(used) == 1) for entry in used]
    if len(rows) < 2:
        return rows[0] if rows else None
    # Held-out rows are not repeated: they follow one another, each once.
    weights = [entry.weight for entry in used] if key == "train" else None
    return with_row_reader(mixed(rows, weights, seed, [entry.source.name for entry in used]), None)


def _load_entry(
    entry: MixtureEntry, key: str, task: str, stage: str, bad_rows: str, seed: int, alone: bool
) -> datasets.Dataset:
    """The rows of one source with our columns, checked."""
    source = entry.source
    dataset = load_source(source.name, source.config, f"dataset_{key}_split", entry.split(key), task, stage)
    if not isinstance(dataset, datasets.Dataset):
        raise ValueError(NO_STREAMING)
    dataset = _with_our_columns(undecoded(dataset), source, task, stage, seed)
    folder = folder_of(source.name)
    if not alone:
        dataset, folder = with_stored_pictures(dataset, folder), None
    dataset = with_row_reader(dataset, folder)
    target = "image" if stage == "sft" and task == "t2i" else None
    if bad_rows == "skip":
        dataset = drop_bad_rows(dataset, task, target, source.name)
    check_dataset(dataset, task, target=target, open_first=bad_rows == "error")
    return dataset


def _with_our_columns(dataset: datasets.Dataset, source: Source, task: str, stage: str, seed: int) -> datasets.Dataset:
    if source.format is not None:
        dataset = adapt(dataset, source.format, seed, source.renamed())
        source = replace(source, **Source(None).renamed() | {"text_column": "prompt", "answer_column": "answer"})
    elif is_text_file(source.name):
        dataset = dataset.rename_column("text", source.text_column)
    if stage == "sft" and task == "i2t" and source.format is not None and "completion" not in dataset.column_names:
        answers = dataset.select_columns(["answer"]).rename_column("answer", "completion")
        dataset = datasets.concatenate_datasets([dataset, answers], axis=1)
    for ours, (field, given, required) in _wanted_columns(source, task, stage).items():
        dataset = _map_column(dataset, ours, field, given, required, task)
    if task == "t2i" and stage == "grpo" and "image" in dataset.column_names:
        dataset = dataset.remove_columns("image")  # the target of supervised training; TRL would take it for an input
    if "images" not in dataset.column_names and task == "i2t":
        dataset = dataset.add_column("images", [None] * len(dataset))
    if stage == "sft" and "reasoning" not in dataset.column_names:
        dataset = dataset.add_column("reasoning", [""] * len(dataset))
    return dataset


def _wanted_columns(source: Source, task: str, stage: str) -> dict[str, tuple[str, str | None, bool]]:
    """`{our name: (field, column given, required)}`."""
    target = stage == "sft" and task == "t2i"
    image, choices = source.image_column, source.choices_column
    wanted = {"prompt": ("text_column", source.text_column, True)}
    wanted["image" if target else "images"] = ("image_column", image, target or image is not None)
    wanted["answer"] = ("answer_column", source.answer_column, source.answer_column != "answer")
    wanted["choices"] = ("choices_column", choices, choices is not None)
    if stage == "sft" and task == "i2t":
        wanted["completion"] = ("completion", "completion", True)
    return wanted


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
