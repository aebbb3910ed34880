"""Generation into a folder that survives being killed: what is there stays, and a restart makes only what is missing.

Rows (prompt, sample) are cut into batches once, in order; a batch always holds the same rows, whichever process takes
it and whatever is there already. So the pictures of a run depend neither on interruptions nor on the number of
processes: a batch of which a picture is missing is sampled again whole, and only what is missing is written. Files are
written under a temporary name and renamed. Processes share nothing but the folder.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm.auto import tqdm
from transformers import GenerationConfig, ProcessorMixin

from .benchmark_layouts import PromptsLayout, png, tiled
from .callbacks import save_grid
from .data_text import control_tokens, neutralise
from .engine import DecodeEngine
from .images import load_image
from .inference import base_checkpoint, picture_decoder, this_process, weights_fingerprint
from .modeling import JanusForInterleavedGeneration
from .sampling import Rollout, SamplingSettings, rollout, row_seed

# Fields of the arguments that the sampler gets.
SAMPLED_WITH = ("max_text_length", "guidance_scale", "temperature", "image_temperature", "greedy", "batch_size")
SETTINGS_FILE, TEMPORARY = "generation.json", ".partial"
SHEET_PICTURES, SHEET_COLUMNS = 48, 8


@dataclass(frozen=True)
class Generation:
    """What is generated, and where.

    Attributes:
        output: the folder.
        layout: prompts, pictures per prompt and paths.
        settings: of the sampler; its `batch_size` is the number of rows of a batch.
        seed: row seeds are `row_seed(seed, "generate", prompt, sample)`.
        process, processes: which batches are of this process.
    """

    output: Path
    layout: PromptsLayout
    settings: SamplingSettings
    seed: int = 0
    process: int = 0
    processes: int = 1

    @property
    def draws(self) -> bool:
        """Whether pictures are made (`t2i`), not answers."""
        return self.settings.task == "t2i"

    def batches(self) -> list[list[tuple[int, int]]]:
        """All (prompt, sample) pairs, in batches."""
        rows = [(i, s) for i in range(len(self.layout.rows)) for s in range(self.layout.num_images)]
        size = self.settings.batch_size
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def record(self, index: int, sample: int) -> Path:
        """Text, ids and seed of one row; written before its picture."""
        return self.output / "records" / f"{index:05d}-{sample:04d}.json"

    def picture(self, index: int, sample: int) -> Path:
        return self.output / self.layout.picture(index, sample)

    def done(self, index: int, sample: int) -> bool:
        """Whether a row has all its files."""
        made = self.record(index, sample).is_file()
        return made and (not self.draws or self.picture(index, sample).is_file())

    def write(self, path: Path, content: bytes | Callable[[Path], Any]) -> None:
        """Write a file whole or not at all; a callable writes it to the path that it gets."""
        temporary = self.output / TEMPORARY / f"{self.process}{path.suffix}"
        for folder in (temporary.parent, path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        content(temporary) if callable(content) else temporary.write_bytes(content)
        os.replace(temporary, path)


def rows_digest(layout: PromptsLayout) -> str:
    """A digest of prompts and input pictures, to tell one set of prompts from another."""
    rows = [[row.prompt, row.name, [str(picture) for picture in row.images]] for row in layout.rows]
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()


def check_settings(run: Generation, settings: dict[str, Any], write: bool = True) -> None:
    """Refuse a folder that holds pictures made otherwise; a new one gets `settings` in `generation.json`.

    Raises:
        ValueError: naming the first setting that differs, with both values.
    """
    path = run.output / SETTINGS_FILE
    if path.is_file():
        there = json.loads(path.read_text())
        for name in settings:
            if there.get(name) != settings[name]:
                raise ValueError(
                    f"output_dir = {run.output} holds another run: {name} is {there.get(name)!r} there and "
                    f"{settings[name]!r} here. Use another output_dir, or delete it."
                )
    elif write:
        run.write(path, (json.dumps(settings, indent=2) + "\n").encode())


def prepare(args: Any, layout: PromptsLayout, output: Path, model_name: str) -> tuple[Generation, str]:
    """The run and the base checkpoint of its model, checked against what is in the folder; no weights are loaded.

    Args:
        args: of the generate or evaluate script: the fields in `SAMPLED_WITH`, `task`, `seed`, `prompt_template`.

    Raises:
        ValueError: the model, or a folder that holds another run.
    """
    base = base_checkpoint(model_name)
    if args.guidance_scale is None:
        args.guidance_scale = published_guidance(base)
    sampled = {name: getattr(args, name) for name in SAMPLED_WITH}
    settings = SamplingSettings(task=args.task, **sampled)
    process, processes = this_process()
    run = Generation(output, layout, settings, args.seed, process, processes)
    described = {"model": model_name, "weights": weights_fingerprint(model_name, base), "task": args.task}
    described |= {"layout": layout.name, "prompts": len(layout.rows), "prompts_digest": rows_digest(layout)}
    described |= {"num_images": layout.num_images, "seed": args.seed, "prompt_template": args.prompt_template}
    check_settings(run, {**described, **sampled})
    return run, base


def published_guidance(base: str) -> float:
    """The guidance scale in a checkpoint's generation config; 5, that of the published script, if it has none."""
    try:
        scale = GenerationConfig.from_pretrained(base).guidance_scale
    except OSError:
        scale = None
    return 5.0 if scale is None else max(float(scale), 1.0)


def generate(
    run: Generation,
    model: JanusForInterleavedGeneration,
    processor: ProcessorMixin,
    engine: DecodeEngine | None = None,
) -> int:
    """Make what is missing of this process's share, then what is joined from it. Returns the rows made."""
    control, made = list(control_tokens(processor.tokenizer)), 0
    tools = {"engine": engine, "decoder": picture_decoder(model) if run.draws else None}
    batches = run.batches()
    # A short last batch rounds as beside whole ones, also where it is the only one of this process or of a restart.
    tools["capacity"] = max(map(len, batches), default=0)
    mine = batches[run.process :: run.processes]
    for batch in tqdm(mine, desc="batches", disable=True if run.process else None):
        if all(run.done(*row) for row in batch):
            continue
        made += _make_batch(run, batch, model, processor, control, tools)
    join(run)
    return made


def said(run: Generation, made: int) -> str:
    """One line about what this process made."""
    total = len(run.layout.rows) * run.layout.num_images
    share = f" (process {run.process} of {run.processes})" if run.processes > 1 else ""
    return f"{run.output}: made {made} of {total}{share}."


def _make_batch(run: Generation, batch, model, processor, control: list[str], tools: dict) -> int:
    """Sample the rows of a batch and write those that are missing; their number."""
    rows = [run.layout.rows[index] for index, _ in batch]
    seeds = [row_seed(run.seed, "generate", *row) for row in batch]
    pictures = None if run.draws else [[load_image(image) for image in row.images] for row in rows]
    prompts = [neutralise(row.prompt, control) for row in rows]
    result = rollout(model, processor, prompts, run.settings, seeds, pictures, **tools)
    texts = texts_of(processor, result)
    made = 0
    for k, (index, sample) in enumerate(batch):
        if run.done(index, sample):
            continue
        record = {"index": index, "sample": sample, "prompt": rows[k].prompt, "seed": seeds[k], "text": texts[k]}
        record |= {"image": run.layout.picture(index, sample)} if run.draws else {"images": _names(rows[k].images)}
        record["completion_ids"] = result.completion_ids[k]
        run.write(run.record(index, sample), json.dumps(record).encode())
        if run.draws:
            run.write(run.picture(index, sample), png(result.images[k]))
        made += 1
    return made


def texts_of(processor: ProcessorMixin, result: Rollout) -> list[str]:
    """The text of each completion: reasoning or answer, without codes and special tokens."""
    size = len(processor.tokenizer)
    ids = [[i for i in row if i < size] for row in result.completion_ids]
    return processor.batch_decode(ids, skip_special_tokens=True)


def _names(images: tuple) -> list[str]:
    return [image if isinstance(image, str) else "" for image in images]


def join(run: Generation) -> bool:
    """Write what belongs to a whole prompt or to the whole run, where all its rows are there. Whether the run is whole.

    Every process calls it when it is done; the last of them finds everything. Two that find it write the same.
    """
    layout, whole = run.layout, True
    for index in range(len(layout.rows)):
        for name, content in layout.texts(index).items():
            if not (run.output / name).is_file():
                run.write(run.output / name, content.encode())
        if not all(run.done(index, sample) for sample in range(layout.num_images)):
            whole = False
        elif run.draws and (grid := layout.grid(index)) and not (run.output / grid).is_file():
            pictures = [load_image(str(run.picture(index, sample))) for sample in range(layout.num_images)]
            run.write(run.output / grid, png(tiled(pictures)))
    if whole:
        _write_summary(run)
        if run.processes == 1:
            shutil.rmtree(run.output / TEMPORARY, ignore_errors=True)
    return whole


def read_records(run: Generation) -> list[dict[str, Any]]:
    """All records, in the order of prompts and samples."""
    rows = [row for batch in run.batches() for row in batch]
    return [json.loads(run.record(*row).read_text()) for row in rows]


def _write_summary(run: Generation) -> None:
    """`samples.jsonl` or `answers.jsonl`: all texts; and a contact sheet of the first pictures."""
    records = read_records(run)
    for record in records:
        del record["completion_ids"]
        if not run.draws:
            record["answer"] = record.pop("text")
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    run.write(run.output / ("samples.jsonl" if run.draws else "answers.jsonl"), lines.encode())
    items = [item for record in records[:SHEET_PICTURES] if (item := _sheet_item(run, record))]
    if items:
        count = run.layout.num_images  # the samples of a prompt stay together
        columns = count * max(1, SHEET_COLUMNS // count) if count <= SHEET_COLUMNS else SHEET_COLUMNS
        run.write(run.output / "contact_sheet.png", lambda path: save_grid(items, path, columns=columns))


def _sheet_item(run: Generation, record: dict[str, Any]) -> dict[str, Any] | None:
    if run.draws:
        picture: Image.Image | None = load_image(str(run.picture(record["index"], record["sample"])))
    else:
        images = run.layout.rows[record["index"]].images
        picture = load_image(images[0]) if images else None
    text = record.get("text") or record.get("answer")
    return picture and {"image": picture, "prompt": record["prompt"], "reasoning": text}
