"""Score a checkpoint on held-out rows: `python -m janus_trl.scripts.evaluate --model_name_or_path DIR --task t2i …`.

With `--benchmark` it makes the pictures of a benchmark in the layout of its official scorer (see `generate`), and
scores them if rewards are named. Prints one JSON line; with `--compare` also a table of both models, on stderr.

A row's random numbers depend on `--seed` and its position alone, not on batches or the machine.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from transformers import JanusProcessor

from janus_trl.benchmark_layouts import LAYOUTS, check_layout
from janus_trl.benchmark_run import prepare_benchmark, run_benchmark
from janus_trl.callbacks import save_grid
from janus_trl.config_checks import at_least, check_prompt_template, one_of
from janus_trl.configs import TEMPLATE_HELP
from janus_trl.data import load_training_dataset
from janus_trl.data_report import validated
from janus_trl.evaluation import GRID_ROWS, Scored, call_rewards, compare, figures, weighted_totals
from janus_trl.inference import TEXT_LENGTHS, base_checkpoint, decode_engine, load, picture_decoder, usual_text_length
from janus_trl.prompts import prompt_template, user_text
from janus_trl.recipe import or_exit, parse_recipe, refuse_launcher
from janus_trl.rewards import RewardSet, check_reward_rows, get_reward_funcs
from janus_trl.sampling import Rollout, SamplingSettings, rollout, row_seed
from janus_trl.script_arguments import JanusScriptArguments
from janus_trl.scripts.run import limit_rows


@dataclass
class EvaluateArguments(JanusScriptArguments):
    """What is scored, and how it is sampled; those of the data are the ones of the training scripts."""

    model_name_or_path: str = field(default=None, metadata={"help": "Folder (also of an adapter), Hub id, or `tiny`."})
    task: str = field(default="t2i", metadata={"help": "`t2i` or `i2t`."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split that is scored."})
    max_text_length: int | None = field(
        default=None, metadata={"help": "Text tokens at most; unset: 0 (t2i) or 256 (i2t), 24 or 40 on tiny data."}
    )
    guidance_scale: float | None = field(
        default=None,
        metadata={"help": "t2i, >= 1; unset: 5, or 1 on tiny data; in a benchmark that of the checkpoint."},
    )
    temperature: float = field(default=1.0, metadata={"help": "Temperature of text."})
    image_temperature: float = field(default=1.0, metadata={"help": "Temperature of image codes."})
    greedy: bool = field(default=False, metadata={"help": "Take the likeliest id instead of sampling."})
    batch_size: int = field(default=64, metadata={"help": "Rows that are sampled at a time."})
    seed: int = field(default=0, metadata={"help": "Each row's seed is made of this and the row's number."})
    prompt_template: str | None = field(default=None, metadata={"help": TEMPLATE_HELP})
    samples_png: str | None = field(default=None, metadata={"help": "Draw the first 16 rows to this file."})
    compare: str | None = field(
        default=None, metadata={"help": "Another model for the same rows and seeds: figures of both, side by side."}
    )
    benchmark: str | None = field(default=None, metadata={"help": f"t2i: {', '.join(LAYOUTS)}; needs output_dir."})
    prompts: str | None = field(default=None, metadata={"help": "benchmark: its prompts, as for generate."})
    output_dir: str | None = field(default=None, metadata={"help": "benchmark: folder of the pictures."})
    num_images: int | None = field(default=None, metadata={"help": "benchmark: pictures per prompt, unset: official."})
    use_cuda_graphs: bool = field(default=True, metadata={"help": "Capture the decoding steps on a GPU."})

    def __post_init__(self):
        one_of(self, "task", tuple(TEXT_LENGTHS))
        self.dataset_train_split = None  # not loaded
        tiny = self.dataset_name == "tiny" if self.benchmark is None else self.model_name_or_path == "tiny"
        if self.max_text_length is None:
            self.max_text_length = usual_text_length(self.model_name_or_path, self.task, tiny)
        if self.guidance_scale is None and self.benchmark is None:
            self.guidance_scale = 1.0 if tiny else 5.0
        at_least(self, "guidance_scale", 1, "1 is no guidance, Janus was published with 5")
        at_least(self, "max_text_length", 0 if self.task == "t2i" else 1, "0, for t2i only, opens the image at once")
        at_least(self, "batch_size", 1, "rows that are sampled at a time")
        at_least(self, "max_test_rows", 1, "leave it unset for all rows")
        at_least(self, "num_images", 1, "pictures per prompt")
        at_least(self, "temperature", 0.01, "for the likeliest ids use --greedy true")
        at_least(self, "image_temperature", 0.01, "for the likeliest ids use --greedy true")
        check_prompt_template(self)
        self._check_benchmark()

    def _check_benchmark(self) -> None:
        if self.benchmark is None:
            for name in ("prompts", "output_dir", "num_images"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is for a benchmark; set benchmark: {' | '.join(LAYOUTS)}.")
            return
        check_layout(self.benchmark, "benchmark")
        if self.task != "t2i":
            raise ValueError(f"benchmark = {self.benchmark!r} is one of pictures; set task: t2i.")
        if self.dataset_name is not None:
            raise ValueError("dataset_name and benchmark are both set; a benchmark takes its rows from prompts.")
        for name in ("prompts", "output_dir"):
            if not getattr(self, name):
                raise ValueError(f"{name} is not set, which benchmark = {self.benchmark!r} needs.")


def configure(argv: list[str]) -> EvaluateArguments:
    """The arguments; a ValueError says what is wrong."""
    (args,) = parse_recipe((EvaluateArguments,), argv)
    base_checkpoint(args.model_name_or_path)
    if args.compare is not None:
        base_checkpoint(args.compare)
    if args.benchmark is None:
        hint = "; with benchmark it shares the pictures among several processes"
        refuse_launcher("evaluate", "score all rows", hint)
    if not args.reward_funcs and args.benchmark is None:
        raise ValueError("reward_funcs is not set. Name at least one reward, e.g. --reward_funcs pickscore.")
    return args


def load_rows(args: EvaluateArguments) -> tuple[Dataset, RewardSet]:
    """Rows and rewards, checked before weights load."""
    rows = limit_rows(load_training_dataset(args, args.task), args)["test"]
    checks = {"name": "test", "rows": args.validate_rows, "bad_rows": args.bad_rows}
    processor = JanusProcessor.from_pretrained(base_checkpoint(args.model_name_or_path))
    rows, _ = validated(rows, args.task, processor, **checks)
    rewards = get_reward_funcs(args.reward_funcs, args.task, rows.column_names, args.reward_batch_size)
    check_reward_rows(args.reward_funcs, rows)
    return rows, rewards


def sample(model, processor: JanusProcessor, rows: Dataset, args: EvaluateArguments) -> Rollout:
    """One completion per row."""
    shared = ("task", "max_text_length", "guidance_scale", "temperature", "image_temperature", "greedy", "batch_size")
    settings = SamplingSettings(**{name: getattr(args, name) for name in shared})
    seeds = [row_seed(args.seed, "eval", i) for i in range(len(rows))]
    images = list(rows["images"]) if args.task == "i2t" else None
    tools = {"engine": decode_engine(model, args.use_cuda_graphs), "progress": sys.stderr.isatty()}
    tools["decoder"] = picture_decoder(model) if args.task == "t2i" else None
    return rollout(model, processor, list(rows["prompt"]), settings, seeds, images, **tools)


def evaluate_model(name: str, rows: Dataset, rewards: RewardSet, args: EvaluateArguments) -> Scored:
    """Sample and score one model; its weights are freed afterwards."""
    model, processor = load(name, base_checkpoint(name), args.prompt_template)
    or_exit(lambda _: rewards.load(), [])
    result = sample(model, processor, rows, args)
    texts = processor.batch_decode(result.completion_ids, skip_special_tokens=True)
    records = [dict(row) for row in rows]
    given = (rewards, records, texts, result.completion_ids, result.images)
    values = or_exit(lambda _: call_rewards(*given), [])
    totals = weighted_totals(rewards, values)
    line = {"prompt_template": prompt_template(processor), "rows": len(rows)}
    line |= figures(rewards, values, list(rows["category"]) if "category" in rows.column_names else None)
    pictures = result.images or [next(iter(row["images"] or []), None) for row in records[:GRID_ROWS]]
    cells = [
        {"image": picture, "prompt": user_text(row["prompt"]), "reasoning": text, "reward": total}
        for picture, row, text, total in zip(pictures[:GRID_ROWS], records, texts, totals)
        if picture is not None
    ]
    return Scored(line, totals, cells)


def evaluate_dataset(args: EvaluateArguments, rows: Dataset, rewards: RewardSet) -> dict[str, Any]:
    """The JSON line of an evaluation on rows of a data set; draws the grid, prints the table."""
    ours = evaluate_model(args.model_name_or_path, rows, rewards, args)
    line = {name: getattr(args, name) for name in ("model_name_or_path", "task", "greedy", "seed")} | ours.line
    cells = ours.cells
    if args.compare is not None:
        theirs = evaluate_model(args.compare, rows, rewards, args)
        gain, cells = compare((args.model_name_or_path, args.compare), ours, theirs)
        line["compare"] = {"model_name_or_path": args.compare, **theirs.line, "difference": gain}
    if args.samples_png and cells:
        save_grid(cells, args.samples_png)
    return line


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    start = time.perf_counter()
    args = or_exit(configure, argv)
    if args.benchmark is not None:
        benchmark = or_exit(lambda _: prepare_benchmark(args), argv)
        if args.dry_run:
            return print(benchmark.summary())
        line = run_benchmark(benchmark, args)
    else:
        rows, rewards = or_exit(lambda _: load_rows(args), argv)
        if args.dry_run:
            return print(f"{args.task}: {len(rows)} rows of {args.dataset_name}, rewards: {', '.join(rewards.names)}")
        line = evaluate_dataset(args, rows, rewards)
    if line is not None:
        print(json.dumps({**line, "seconds": round(time.perf_counter() - start, 2)}))


if __name__ == "__main__":
    main()
