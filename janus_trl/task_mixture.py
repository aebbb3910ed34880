"""Both tasks in one run: every generation batch holds one task on all ranks, so all use the same sub-networks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from trl.trainer.utils import RepeatSampler

from .data_mixture import mixed
from .data_rows import read_rows, undecoded, with_row_reader, with_stored_pictures
from .sampling_checks import TASKS

# Metrics that say nothing more when they are split by task.
_NOT_SPLIT = ("rewards/", "num_tokens", "memory/")


def check_task_datasets(name: str, rows: Any, prompts: int | None = None) -> None:
    """Refuse what is no data set for each of the two tasks, or (with `prompts`) one that does not fill a rollout.

    Raises:
        ValueError: naming the argument, what is there and the fix.
    """
    if not isinstance(rows, Mapping) or sorted(rows) != sorted(TASKS):
        found = f"the keys {sorted(rows)}" if isinstance(rows, Mapping) else f"a {type(rows).__name__}"
        raise ValueError(f"task = 'both' needs {name} = {{'t2i': Dataset, 'i2t': Dataset}}, but it is {found}.")
    for task, part in rows.items():
        if prompts is not None and len(part) < prompts:
            raise ValueError(
                f"{len(part)} training rows of {task} are fewer than the {prompts} prompts of a rollout. Use more "
                "rows, or lower per_device_train_batch_size or gradient_accumulation_steps."
            )


def join_tasks(parts: Mapping[str, Dataset]) -> Dataset:
    """The rows of both tasks, one after the other, with a column `task`; columns that a task lacks are None."""
    parts = {task: part.remove_columns([n for n in part.column_names if n == "task"]) for task, part in parts.items()}
    return one_after_another({task: part.add_column("task", [task] * len(part)) for task, part in parts.items()})


def one_after_another(parts: Mapping[str, Dataset]) -> Dataset:
    """The rows of all parts in turn, read as in their part; columns that a part lacks are None.

    Plain concatenation would read all of them as the first part does, with the folder that its pictures lie in.

    Args:
        parts: by the name that an error gives them.
    """
    transforms = [_row_reader(part) for part in parts.values()]
    stored = [
        part
        if transform is None
        else with_stored_pictures(undecoded(part.with_format(None)), transform.keywords.get("folder"))
        for part, transform in zip(parts.values(), transforms, strict=True)
    ]
    joined = mixed(stored, None, 0, list(parts))
    settings = next((t.keywords for t in transforms if t is not None), None)
    if settings is None:
        return joined
    return with_row_reader(joined, None).with_transform(partial(read_rows, **{**settings, "folder": None}))


def _row_reader(part: Dataset) -> partial | None:
    transform = (part.format["format_kwargs"] or {}).get("transform")
    return transform if isinstance(transform, partial) and transform.func is read_rows else None


def held_out_by_task(parts: Mapping[str, Dataset]) -> dict[str, Dataset]:
    """The held-out rows of each task with columns `task` and `row_id`, whose numbers run on from task to task."""
    numbered, first = {}, 0
    for task, part in parts.items():
        part = part.remove_columns([name for name in ("task", "row_id") if name in part.column_names])
        ids = list(range(first, first + len(part)))
        numbered[task] = part.add_column("task", [task] * len(part)).add_column("row_id", ids)
        first += len(part)
    return numbered


def evaluations_of(rows: Dataset, evaluations: list[tuple[int, dict[int, float]]]) -> list:
    """The part of a trainer's `evaluations` that is about `rows` of `held_out_by_task`."""
    ids = set(rows["row_id"])
    parts = [(step, {row: reward for row, reward in of_row.items() if row in ids}) for step, of_row in evaluations]
    return [(step, of_row) for step, of_row in parts if of_row]


def row_for_task(row: dict) -> dict:
    """A row in the form in which TRL samples its task: plain text for `t2i`, a conversation with pictures for `i2t`."""
    if row["task"] == "t2i":
        return {name: value for name, value in row.items() if name not in ("image", "images")}
    prompt = row["prompt"]
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {**row, "prompt": prompt, "images": row.get("images") or []}


class TaskSampler(RepeatSampler):
    """TRL's sampler, whose batches of prompts hold one task each, in shares that every stretch of a run keeps.

    Batch `b` belongs to the task that is furthest behind its share of `b + 1` batches. A task whose rows are used up
    starts again in a new order. An epoch has as many batches as all rows would fill; the next one goes on counting, so
    that short epochs keep the shares too (and draw a task whose share is less than a batch of an epoch).

    Args:
        rows: numbers of the rows of each task.
        proportions: share of the batches of each task.
        options: of `RepeatSampler`.
    """

    def __init__(self, rows: Mapping[str, list[int]], proportions: Mapping[str, float], **options):
        super().__init__(data_source=range(sum(map(len, rows.values()))), **options)
        self.rows, self.proportions = rows, proportions
        self.epoch = 0

    @classmethod
    def like(cls, sampler: RepeatSampler, rows: Mapping[str, list[int]], proportions: Mapping[str, float]):
        """With the repetitions, batch size and seed of another sampler."""
        names = ("mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed")
        return cls(rows, proportions, **{name: getattr(sampler, name) for name in names})

    def __iter__(self) -> Iterator[int]:
        batches = {task: self._batches(self.rows[task]) for task in self.proportions}
        drawn, count = dict.fromkeys(batches, 0), self.num_samples // self.batch_size
        for number in range(1, (self.epoch + 1) * count + 1):
            task = max(drawn, key=lambda name: self.proportions[name] * number - drawn[name])
            drawn[task] += 1
            if number <= self.epoch * count:  # of an epoch before
                continue
            batch = next(batches[task])
            for _ in range(self.repeat_count):
                for row in batch:
                    yield from [row] * self.mini_repeat_count

    def _batches(self, rows: list[int]) -> Iterator[list[int]]:
        while True:
            order = torch.randperm(len(rows), generator=self.generator) if self.shuffle else torch.arange(len(rows))
            order = [rows[i] for i in order.tolist()]
            for start in range(0, len(order) - self.batch_size + 1, self.batch_size):
                yield order[start : start + self.batch_size]


@contextmanager
def split_by_task(metrics: dict[str, list], task: str | None) -> Iterator[None]:
    """Log what is logged within under `<name>/<task>` too; without a task nothing happens."""
    before = {name: len(values) for name, values in metrics.items()}
    yield
    if task is None:
        return
    of_tasks = tuple(f"/{name}" for name in TASKS)
    for name in [name for name in metrics if not (name.startswith(_NOT_SPLIT) or name.endswith(of_tasks))]:
        if new := metrics[name][before.get(name, 0) :]:
            metrics[f"{name}/{task}"].extend(new)


def drop_joint_metrics(metrics: dict[str, list], task: str) -> None:
    """Leave out what is logged by task as well: evaluations of two tasks would share the names."""
    metrics[f"reward/{task}"] = metrics.get("reward", [])
    metrics[f"reward_standard_error/{task}"] = metrics.get("reward_standard_error", [])
    for name in [name for name in metrics if f"{name}/{task}" in metrics]:
        del metrics[name]
