"""Score existing pictures: `python -m janus_trl.scripts.score --rewards pickscore --images DIR --prompts FILE`.

Writes one CSV row per picture and prints a table. The quickest way to understand a reward, and to see what it costs.
"""

import csv
import functools
import glob
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset
from transformers import TrainerState

from janus_trl.config_checks import at_least
from janus_trl.data import load_image
from janus_trl.evaluation import call_all
from janus_trl.recipe import RecipeParser, or_exit, read_recipe, refuse_launcher
from janus_trl.rewards import REGISTERED_REWARDS, RewardSet, check_reward_rows, get_reward_funcs, parse_reward_specs
from janus_trl.rewards.calling import named_parameters, wrapped_reward

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


@dataclass
class ScoreArguments:
    """What is scored, and by what."""

    rewards: list[str] = field(
        default=None,
        metadata={"help": "Names, dotted paths or mappings, e.g. pickscore '{name: jpeg_size, args: {quality: 50}}'."},
    )
    recipe: str | None = field(
        default=None, metadata={"help": "Recipe whose reward_funcs are taken instead (--config is the same)."}
    )
    images: list[str] = field(default=None, metadata={"help": "A folder, files or quoted patterns like 'out/*.png'."})
    prompts: str | None = field(
        default=None,
        metadata={
            "help": "A .txt file with one prompt per picture, in the order of the pictures' names (numbers count as "
            "numbers), or .jsonl rows {image, prompt, ...}; further keys are columns for the rewards."
        },
    )
    prompt: str | None = field(default=None, metadata={"help": "Instead of a file: one prompt for all pictures."})
    output: str = field(default="scores.csv", metadata={"help": "CSV file to write."})
    batch_size: int = field(default=64, metadata={"help": "Pictures that are opened and passed to a reward at a time."})

    def __post_init__(self):
        at_least(self, "batch_size", 1, "pictures at a time")
        if bool(self.rewards) == bool(self.recipe):
            raise ValueError("give either --rewards, e.g. --rewards jpeg_size, or the --config of a recipe.")
        if self.prompts and self.prompt is not None:
            raise ValueError("give either --prompts FILE or --prompt TEXT.")
        if not self.images and not self.prompts:
            raise ValueError("--images is not set. Give a folder, files or a quoted pattern, e.g. --images out/.")


def configure(argv: list[str]) -> tuple[ScoreArguments, list[dict[str, Any]], RewardSet]:
    """Arguments, rows (`image`: a path, `prompt`, further columns) and rewards; a ValueError says what is wrong."""
    # transformers' parser reserves the name `config` for a file of the script's own arguments.
    argv = ["--recipe" + word.removeprefix("--config") if word.split("=")[0] == "--config" else word for word in argv]
    (args,) = RecipeParser((ScoreArguments,)).parse_args_into_dataclasses(argv)
    refuse_launcher("score", "score all rows")
    specs = recipe_specs(args.recipe) if args.recipe else [read_spec(spec) for spec in args.rewards]
    rows = read_rows(args)
    columns = sorted(set().union(*rows) - {"image"})
    rewards = get_reward_funcs(specs, task="t2i", columns=columns)
    check_prompts(rewards, columns)
    check_reward_rows(specs, Dataset.from_list([{"prompt": None, **without_picture(row)} for row in rows]))
    return args, rows, rewards


def recipe_specs(path: str) -> Any:
    """The `reward_funcs` of a recipe; of one of both tasks those that score pictures, and a line names the others."""
    recipe = read_recipe(path)
    specs = recipe.get("reward_funcs")
    if recipe.get("task") != "both":
        return specs
    parsed = parse_reward_specs(specs)
    registered = {name: reward.tasks for name, reward in REGISTERED_REWARDS.items()}
    fits = ["t2i" in ((spec.task,) if spec.task else registered.get(spec.name, ("t2i",))) for spec in parsed]
    skipped = [str(spec.alias or spec.name) for spec, fit in zip(parsed, fits) if not fit]
    if all(fits) or not any(fits):
        return specs
    print(f"skipped, as they do not score pictures: {', '.join(skipped)}", file=sys.stderr)
    return [spec for spec, fit in zip(parsed, fits) if fit]


def check_prompts(rewards: RewardSet, columns: list[str]) -> None:
    """Refuse rewards that compare pictures with prompts where there are none: an empty text has a score, too."""
    for function in rewards.funcs if "prompt" not in columns else []:
        parameter = named_parameters(wrapped_reward(function)).get("prompts")
        if parameter is not None and parameter.default is parameter.empty:
            raise ValueError(f"reward '{function.__name__}' needs prompts; give --prompts FILE or --prompt TEXT.")


def read_spec(spec: str) -> Any:
    """A reward as written on the command line; mappings are YAML (or JSON).

    Raises:
        ValueError: Text that begins like a mapping and is none.
    """
    if not spec.lstrip().startswith("{"):
        return spec
    try:
        return yaml.safe_load(spec)
    except yaml.YAMLError as error:
        raise ValueError(f"--rewards {spec!r} is no valid mapping: {error}") from error


def without_picture(row: dict[str, Any]) -> dict[str, Any]:
    """The columns of a row; nested ones as JSON, since Arrow would fill the keys that a row lacks."""
    return {
        name: json.dumps(value, ensure_ascii=False) if _is_nested(value) else value
        for name, value in row.items()
        if name != "image"
    }


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))


def find_pictures(patterns: list[str]) -> list[str]:
    """Picture files of folders, names and patterns, sorted by name with numbers as numbers.

    Raises:
        ValueError: A pattern without a picture, or a file that does not exist.
    """
    found: set[str] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        names = [str(p) for p in path.iterdir()] if path.is_dir() else glob.glob(str(path))
        pictures = {name for name in names if Path(name).suffix.lower() in SUFFIXES and Path(name).is_file()}
        if not pictures:
            raise ValueError(f"--images {pattern}: there is no picture ({', '.join(SUFFIXES)}) of that name or in it.")
        found |= pictures
    return sorted(found, key=lambda name: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)])


def read_rows(args: ScoreArguments) -> list[dict[str, Any]]:
    """One row per picture.

    Raises:
        ValueError: Prompts and pictures that do not belong together, with both numbers or the name.
    """
    pictures = find_pictures(args.images) if args.images else []
    if args.prompts is None:
        shared = {} if args.prompt is None else {"prompt": args.prompt}
        return [{"image": picture, **shared} for picture in pictures]
    path = Path(args.prompts).expanduser()
    if not path.is_file():
        raise ValueError(f"--prompts {args.prompts}: there is no such file.")
    if path.suffix.lower() in (".jsonl", ".json"):
        return rows_of_jsonl(path, pictures)
    prompts = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    if not pictures:
        raise ValueError(f"--images is not set, and {args.prompts} names no pictures (a .jsonl file can).")
    if len(prompts) != len(pictures):
        raise ValueError(
            f"--prompts {args.prompts} has {len(prompts)} lines for {len(pictures)} pictures; give one line per "
            "picture, or .jsonl rows {image, prompt}, or one --prompt for all."
        )
    return [{"image": picture, "prompt": prompt.strip()} for picture, prompt in zip(pictures, prompts)]


def rows_of_jsonl(path: Path, pictures: list[str]) -> list[dict[str, Any]]:
    """Rows of a JSONL file; `image` is a path from its folder, or the name of one of `pictures`."""
    by_name = {Path(picture).name: picture for picture in pictures}
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not valid JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("image"), str):
            raise ValueError(f"{path}, line {number}: {line[:60]!r} names no `image`; write {{image, prompt, ...}}.")
        name = row["image"]
        picture = by_name.get(Path(name).name) if pictures else str(path.parent / Path(name).expanduser())
        if picture is None or not Path(picture).is_file():
            where = "not among the pictures of --images" if pictures else "not a file"
            raise ValueError(f"{path}, line {number}: image '{name}' is {where}.")
        rows.append({**row, "image": picture})
    unnamed = sorted(set(by_name.values()) - {row["image"] for row in rows})
    if unnamed or not rows:
        raise ValueError(
            f"{path} has no row for {len(unnamed)} of the pictures: {', '.join(unnamed[:3]) or 'it is empty'}."
        )
    return rows


def score(rewards: RewardSet, rows: list[dict[str, Any]], log_metric: Callable) -> list[list[float | None]]:
    """The values of every reward, called as in training with the decoded pictures of `rows`."""
    names = sorted(set().union(*rows) - {"image", "prompt"})
    columns = [without_picture(row) for row in rows]
    given: dict[str, Any] = {name: [row.get(name) for row in columns] for name in names}
    given |= {"prompts": [row.get("prompt", "") for row in rows], "completion_ids": [[] for _ in rows]}
    given |= {"completions": [row.get("completion") or row.get("reasoning") or "" for row in rows]}
    given |= {"trainer_state": TrainerState(), "log_extra": lambda *_: None, "log_metric": log_metric}
    given |= {"generated_images": [load_image(row["image"]) for row in rows]}
    return call_all(rewards, given, lambda row: rows[row]["image"])


def table(names: list[str], rows: list[dict[str, Any]], values: dict[str, list[float | None]]) -> str:
    """Mean, standard deviation, least and greatest value of each reward, and whose these are."""
    lines = [("reward", "scored", "mean", "sd", "min", "max", "lowest", "highest")]
    for name in names:
        scored = [(value, Path(row["image"]).name) for value, row in zip(values[name], rows) if value is not None]
        numbers = [value for value, _ in scored]
        cells = ["-"] * 6
        if scored:
            spread = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
            figures = (statistics.fmean(numbers), spread, min(numbers), max(numbers))
            cells = [*(f"{figure:.4f}" for figure in figures), min(scored)[1], max(scored)[1]]
        lines.append((name, f"{len(scored)}/{len(rows)}", *cells))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    args, rows, rewards = or_exit(configure, argv)
    or_exit(lambda _: rewards.load(), [])
    start = time.perf_counter()
    values: dict[str, list[float | None]] = {name: [] for name in rewards.names}
    counts: dict[str, float] = {}

    def count(name: str, value: float) -> None:
        counts[name] = counts.get(name, 0.0) + value

    for first in range(0, len(rows), args.batch_size):
        batch = functools.partial(score, rewards, rows[first : first + args.batch_size])
        for name, column in zip(rewards.names, or_exit(lambda _, batch=batch: batch(count), [])):
            for key, value in column.counts.items():
                count(f"{name}/{key}", value)
            count(f"{name}/nan", len(column.faults))
            values[name] += column
    seconds = time.perf_counter() - start
    with open(args.output, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "prompt", *rewards.names])
        for row, *cells in zip(rows, *values.values()):
            writer.writerow([row["image"], row.get("prompt", ""), *("" if cell is None else cell for cell in cells)])
    print(table(rewards.names, rows, values))
    for name, count in counts.items():
        if count:
            print(f"{name}: {count:g}")
    print(f"{len(rows)} pictures in {seconds:.1f} s; each one's values: {args.output}")


if __name__ == "__main__":
    main()
