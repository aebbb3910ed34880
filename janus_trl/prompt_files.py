"""Prompts to generate from: the command line, text files, JSON lines, a folder with one prompt per file."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .images import load_image
from .tiny.datasets import tiny_dataset

PROMPT_FILES = (".txt", ".jsonl")


@dataclass(frozen=True)
class PromptRow:
    """One prompt.

    Attributes:
        prompt: the user's text.
        name: what names its files: the stem of its own file, else its number.
        metadata: the row as it was given; rewards get these columns.
        images: input pictures (`i2t`): paths, or what `load_image` takes.
    """

    prompt: str
    name: str
    metadata: dict[str, Any] = field(default_factory=dict)
    images: tuple = ()


def read_prompts(source: str | None, prompts: list[str] | None, images: list[str] | None, task: str) -> list[PromptRow]:
    """The rows to generate from.

    Args:
        source: a .txt file (one prompt per line; what follows a tab is left out), a .jsonl file (`prompt`, for `i2t`
            `images` or `image` as paths, any other keys), a folder of .txt files (one prompt each, as DPG-Bench has
            them), or `tiny` (held-out prompts of the embedded world).
        prompts: texts given by themselves, in place of `source`.
        images: `i2t`: pictures; every prompt is asked about each of them.
        task: `t2i` or `i2t`.

    Raises:
        ValueError: naming the option, the file and its line, and what is wrong.
    """
    if (source is None) == (prompts is None):
        raise ValueError('Give either prompts (a file) or prompt (a text), e.g. --prompt "a red circle".')
    if source is None:
        rows = [PromptRow(text, f"{i:05d}", {"prompt": text}) for i, text in enumerate(prompts)]
    else:
        rows = _read(source, task)
    for i, row in enumerate(rows):
        if not row.prompt.strip():
            raise ValueError(f"{source or 'prompt'}: prompt {i} is empty.")
    if not rows:
        raise ValueError(f"prompts = {source}: there is no prompt in it.")
    if images:
        rows = [(row, picture) for row in rows for picture in images]
        rows = [
            PromptRow(row.prompt, f"{i:05d}", {**row.metadata, "images": [picture]}, (picture,))
            for i, (row, picture) in enumerate(rows)
        ]
    _check_pictures(rows, task)
    return rows


def _check_pictures(rows: list[PromptRow], task: str) -> None:
    with_pictures = [i for i, row in enumerate(rows) if row.images]
    if task == "t2i" and with_pictures:
        raise ValueError(
            f"prompt {with_pictures[0]} has input pictures, which do not condition the drawing of pictures: Janus was "
            "not trained for it. Remove them, or set --task i2t to ask about them."
        )
    for row in rows:
        for picture in row.images:
            load_image(picture)


def _read(source: str, task: str) -> list[PromptRow]:
    path = Path(source).expanduser()
    if source == "tiny" and not path.exists():
        found = [dict(row) for row in tiny_dataset(task, "test")]
        return [_row(row, i, None, "tiny") for i, row in enumerate(found)]
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        return [PromptRow(_text(file).strip(), file.stem, {"item_id": file.stem}) for file in files]
    if not path.is_file() or path.suffix.lower() not in PROMPT_FILES:
        what = "there is no such file" if not path.is_file() else f"it is of type {path.suffix or 'none'}"
        raise ValueError(f"prompts = {source}: {what}. Give a {' or '.join(PROMPT_FILES)} file or a folder of .txt.")
    lines = _text(path).rstrip().split("\n")
    if path.suffix.lower() == ".txt":
        texts = [line.split("\t")[0].strip() for line in lines if lines != [""]]
        return [PromptRow(text, f"{i:05d}", {"prompt": text}) for i, text in enumerate(texts)]
    return [_json_row(line, i, path) for i, line in enumerate(lines)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}).") from error


def _json_row(line: str, index: int, path: Path) -> PromptRow:
    where = f"{path}, line {index + 1}"
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not valid JSON: {error}.") from error
    if not isinstance(content, dict) or not isinstance(content.get("prompt"), str):
        keys = ", ".join(content) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f'{where} needs a "prompt" that is a text; found: {keys or "nothing"}.')
    return _row(content, index, path.parent, where)


def _row(content: dict[str, Any], index: int, folder: Path | None, where: str) -> PromptRow:
    pictures = content.get("images") or content.get("image") or []
    pictures = pictures if isinstance(pictures, list) else [pictures]
    if folder is not None:
        if wrong := [picture for picture in pictures if not isinstance(picture, str)]:
            raise ValueError(f"{where}: images are paths, but {wrong[0]!r} is a {type(wrong[0]).__name__}.")
        pictures = [str(folder / picture) for picture in pictures]
    return PromptRow(content["prompt"], f"{index:05d}", content, tuple(pictures))
