"""SFT rows: which are refused, how long they are, their joint ids and labels, and the weight of each label."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from transformers import JanusProcessor, PreTrainedTokenizerBase
from trl.trainer.utils import pad

from .modeling import JanusForInterleavedGeneration, SpecialIds
from .prompts import encode_prompts, prompt_lengths


def refuse_edits(dataset: Dataset | None, name: str) -> None:
    """Refuse rows with input pictures and a target picture; reads list lengths only, decodes no picture.

    Raises:
        ValueError: naming data set and row; also for what is no data set whose rows are known.
    """
    if dataset is not None and not (isinstance(dataset, Dataset) and len(dataset)):
        found = "is empty" if isinstance(dataset, Dataset) else f"is of type {type(dataset).__name__}"
        raise ValueError(
            f"{name} {found}, but must be a datasets.Dataset with rows: pictures are encoded, and rows grouped by "
            "length, before training. Load it whole, or a slice such as train[:10000]."
        )
    if dataset is None or "images" not in dataset.column_names:
        return
    targets = [column for column in ("image", "image_codes") if column in dataset.column_names]
    start = 0
    for table in dataset.select_columns(["images", *targets]).with_format("arrow").iter(1000) if targets else ():
        given, drawn = _filled(table["images"]), [_filled(table[column]) for column in targets]
        both = [row for row, (has, *draws) in enumerate(zip(given, *drawn, strict=True)) if has and any(draws)]
        if both:
            raise ValueError(
                f"{name}, row {start + both[0]}: it has input pictures (images) and a target picture (image). A "
                "picture that is drawn from pictures is not supported: leave images empty, or give completion "
                "instead of image."
            )
        start += len(table)


def _filled(column: pa.ChunkedArray) -> list[bool]:
    """Where a column holds something: a value that is not null, and for lists not empty either."""
    return [size > 0 for size in _sizes(column)]


def _sizes(column: pa.ChunkedArray) -> list[int]:
    """How many values each cell holds: the length of a list, 1 for another value, 0 for null."""
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    sizes = pc.list_value_length(column) if is_list else pc.cast(pc.is_valid(column), pa.int32())
    return pc.fill_null(sizes, 0).to_pylist()


def first_drawn(dataset: Dataset | None, count: int) -> list[dict[str, str]]:
    """`prompt` and `reasoning` of the first `count` rows with `image_codes`."""
    if dataset is None:
        return []
    texts = dataset.select_columns([name for name in ("prompt", "reasoning") if name in dataset.column_names])
    # As the collator gets them, through the transform of the data set.
    rows = [texts[i] for i in islice(_drawn(dataset), count)]
    return [{"prompt": row["prompt"], "reasoning": row.get("reasoning") or ""} for row in rows]


def _drawn(dataset: Dataset) -> Iterator[int]:
    """Numbers of the rows with `image_codes`."""
    if "image_codes" not in dataset.column_names:
        return
    for start, table in enumerate(dataset.select_columns(["image_codes"]).with_format("arrow").iter(1000)):
        yield from (1000 * start + i for i, size in enumerate(_sizes(table["image_codes"])) if size)


def reasoning_tokens(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, rows: int = 10_000) -> dict[str, float]:
    """Text tokens before the picture in rows with `image_codes`: `rows` looked at, `min`, `mean`, quantiles, `max`.

    Args:
        rows: how many rows are looked at at most, evenly spaced.

    Returns:
        `{"rows": 0}` where no row has a picture to draw; all lengths 0 where none has a reasoning.
    """
    drawn = list(_drawn(dataset))
    count = min(rows, len(drawn))
    if not count:
        return {"rows": 0}
    picked, lengths = [drawn[i * len(drawn) // count] for i in range(count)], [0] * count
    if "reasoning" in dataset.column_names:
        column = dataset.select_columns(["reasoning"])
        for start in range(0, count, 1000):
            texts = [text or "" for text in column[picked[start : start + 1000]]["reasoning"]]
            ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
            lengths[start : start + 1000] = map(len, ids)
    quantiles = {f"p{q}": float(np.percentile(lengths, q)) for q in (50, 90, 99)}
    return {"rows": count, "min": min(lengths), "mean": sum(lengths) / count, **quantiles, "max": max(lengths)}


def task_of(dataset: Dataset) -> str:
    """`t2i` where all rows have `image_codes`, `i2t` where none has, else `both`."""
    if "image_codes" not in dataset.column_names:
        return "i2t"
    kinds: set[bool] = set()
    for table in dataset.select_columns(["image_codes"]).with_format("arrow").iter(1000):
        kinds |= set(_filled(table["image_codes"]))
        if len(kinds) == 2:
            return "both"
    return "t2i" if True in kinds else "i2t"


@dataclass(frozen=True)
class LossWeights:
    """What the loss of a label counts: `text` (also `<end_of_image>` and eos), `image` (codes), `begin_of_image`."""

    text: float = 1.0
    image: float = 1.0
    begin_of_image: float = 1.0

    def of(self, labels: torch.LongTensor, model: JanusForInterleavedGeneration) -> torch.Tensor:
        """The weight of each label, in float32; 0 where it is -100."""
        weights = torch.full(labels.shape, float(self.text), device=labels.device)
        weights[labels >= model.vocab_size] = self.image
        weights[labels == model.special_ids.begin_of_image] = self.begin_of_image
        return weights.masked_fill(labels == -100, 0)


@dataclass
class JointCollator:
    """Rows -> left-aligned joint ids with labels, padded right.

    Labels are -100 on prompt and padding. `t2i` rows end in `<begin_of_image>`, codes, `<end_of_image>`, eos, as in a
    rollout. A share `guidance_dropout` of them is blanked exactly as the sampler blanks its unconditional stream;
    there only codes are labels, since the blanked text is no text to learn. After `set_epoch` which ones depends on
    seed, epoch and row alone: batches are collated ahead, so a resumed run has not the random state with which that of
    its first step was.
    """

    processor: JanusProcessor
    special: SpecialIds
    vocab_size: int
    guidance_dropout: float = 0.0
    # Seed of the run and epoch (-1: none yet), in memory that the workers of a loader share: those that stay for
    # several epochs (`dataloader_persistent_workers`) have a copy of the collator from before the first one.
    seed: torch.LongTensor = field(default_factory=lambda: torch.tensor([0, -1]).share_memory_(), compare=False)

    @classmethod
    def of(cls, model: JanusForInterleavedGeneration, processor: JanusProcessor, guidance_dropout: float):
        """A collator with the ids of `model`."""
        return cls(processor, model.special_ids, model.vocab_size, guidance_dropout)

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        pictures, draws = [r.get("images") or [] for r in rows], [bool(r.get("image_codes")) for r in rows]
        encoded = encode_prompts(self.processor, [r["prompt"] for r in rows], pictures, draws)
        ids, labels = [], []
        for row, prompt, mask in zip(rows, encoded["input_ids"], encoded["attention_mask"], strict=True):
            prompt = prompt[mask.bool()]
            completion = torch.tensor(self.completion_ids(row))
            row_ids = torch.cat([prompt, completion])
            row_labels = torch.cat([torch.full_like(prompt, -100), completion])
            if row.get("image_codes") and self._draw(row_ids) < self.guidance_dropout:
                row_ids, row_labels = self.blank(row_ids, row_labels)
            ids.append(row_ids)
            labels.append(row_labels)
        batch = {
            "input_ids": pad(ids, self.special.pad),
            "attention_mask": pad([torch.ones_like(i) for i in ids], 0),
            "labels": pad(labels, -100),
            "all_modalities": True,
        }
        if encoded["pixel_values"] is not None:
            batch["pixel_values"] = encoded["pixel_values"]
        return batch

    def set_epoch(self, seed: int, epoch: int) -> None:
        """Blank rows by seed of the run, epoch and row from now on, here and in the workers of loaders."""
        self.seed.copy_(torch.tensor([seed, epoch]))

    def _draw(self, ids: torch.LongTensor) -> float:
        """Uniform in [0, 1)."""
        seed, epoch = self.seed.tolist()
        if epoch < 0:
            return torch.rand(()).item()
        digest = hashlib.blake2b(repr(((seed, epoch), ids.tolist())).encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") / 2**32

    def completion_ids(self, row: dict) -> list[int]:
        """Joint ids of the completion: reasoning and picture, or answer."""
        special, tokenizer = self.special, self.processor.tokenizer
        codes = row.get("image_codes")
        parts = [row.get("reasoning"), None if codes else row.get("completion")]
        text = " ".join(part for part in parts if part)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        if not codes:
            return [*ids, special.eos[0]]
        end = [i for i in (special.end_of_image, special.eos[0]) if i is not None]
        return [*ids, special.begin_of_image, *(code + self.vocab_size for code in codes), *end]

    def blank(self, ids: torch.LongTensor, labels: torch.LongTensor) -> tuple[torch.LongTensor, torch.LongTensor]:
        """The unconditional stream of `ids`, with labels on codes only."""
        is_code = ids >= self.vocab_size
        kept = (ids == self.special.bos) | (ids == self.special.begin_of_image) | is_code
        return ids.masked_fill(~kept, self.special.pad), labels.masked_fill(~is_code, -100)

    def lengths(self, dataset: Dataset) -> list[int]:
        """Number of ids of each row, prompt and completion; opens no picture."""
        wanted = ("prompt", "images", "reasoning", "completion", "image_codes")
        columns, lengths = [name for name in wanted if name in dataset.column_names], []
        for table in dataset.select_columns(columns).with_format("arrow").iter(1000):
            sizes = {name: _sizes(table[name]) for name in ("images", "image_codes") if name in columns}
            texts = {name: table[name].to_pylist() for name in columns if name not in sizes}
            prompts = texts.pop("prompt")
            none = [0] * len(prompts)
            draws = [size > 0 for size in sizes.get("image_codes", none)]
            counts = prompt_lengths(self.processor, prompts, sizes.get("images", none), draws)
            for i, count in enumerate(counts):
                row = {name: column[i] for name, column in texts.items()}
                row["image_codes"] = [0] * sizes["image_codes"][i] if "image_codes" in sizes else []
                lengths.append(count + len(self.completion_ids(row)))
        return lengths
