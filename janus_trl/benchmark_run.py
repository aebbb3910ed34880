"""A benchmark for one or two models: pictures in the official layout, and rewards over them."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from .benchmark_layouts import LAYOUTS, PromptsLayout
from .callbacks import save_grid
from .evaluation import GRID_ROWS, Scored, append_scores, call_rewards, compare, figures, weighted_totals
from .generation import Generation, generate, join, prepare, read_records, said
from .images import load_image
from .inference import decode_engine, leave, load, wait_for_all
from .prompt_files import read_prompts
from .recipe import or_exit
from .rewards import RewardSet, Scores, check_reward_rows, get_reward_funcs

SCORED_AT_ONCE = 256  # pictures in memory while they are scored
CATEGORIES = ("tag", "category")  # GenEval's, and that of the embedded world


@dataclass
class Benchmark:
    """What a benchmark makes; no weights are loaded yet."""

    models: list[tuple[str, Generation, str]]  # name, its run, its base checkpoint
    rewards: RewardSet | None

    @property
    def layout(self) -> PromptsLayout:
        return self.models[0][1].layout

    def summary(self) -> str:
        """One line for a dry run."""
        pictures, rewards = len(self.layout.rows) * self.layout.num_images, self.rewards
        names = ", ".join(rewards.names) if rewards else "none"
        return f"{self.layout.name}: {len(self.layout.rows)} prompts, {pictures} pictures a model, rewards: {names}"


def prepare_benchmark(args: Any) -> Benchmark:
    """Prompts, layout, rewards and folders, checked; the second model's pictures go to `compare` in the output folder.

    Raises:
        ValueError: what is wrong with them.
    """
    rows = read_prompts(args.prompts, None, None, "t2i")[: args.max_test_rows]
    layout = LAYOUTS[args.benchmark](rows, args.num_images)
    rewards = None
    if args.reward_funcs:
        columns = _columns(layout)
        rewards = get_reward_funcs(args.reward_funcs, "t2i", columns, args.reward_batch_size)
        simple = [name for name in columns if all(isinstance(row.metadata.get(name), str) for row in rows)]
        check_reward_rows(
            args.reward_funcs,
            Dataset.from_list([{"prompt": row.prompt} | {name: row.metadata[name] for name in simple} for row in rows]),
        )
    names, output, models = [args.model_name_or_path, args.compare], Path(args.output_dir), []
    guidance = args.guidance_scale
    for name, folder in zip(names, (output, output / "compare")):
        if name is not None:
            args.guidance_scale = guidance  # unset: each checkpoint has its own
            models.append((name, *prepare(args, layout, folder, name)))
    return Benchmark(models, rewards)


def _columns(layout: PromptsLayout) -> list[str]:
    """All keys of the prompts' rows, in order."""
    return list(dict.fromkeys(["prompt", *(key for row in layout.rows for key in row.metadata)]))


def run_benchmark(benchmark: Benchmark, args: Any) -> dict[str, Any] | None:
    """Make the pictures that are missing, score them, and return the JSON line; None on all processes but the first."""
    for name, run, base in benchmark.models:
        if not join(run):
            model, processor = load(name, base, args.prompt_template)
            made = generate(run, model, processor, decode_engine(model, args.use_cuda_graphs))
            print(said(run, made), file=sys.stderr)
            del model
    wait_for_all()  # the first process scores what all have made
    first = benchmark.models[0][1]
    leave()
    return None if first.process else _report(benchmark, args)


def _report(benchmark: Benchmark, args: Any) -> dict[str, Any]:
    for _, run, _ in benchmark.models:
        join(run)
    layout, rewards = benchmark.layout, benchmark.rewards
    if rewards:
        or_exit(lambda _: rewards.load(), [])
    scored = [_score(run, rewards) for _, run, _ in benchmark.models]
    line: dict[str, Any] = {"benchmark": layout.name, "prompts": len(layout.rows), "num_images": layout.num_images}
    line |= {name: getattr(args, name) for name in ("greedy", "seed")}
    reports = [
        {"model_name_or_path": name, "output_dir": str(run.output), "guidance_scale": run.settings.guidance_scale}
        | found.line
        for (name, run, _), found in zip(benchmark.models, scored)
    ]
    line |= reports[0]
    cells, where = scored[0].cells, args.samples_png
    if args.compare is not None:
        gain, cells = compare((args.model_name_or_path, args.compare), *scored)
        line["compare"] = reports[1] | ({"difference": gain} if rewards else {})
        where = where or str(Path(args.output_dir) / "comparison.png")
    if where:
        save_grid(cells, where)
    return line


def _score(run: Generation, rewards: RewardSet | None) -> Scored:
    """All pictures of one model, in order; without rewards there are cells alone."""
    if rewards is None:
        return Scored({}, [], _cells(run, []))
    columns = _columns(run.layout)
    values = [Scores() for _ in rewards.funcs]
    for records in _chunks(read_records(run), SCORED_AT_ONCE):
        metadata = [run.layout.rows[record["index"]].metadata for record in records]
        rows = [
            {name: row.get(name) for name in columns} | {"prompt": r["prompt"]} for row, r in zip(metadata, records)
        ]
        paths = [str(run.picture(record["index"], record["sample"])) for record in records]
        ids = [record["completion_ids"] for record in records]
        given = (rewards, rows, [record["text"] for record in records], ids, [load_image(path) for path in paths])
        part = or_exit(lambda _, given=given, paths=paths: call_rewards(*given, row_name=paths.__getitem__), [])
        for column, more in zip(values, part):
            append_scores(column, more)
    kind = next((name for name in CATEGORIES if name in columns), None)
    categories = [row.metadata.get(kind) for row in run.layout.rows for _ in range(run.layout.num_images)]
    totals = weighted_totals(rewards, values)
    return Scored(figures(rewards, values, categories if kind else None), totals, _cells(run, totals))


def _chunks(rows: list, size: int) -> Iterator[list]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _cells(run: Generation, totals: list[float]) -> list[dict[str, Any]]:
    """The first picture of each of the first prompts, for a grid."""
    count, cells = run.layout.num_images, []
    for record in read_records(run)[: GRID_ROWS * count : count]:
        picture = load_image(str(run.picture(record["index"], 0)))
        cell = {"image": picture, "prompt": record["prompt"], "reasoning": record["text"]}
        cells.append(cell | ({"reward": totals[record["index"] * count]} if totals else {}))
    return cells
