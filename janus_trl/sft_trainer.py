"""SFT for Janus: cross-entropy on reasoning, image codes and answers, through the forward that RL scores with."""

from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
import torch
from accelerate.utils import is_peft_model
from datasets import Dataset
from peft import PeftConfig
from PIL import Image, ImageOps
from torch.utils.data import DataLoader
from torchvision.transforms.functional import pil_to_tensor
from transformers import JanusProcessor, PreTrainedModel
from trl import SFTTrainer
from trl.trainer.utils import maybe_gather_lm_head_ctx, pad

from .configs import JanusSFTConfig
from .loading import processor_for
from .model_card import write_model_card
from .modeling import JanusForInterleavedGeneration, SpecialIds, bind_special_ids
from .prompts import encode_prompts
from .trainable import freeze_for_task, trainable_table


class JanusSFTTrainer(SFTTrainer):
    """`trl.SFTTrainer` on rows that end in a picture (`t2i`) or in a text (`i2t`), mixed in one run.

    Args:
        model: folder or Hub id of a stock Janus checkpoint, or a loaded `JanusForInterleavedGeneration`.
        args: a `JanusSFTConfig`.
        train_dataset: rows with `prompt`, and `image` (the target picture) with an optional `reasoning`, or
            `completion` (the answer, behind an optional `reasoning`) with optional input pictures `images`.
        eval_dataset: held-out rows of the same form.
        processing_class: a `JanusProcessor`; that of the model by default.
        peft_config: e.g. from `janus_trl.configs.lora_config`.
    """

    _tag_names = ["trl", "sft", "janus"]

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: JanusSFTConfig,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        processing_class: JanusProcessor | None = None,
        callbacks: list | None = None,
        peft_config: PeftConfig | None = None,
    ):
        processing_class = processor_for(model, processing_class)
        refuse_edits(train_dataset, "train_dataset")
        refuse_edits(eval_dataset, "eval_dataset")
        init_kwargs = args.model_init_kwargs
        if isinstance(model, str):
            model = JanusForInterleavedGeneration.from_pretrained(model, **(init_kwargs or {}))
        bind_special_ids(model, processing_class)
        train_dataset = with_image_codes(train_dataset, model)
        eval_dataset = with_image_codes(eval_dataset, model)
        try:
            args.model_init_kwargs = None  # TRL refuses them beside a loaded model
            super().__init__(
                model=model,
                args=args,
                data_collator=JointCollator.of(model, processing_class, args.guidance_dropout),
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                callbacks=callbacks,
                peft_config=peft_config,
            )
        finally:
            args.model_init_kwargs = init_kwargs
        base = self.model.get_base_model() if is_peft_model(self.model) else self.model
        base.__dict__.pop("forward", None)  # TRL's fused head on the instance knows one vocabulary
        freeze_for_task(base, "both", with_adapter=is_peft_model(self.model))
        if self.accelerator.is_main_process:
            print(trainable_table(base))

    def create_model_card(self, model_name: str | None = None, dataset_name: str | None = None, tags=None) -> None:
        """TRL's card speaks of text generation; this one is about Janus."""
        write_model_card(self, "SFT", None, model_name)

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader:
        """As in transformers, but no row is blanked: the loss of held-out rows has to repeat."""
        collator = self.data_collator
        self.data_collator = replace(collator, guidance_dropout=0.0)
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = collator


def refuse_edits(dataset: Dataset | None, name: str) -> None:
    """Refuse rows with input pictures and a target picture; reads list lengths only, decodes no picture.

    Raises:
        ValueError: naming data set and row.
    """
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
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    filled = pc.greater(pc.list_value_length(column), 0) if is_list else pc.is_valid(column)
    return pc.fill_null(filled, False).to_pylist()


def with_image_codes(
    dataset: Dataset | None, model: JanusForInterleavedGeneration, batch_size: int = 64
) -> Dataset | None:
    """Add `image_codes`: the VQ codes of each row's target picture, `[]` for rows without one."""
    if dataset is None or "image" not in dataset.column_names:
        return dataset
    codes: list[list[int]] = []
    for start in range(0, len(dataset), batch_size):
        pictures = dataset[start : start + batch_size]["image"]
        encoded = iter(encode_pictures(model, [p for p in pictures if p is not None]))
        codes.extend([] if p is None else next(encoded) for p in pictures)
    return dataset.remove_columns("image").add_column("image_codes", codes)


@torch.no_grad()
def encode_pictures(model: JanusForInterleavedGeneration, pictures: list[Image.Image]) -> list[list[int]]:
    """VQ codes `[N]` of each picture, cropped to a square first; values are -1 … 1 as in decoding."""
    if not pictures:
        return []
    vq = model.model.vqmodel
    side = vq.quantize.quant_state_dims[0] * 2 ** (len(vq.config.channel_multiplier) - 1)
    pixels = torch.stack([_square(picture, side) for picture in pictures])  # [N, 3, side, side]
    with maybe_gather_lm_head_ctx(*vq.parameters()):
        weight = vq.quantize.embedding.weight
        codes = vq.encode(pixels.to(weight.device, weight.dtype)).image_tokens
    return codes.view(len(pictures), -1).tolist()


def _square(picture: Image.Image, side: int) -> torch.Tensor:
    """The largest centred square, resized; `[3, side, side]` in -1 … 1, the range in which codes are decoded."""
    picture = ImageOps.fit(picture.convert("RGB"), (side, side), Image.Resampling.BICUBIC)
    return pil_to_tensor(picture).float() / 127.5 - 1


@dataclass
class JointCollator:
    """Rows -> left-aligned joint ids with labels, padded right.

    Labels are -100 on prompt and padding. `t2i` rows end in `<begin_of_image>`, codes, `<end_of_image>`, eos, as in a
    rollout. A share `guidance_dropout` of them is blanked exactly as the sampler blanks its unconditional stream;
    there only codes are labels, since the blanked text is no text to learn.
    """

    processor: JanusProcessor
    special: SpecialIds
    vocab_size: int
    guidance_dropout: float = 0.0

    @classmethod
    def of(cls, model: JanusForInterleavedGeneration, processor: JanusProcessor, guidance_dropout: float):
        """A collator with the ids of `model`."""
        return cls(processor, model.special_ids, model.vocab_size, guidance_dropout)

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        encoded = encode_prompts(self.processor, [r["prompt"] for r in rows], [r.get("images") or [] for r in rows])
        ids, labels = [], []
        for row, prompt, mask in zip(rows, encoded["input_ids"], encoded["attention_mask"], strict=True):
            prompt = prompt[mask.bool()]
            completion = torch.tensor(self.completion_ids(row))
            row_ids = torch.cat([prompt, completion])
            row_labels = torch.cat([torch.full_like(prompt, -100), completion])
            if row.get("image_codes") and torch.rand(()) < self.guidance_dropout:
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
