"""A look at the rows as the model will see them, before weights load: lengths, pictures, answers, control strings."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import torch
from transformers import JanusConfig, JanusProcessor

from janus_trl.data_checks import BAD_ROWS, check_choice, read_row
from janus_trl.data_rows import with_reader_settings
from janus_trl.data_text import control_tokens, count_control_strings, neutralise
from janus_trl.prompts import encode_prompts, prompt_lengths
from janus_trl.rewards.multiple_choice import gold_letter

logger = logging.getLogger(__name__)
BATCH = 64  # rows that are tokenised together
SHOWN = 5  # faults that a message spells out


@dataclass
class DataReport:
    """What was found; `bad_rows` has the row numbers (from 0), `faults` the first of them in words."""

    name: str
    rows: int
    checked: int = 0
    lengths: list[int] = field(default_factory=list)
    reasoning_lengths: list[int] = field(default_factory=list)
    room: int | None = None
    pictures: int = 0
    control_rows: int = 0
    bad_rows: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add_fault(self, row: int, fault: str) -> None:
        """Note that a row cannot be trained on."""
        self.bad_rows.append(row)
        if len(self.faults) < SHOWN:
            self.faults.append(f"row {row}: {fault}")

    def lines(self) -> list[str]:
        """The report, a few lines."""
        lines = [f"data ({self.name}): {self.rows} rows, {self.checked} of them checked"]
        if self.lengths:
            room = "" if self.room is None else f", room for {self.room}"
            lines.append(f"  prompt tokens: {_range(self.lengths)}{room}")
        if any(self.reasoning_lengths):
            lines.append(f"  of these reasoning: {_range(self.reasoning_lengths)}")
        if self.pictures:
            lines.append(f"  pictures: {self.pictures} read")
        lines.append(f"  control strings: neutralised in {self.control_rows} rows")
        if self.bad_rows:
            lines.append(f"  skipped: {len(self.bad_rows)} rows, such as {'; '.join(self.faults[:2])}")
        return lines

    def raise_if_bad(self) -> None:
        """Raises: ValueError: One line with the rows that cannot be trained on, and why."""
        if self.bad_rows:
            more = f"; and {len(self.bad_rows) - len(self.faults)} more" if len(self.bad_rows) > SHOWN else ""
            raise ValueError(
                f"data ({self.name}): {len(self.bad_rows)} of {self.checked} checked rows cannot be trained on "
                f"(numbers from 0): {'; '.join(self.faults)}{more}. Correct them, or set bad_rows: skip."
            )


def _range(lengths: list[int]) -> str:
    return f"{min(lengths)} to {max(lengths)}, mean {sum(lengths) / len(lengths):.1f}"


def validated(
    dataset: datasets.Dataset,
    task: str,
    processor: JanusProcessor,
    *,
    name: str = "train",
    rows: int = 1000,
    bad_rows: str = "error",
    room: int | None = None,
    stage: str = "grpo",
) -> tuple[datasets.Dataset, DataReport]:
    """Check a data set of `load_dataset_splits`, and make it safe to train on.

    In the rows that come back control strings in texts are neutralised, and a picture that breaks later is read as a
    blank one with a warning. The first process checks for all, so that they keep the same rows.

    Args:
        rows: How many rows are looked at, evenly spaced; -1 for all, 0 for none.
        bad_rows: `error` refuses the data set if a row that was looked at is bad; `skip` looks at all rows and drops
            the bad ones.
        room, stage: See `report_on`.

    Raises:
        ValueError: Names the rows and what is wrong with them, or that no row is left.
    """
    check_choice("bad_rows", bad_rows, BAD_ROWS)
    if rows < -1:
        raise ValueError(f"validate_rows is {rows}; give a number of rows, 0 for none or -1 for all.")
    count = -1 if bad_rows == "skip" else rows
    report = from_first_process(
        lambda: report_on(dataset, task, processor, name=name, rows=count, room=room, stage=stage)
    )
    if bad_rows == "error":
        report.raise_if_bad()
    if len(report.bad_rows) == len(dataset):
        raise ValueError(f"data ({name}): none of the {len(dataset)} rows can be trained on: {report.faults[0]}.")
    if report.bad_rows:
        dataset = dataset.select(np.setdiff1d(np.arange(len(dataset)), report.bad_rows))
    control = tuple(control_tokens(processor.tokenizer))
    return with_reader_settings(dataset, control=control, forgiving=True), report


def report_on(
    dataset: datasets.Dataset,
    task: str,
    processor: JanusProcessor,
    *,
    name: str = "train",
    rows: int = 1000,
    room: int | None = None,
    stage: str = "grpo",
) -> DataReport:
    """Look at evenly spaced rows, one at a time, and count control strings in all rows.

    Args:
        dataset: Of `load_dataset_splits`; its checks (empty prompts, ...) have been made.
        task: `t2i` or `i2t`: answers are compared to options in the latter.
        rows: How many rows are looked at; -1 for all, 0 for none.
        room: Most tokens of a prompt (context of the model less its completion; see `prompt_room`).
        stage: `sft` counts reasoning and answer as part of the prompt, and lets rows be without an answer.
    """
    control = control_tokens(processor.tokenizer)
    report = DataReport(name, len(dataset), room=room)
    report.control_rows = count_control_strings(dataset, tuple(control))
    batch: list[tuple[int, dict]] = []
    for row in _spread(len(dataset), rows):
        read = _checked_row(dataset, row, task, stage, control, report)
        if read is not None:
            batch.append((row, read))
        if len(batch) == BATCH:
            _add_lengths(batch, processor, task, stage, report)
            batch = []
    _add_lengths(batch, processor, task, stage, report)
    return report


def _spread(total: int, rows: int) -> Iterator[int]:
    """`rows` row numbers, evenly spaced; all if -1 or more than there are."""
    count = total if rows < 0 else min(rows, total)
    return (i * total // count for i in range(count))


def _checked_row(dataset: datasets.Dataset, row: int, task: str, stage: str, control: dict, report: DataReport):
    """What lengths need of a row; None if it is bad, which is noted."""
    report.checked += 1
    try:
        cells = read_row(dataset, row)
    except ValueError as error:
        report.add_fault(row, str(error).removeprefix(f"row {row}: ").rstrip("."))
        return None
    pictures = len(cells.get("images") or [])
    report.pictures += pictures + (cells.get("image") is not None)
    choices, answer = cells.get("choices"), cells.get("answer")
    unanswered = stage == "sft" and answer in (None, "")
    if task == "i2t" and choices and "answer" in cells and not unanswered and gold_letter(answer, choices) is None:
        options = ", ".join(map(str, choices))
        report.add_fault(row, f"answer {answer!r:.40} is none of the options ({options:.80})")
        return None
    columns = ("reasoning", "completion") if task == "i2t" else ("reasoning",)  # of what the collator makes ids
    texts = [cells.get(column) for column in columns] if stage == "sft" else []
    return {
        "prompt": neutralise(cells["prompt"], tuple(control)),
        "pictures": pictures,
        "texts": [neutralise(text or "", tuple(control)) for text in texts],
    }


def _add_lengths(
    batch: list[tuple[int, dict]], processor: JanusProcessor, task: str, stage: str, report: DataReport
) -> None:
    if not batch:
        return
    prompts = [read["prompt"] for _, read in batch]
    lengths = prompt_lengths(processor, prompts, [read["pictures"] for _, read in batch], task == "t2i")
    for (row, read), length in zip(batch, lengths, strict=True):
        if texts := read["texts"]:
            joined = " ".join(text for text in texts if text)  # as the collator joins them
            whole, reasoning = processor.tokenizer([joined, texts[0]], add_special_tokens=False)["input_ids"]
            length += len(whole)
            report.reasoning_lengths.append(len(reasoning))
        report.lengths.append(length)
        if report.room is not None and length > report.room:
            what = "prompt, reasoning and answer have" if stage == "sft" else "its prompt has"
            report.add_fault(row, f"{what} {length} tokens, and there is room for {report.room}")


def prompt_room(config: JanusConfig, task: str, text_length: int) -> int:
    """Most tokens that a prompt may have: the model's context less a completion.

    Args:
        text_length: Most text tokens of a completion; `t2i` adds the image codes and the three tokens around them. In
            stage `sft`, where texts count as part of the prompt, 0 (`t2i`) or 1 (`i2t`, the end token).

    Raises:
        ValueError: The completion alone fills the context.
    """
    context = config.text_config.max_position_embeddings
    completion = text_length + (config.vq_config.num_patches**2 + 3 if task == "t2i" else 0)
    if completion >= context:
        raise ValueError(
            f"a completion of {completion} tokens leaves no room for a prompt in the model's context of {context}. "
            "Lower max_completion_length (i2t) or max_reasoning_length (t2i)."
        )
    return context - completion


def first_prompt_lines(
    dataset: datasets.Dataset, processor: JanusProcessor, around: int = 2, draws: bool = False
) -> list[str]:
    """The first rendered prompt, token by token around its control tokens: position, id and string of each."""
    row = dataset[0]
    ids = encode_prompts(processor, [row["prompt"]], [row.get("images") or []], draws)["input_ids"][0].tolist()
    control = set(control_tokens(processor.tokenizer).values())
    shown = {j for i, token in enumerate(ids) if token in control for j in range(i - around, i + around + 1)}
    lines, i = [f"first prompt, {len(ids)} tokens: {row['prompt']!r:.100}"], 0
    while i < len(ids):
        end = i + 1
        if i not in shown:
            while end < len(ids) and end not in shown:
                end += 1
            lines.append(f"  ... {end - i} tokens: {processor.tokenizer.decode(ids[i:end])!r:.80}")
        else:
            while end < len(ids) and ids[end] == ids[i]:
                end += 1
            times = f"  x {end - i}" if end - i > 1 else ""
            lines.append(f"  {i:5d}  {ids[i]:6d}  {processor.tokenizer.decode(ids[i])!r}{times}")
        i = end
    return lines


def from_first_process(make: Callable[[], Any]) -> Any:
    """What `make` gives on the first process, on all processes: what they read may differ, what they decide may not.

    Raises:
        ValueError: `make` raised it. All processes do, so that none waits for another that has ended.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return make()
    box: list = [None, None]  # the value, or what is wrong
    if torch.distributed.get_rank() == 0:
        try:
            box[0] = make()
        except ValueError as error:
            box[1] = str(error)
    torch.distributed.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise ValueError(box[1])
    return box[0]
