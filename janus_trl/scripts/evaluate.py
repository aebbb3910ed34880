"""Score a checkpoint on held-out rows: `python -m janus_trl.scripts.evaluate --model_name_or_path DIR --task t2i …`.

Prints one JSON line. A row's random numbers depend on `--seed` and its position alone, not on batches or the machine.
"""

import asyncio
import inspect
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel
from transformers import JanusProcessor, TrainerState

from janus_trl.callbacks import save_grid
from janus_trl.config_checks import at_least, check_prompt_template, one_of
from janus_trl.configs import TEMPLATE_HELP
from janus_trl.data import load_training_dataset
from janus_trl.data_report import validated
from janus_trl.modeling import JanusForInterleavedGeneration, bind_special_ids
from janus_trl.prompts import bind_prompt_template, prompt_template
from janus_trl.recipe import or_exit, parse_recipe, resolve_model
from janus_trl.rewards import RewardSet, check_reward_rows, get_reward_funcs
from janus_trl.sampling import Rollout, SamplingSettings, rollout, row_seed
from janus_trl.script_arguments import JanusScriptArguments
from janus_trl.scripts.run import limit_rows

TEXT_LENGTHS = {"t2i": (0, 24), "i2t": (256, 40)}  # default in general, and on tiny data (as in recipes/tiny)


@dataclass
class EvaluateArguments(JanusScriptArguments):
    """What is scored, and how it is sampled; those of the data are the ones of the training scripts."""

    model_name_or_path: str = field(default=None, metadata={"help": "Folder (also of an adapter), Hub id, or `tiny`."})
    task: str = field(default="t2i", metadata={"help": "`t2i` or `i2t`."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split that is scored."})
    max_text_length: int | None = field(
        default=None, metadata={"help": "Text tokens at most; unset: 0 (t2i) or 256 (i2t), 24 or 40 on tiny data."}
    )
    guidance_scale: float | None = field(default=None, metadata={"help": "t2i, >= 1; unset: 5, or 1 on tiny data."})
    temperature: float = field(default=1.0, metadata={"help": "Temperature of text."})
    image_temperature: float = field(default=1.0, metadata={"help": "Temperature of image codes."})
    greedy: bool = field(default=False, metadata={"help": "Take the likeliest id instead of sampling."})
    batch_size: int = field(default=64, metadata={"help": "Rows that are sampled at a time."})
    seed: int = field(default=0, metadata={"help": "Each row's seed is made of this and the row's number."})
    prompt_template: str | None = field(default=None, metadata={"help": TEMPLATE_HELP})
    samples_png: str | None = field(default=None, metadata={"help": "Draw the first 16 rows to this file."})

    def __post_init__(self):
        one_of(self, "task", tuple(TEXT_LENGTHS))
        self.dataset_train_split = None  # not loaded
        tiny = self.dataset_name == "tiny"
        if self.max_text_length is None:
            self.max_text_length = TEXT_LENGTHS[self.task][tiny]
        if self.guidance_scale is None:
            self.guidance_scale = 1.0 if tiny else 5.0
        at_least(self, "guidance_scale", 1, "1 is no guidance, Janus was published with 5")
        at_least(self, "max_text_length", 0 if self.task == "t2i" else 1, "0, for t2i only, opens the image at once")
        at_least(self, "batch_size", 1, "rows that are sampled at a time")
        at_least(self, "max_test_rows", 1, "leave it unset for all rows")
        at_least(self, "temperature", 0.01, "for the likeliest ids use --greedy true")
        at_least(self, "image_temperature", 0.01, "for the likeliest ids use --greedy true")
        check_prompt_template(self)


def configure(argv: list[str]) -> tuple[EvaluateArguments, str, Dataset, RewardSet]:
    """Arguments, base checkpoint, rows and rewards, checked before weights load; a ValueError says what is wrong."""
    (args,) = parse_recipe((EvaluateArguments,), argv)
    base = args.model_name_or_path
    base = resolve_model(PeftConfig.from_pretrained(base).base_model_name_or_path if is_adapter(base) else base)
    if not args.reward_funcs:
        raise ValueError("reward_funcs is not set. Name at least one reward, e.g. --reward_funcs pickscore.")
    rows = limit_rows(load_training_dataset(args, args.task), args)["test"]
    checks = {"name": "test", "rows": args.validate_rows, "bad_rows": args.bad_rows}
    rows, _ = validated(rows, args.task, JanusProcessor.from_pretrained(base), **checks)
    rewards = get_reward_funcs(args.reward_funcs, args.task, rows.column_names, args.reward_batch_size)
    check_reward_rows(args.reward_funcs, rows)
    return args, base, rows, rewards


def is_adapter(folder: str | None) -> bool:
    """Whether a folder holds a PEFT adapter instead of a model."""
    return folder is not None and (Path(folder) / "adapter_config.json").is_file()


def load(name: str, base: str, template: str | None = None) -> tuple[JanusForInterleavedGeneration, JanusProcessor]:
    """The model (adapter merged; bfloat16 on a GPU, float32 on CPU) and its processor, with a prompt template."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    # A trainer saves the processor, with the template of the training, beside an adapter too.
    with_processor = is_adapter(name) and (Path(name) / "processor_config.json").is_file()
    processor = JanusProcessor.from_pretrained(name if with_processor else base)
    bind_prompt_template(processor, template)
    model = JanusForInterleavedGeneration.from_pretrained(base, dtype=dtype)
    model = PeftModel.from_pretrained(model, name).merge_and_unload() if is_adapter(name) else model
    bind_special_ids(model, processor)
    return model.to(device).eval(), processor


def sample(model, processor: JanusProcessor, rows: Dataset, args: EvaluateArguments) -> Rollout:
    """One completion per row."""
    shared = ("task", "max_text_length", "guidance_scale", "temperature", "image_temperature", "greedy", "batch_size")
    settings = SamplingSettings(**{name: getattr(args, name) for name in shared})
    seeds = [row_seed(args.seed, "eval", i) for i in range(len(rows))]
    images = list(rows["images"]) if args.task == "i2t" else None
    return rollout(model, processor, list(rows["prompt"]), settings, seeds, images, progress=sys.stderr.isatty())


def score(rewards: RewardSet, rows: Dataset, texts: list[str], result: Rollout) -> list[list[float | None]]:
    """The values of each reward, called with what training passes."""
    given: dict[str, Any] = {name: list(rows[name]) for name in rows.column_names if name != "prompt"}
    given |= {"prompts": list(rows["prompt"]), "completions": texts, "completion_ids": result.completion_ids}
    given |= {"trainer_state": TrainerState(), "log_extra": lambda *_: None, "log_metric": lambda *_: None}
    given |= {"generated_images": result.images} if result.images else {}
    values = [function(**given) for function in rewards.funcs]
    return [asyncio.run(value) if inspect.iscoroutine(value) else value for value in values]


def mean_and_error(values: list[float | None]) -> dict[str, float | int | None]:
    """Mean and its standard error over the rows that could be scored, and their number."""
    scored = [value for value in values if value is not None]
    error = statistics.stdev(scored) / len(scored) ** 0.5 if len(scored) > 1 else None
    return {"mean": statistics.fmean(scored) if scored else None, "standard_error": error, "rows": len(scored)}


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    start = time.perf_counter()
    args, base, rows, rewards = or_exit(configure, argv)
    if args.dry_run:
        return print(f"{args.task}: {len(rows)} rows of {args.dataset_name}, rewards: {', '.join(rewards.names)}")
    model, processor = load(args.model_name_or_path, base, args.prompt_template)
    rewards.load()
    result = sample(model, processor, rows, args)
    texts = processor.batch_decode(result.completion_ids, skip_special_tokens=True)
    values = score(rewards, rows, texts, result)
    # Weighted sum; an unscorable value counts as 0, as in training.
    totals = [sum(w * (v or 0.0) for w, v in zip(rewards.weights, row)) for row in zip(*values)]
    line = {name: getattr(args, name) for name in ("model_name_or_path", "task", "greedy", "seed")}
    each = {name: mean_and_error(column) for name, column in zip(rewards.names, values)}
    line |= {
        "prompt_template": prompt_template(processor),
        "rows": len(rows),
        "reward": mean_and_error(totals),
        "rewards": each,
    }
    if "category" in rows.column_names:
        kinds = list(rows["category"])
        groups = {str(kind): [t for t, k in zip(totals, kinds) if k == kind] for kind in sorted(set(kinds), key=str)}
        line["category"] = {kind: mean_and_error(group) for kind, group in groups.items()}
    if args.samples_png:
        pictures = result.images or [next(iter(images), None) for images in rows["images"]]
        cells = zip(pictures[:16], rows["prompt"], texts, totals)
        items = [dict(zip(("image", "prompt", "reasoning", "reward"), cell)) for cell in cells if cell[0] is not None]
        save_grid(items, args.samples_png)
    print(json.dumps({**line, "seconds": round(time.perf_counter() - start, 2)}))


if __name__ == "__main__":
    main()
