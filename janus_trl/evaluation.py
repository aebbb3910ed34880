"""Figures of an evaluation: rewards called as in training, means with errors, accuracy with an interval, two models."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState

from .prompts import prompt_with_pictures
from .reward_guard import SEARCH_SECONDS, one_row, shown_prompt
from .rewards import RewardSet, Scores
from .rewards.event_loop import run_until_complete

# Rewards for which 1 means right: their share of ones is an accuracy.
ACCURACY_REWARDS = ("multiple_choice", "tiny_world")
GRID_ROWS = 16  # rows of an evaluation that are drawn
Z_95 = 1.959963984540054  # two-sided 95 % of the normal distribution


@dataclass
class Scored:
    """One model on all rows: its figures for the JSON line, rewards per row, and cells of a grid."""

    line: dict[str, Any]
    totals: list[float | None]
    cells: list[dict[str, Any]]


class RewardFailure(ValueError):
    """A reward raised; the message names it and, where found, the row."""


def call_rewards(
    rewards: RewardSet,
    rows: Sequence[dict],
    texts: list[str],
    completion_ids: list[list[int]],
    images: list,
    row_name: Callable[[int], str] | None = None,
) -> list[Scores]:
    """The values of each reward, called with what training passes.

    Questions about pictures go there as conversations, as TRL has them: prompts as messages with their pictures,
    completions as messages of the assistant. (`janus_trl.rewards.calling.completion_text` reads both forms.)

    Args:
        rows: data rows: `prompt`, and the columns that become keyword arguments.
        images: the generated pictures; empty for questions about pictures.
        row_name: see `call_all`.

    Raises:
        RewardFailure: A reward raised.
    """
    names = [name for name in rows[0] if name != "prompt"] if rows else []
    given: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
    prompts: list = [row["prompt"] for row in rows]
    completions: list = texts
    if not images:
        prompts = [conversation(row) for row in rows]
        completions = [[{"role": "assistant", "content": text}] for text in texts]
    given |= {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    given |= {"trainer_state": TrainerState(), "log_extra": lambda *_: None, "log_metric": lambda *_: None}
    given |= {"generated_images": images} if images else {}
    return call_all(rewards, given, row_name)


def call_all(rewards: RewardSet, given: dict[str, Any], row_name: Callable[[int], str] | None = None) -> list[Scores]:
    """Call every reward with the same keyword arguments.

    Args:
        row_name: What a row is called in a message; "row 3 (prompt ...)" if None.

    Raises:
        RewardFailure: A reward raised: its name, the first row that raises alone, and the error.
    """
    values = []
    for function in rewards.funcs:
        try:
            values.append(run_until_complete(function(**given)))
        except Exception as error:
            row = _raising_row(function, given, error)
            where = "" if row is None else row_name(row) if row_name else f"row {row}{shown_prompt(given, row)}"
            raise RewardFailure(_failure(function.__name__, where, error)) from error
    return values


def _raising_row(function: Callable, given: dict[str, Any], error: Exception) -> int | None:
    """The first row that makes the reward raise alone, if a few seconds find it."""
    if hasattr(error, "row") or isinstance(error, torch.OutOfMemoryError):
        return getattr(error, "row", None)
    deadline = time.perf_counter() + SEARCH_SECONDS
    for row in range(len(given["completions"])):
        if time.perf_counter() > deadline:
            break
        try:
            run_until_complete(function(**one_row(given, row)))
        except Exception:
            return row
    return None


def _failure(name: str, where: str, error: Exception) -> str:
    if isinstance(error, ValueError) and str(error).startswith("reward '"):  # it says itself what is wrong
        return f"{error} ({where})" if where else str(error)
    return f"reward '{name}' failed{' on ' if where else ''}{where}: {type(error).__name__}: {error}"


def append_scores(scores: Scores, more: Scores) -> None:
    """Append the values of further rows, with their faults and failed rows counted from the first of all."""
    start = len(scores)
    scores.extend(more)
    scores.faults |= {start + row: value for row, value in more.faults.items()}
    scores.failed += tuple(start + row for row in more.failed)


def conversation(row: dict) -> list[dict]:
    """The prompt of a question in TRL's form: one user message of typed parts, pictures first."""
    if row.get("images") or not isinstance(row["prompt"], str):
        return prompt_with_pictures(row)
    return [{"role": "user", "content": [{"type": "text", "text": row["prompt"]}]}]


def weighted_totals(rewards: RewardSet, values: list[list[float | None]]) -> list[float | None]:
    """Weighted sum per row, as in training: None counts as 0 beside other values, and a row of None alone has no sum.

    Nor has a row in which a reward with a weight was not finite or failed (`Scores.faults`, `Scores.failed`).
    """
    trained = [(w, column) for w, column in zip(rewards.weights, values) if w != 0]
    out = {row for _, column in trained for name in ("faults", "failed") for row in getattr(column, name, ())}
    rows = enumerate(zip(*(column for _, column in trained)))
    return [
        None if i in out or all(v is None for v in row) else sum(w * (v or 0.0) for (w, _), v in zip(trained, row))
        for i, row in rows
    ]


def mean_and_error(values: Sequence[float | None]) -> dict[str, float | int | None]:
    """Mean and its standard error over the rows that could be scored, and their number."""
    scored = [value for value in values if value is not None]
    error = statistics.stdev(scored) / len(scored) ** 0.5 if len(scored) > 1 else None
    return {"mean": statistics.fmean(scored) if scored else None, "standard_error": error, "rows": len(scored)}


def wilson_interval(right: int, rows: int, z: float = Z_95) -> tuple[float, float]:
    """Confidence interval of a share (Wilson 1927), which stays inside 0 to 1 and holds for few rows too."""
    if rows == 0:
        return 0.0, 1.0
    share, spread = right / rows, z * z / rows
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / rows + spread / (4 * rows))
    return max(0.0, centre - half), min(1.0, centre + half)


def accuracy(values: Sequence[float | None]) -> dict[str, float | int | list[float] | None]:
    """Share of the scorable rows with value 1, with a 95 % Wilson interval."""
    scored = [value for value in values if value is not None]
    right = sum(value >= 1 - 1e-9 for value in scored)
    low, high = wilson_interval(right, len(scored))
    share = right / len(scored) if scored else None
    return {"accuracy": share, "interval": [low, high], "right": right, "rows": len(scored)}


def by_category(values: Sequence, categories: Sequence, figure) -> dict[str, dict]:
    """`figure` of the values of each category, by name."""
    kinds = sorted(set(categories), key=str)
    return {str(kind): figure([v for v, c in zip(values, categories) if c == kind]) for kind in kinds}


def figures(rewards: RewardSet, values: list[list[float | None]], categories: Sequence | None) -> dict[str, Any]:
    """Everything that an evaluation says about one model, for its JSON line."""
    totals = weighted_totals(rewards, values)
    line: dict[str, Any] = {
        "reward": mean_and_error(totals),
        "rewards": {name: mean_and_error(column) for name, column in zip(rewards.names, values)},
    }
    exact = {name: column for name, column in zip(rewards.names, values) if name in ACCURACY_REWARDS}
    if exact:
        line["accuracy"] = {name: accuracy(column) for name, column in exact.items()}
    if categories is not None:
        line["category"] = by_category(totals, categories, mean_and_error)
        if exact:
            line["category_accuracy"] = {
                name: by_category(column, categories, accuracy) for name, column in exact.items()
            }
    return line


def difference(ours: Sequence[float | None], theirs: Sequence[float | None]) -> dict[str, float | int | None]:
    """Mean of the row-wise differences and its standard error: both models had the same rows and seeds."""
    pairs = zip(ours, theirs, strict=True)
    return mean_and_error([a - b for a, b in pairs if a is not None and b is not None])


def comparison_table(names: tuple[str, str], first: dict, second: dict, gain: dict) -> str:
    """Two models side by side: total, rewards, accuracies, categories; `gain` is first minus second, row by row."""

    def cell(figure: dict | None) -> str:
        if not figure or figure.get("mean", figure.get("accuracy")) is None:
            return "-"
        if "interval" in figure:
            low, high = figure["interval"]
            return f"{figure['accuracy']:.3f} [{low:.3f}, {high:.3f}]"
        error = figure["standard_error"]
        return f"{figure['mean']:.3f}" + (f" +- {error:.3f}" if error is not None else "")

    def lines(label: str, key: str) -> list[tuple[str, str, str]]:
        return [(f"{label}{name}", cell(figure), cell(second[key].get(name))) for name, figure in first[key].items()]

    rows = [("", *names), ("reward", cell(first["reward"]), cell(second["reward"]))]
    rows += lines("  ", "rewards") + (lines("  accuracy ", "accuracy") if "accuracy" in first else [])
    rows += lines("  category ", "category") if "category" in first else []
    rows.append(("difference", cell(gain), "(first minus second, row by row)"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join(part.ljust(width) for part, width in zip(row, widths)).rstrip() for row in rows)


def short_names(first: str, second: str) -> tuple[str, str]:
    """The last parts of two model names, as many as it takes to tell them apart."""
    for parts in (1, 2, 3):
        names = ["/".join(Path(name).parts[-parts:]) for name in (first, second)]
        if names[0] != names[1]:
            return names[0], names[1]
    return first, second


def side_by_side(names: tuple[str, str], *cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells in turns, so that a row of an even number of columns holds the same prompt of both models."""
    return [{**cell, "prompt": f"[{name}] {cell['prompt']}"} for pair in zip(*cells) for name, cell in zip(names, pair)]


def compare(names: tuple[str, str], ours: Scored, theirs: Scored) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The mean difference of two models and the cells of both; their table goes to stderr, if there are rewards."""
    names, gain = short_names(*names), difference(ours.totals, theirs.totals)
    if ours.line:
        print(comparison_table(names, ours.line, theirs.line, gain), file=sys.stderr)
    return gain, side_by_side(names, ours.cells, theirs.cells)
