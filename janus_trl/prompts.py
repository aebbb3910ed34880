"""Prompts: user texts or conversations with pictures, in data sets and as ids."""

import hashlib

from datasets import Dataset
from PIL import Image
from transformers import ProcessorMixin


def encode_prompts(processor: ProcessorMixin, prompts: list, images: list[list[Image.Image]] | None = None) -> dict:
    """Chat template, left padding and input pictures -> `input_ids`, `attention_mask` `[B, P]`, `pixel_values`.

    Args:
        prompts: user texts, or conversations in TRL's form (their pictures are taken from the messages).
        images: pictures of each row, for prompts that are texts.
    """
    conversations = [_conversation(p, images[i] if images else []) for i, p in enumerate(prompts)]
    texts = [processor.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in conversations]
    pictures = [[part["image"] for m in c for part in m["content"] if part["type"] == "image"] for c in conversations]
    has_pictures = any(pictures)
    encoded = processor(
        text=texts, images=pictures if has_pictures else None, padding=True, padding_side="left", return_tensors="pt"
    )
    return {
        "input_ids": encoded["input_ids"],
        "attention_mask": encoded["attention_mask"],
        "pixel_values": encoded["pixel_values"] if has_pictures else None,
        "num_images": [len(row) for row in pictures],
    }


def _conversation(prompt: str | list[dict], images: list[Image.Image]) -> list[dict]:
    """A conversation whose contents are lists of typed parts, in which None-valued keys are dropped."""
    if isinstance(prompt, str):
        parts = [{"type": "image", "image": image} for image in images]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]
    messages = []
    for message in prompt:
        parts = [
            {key: value for key, value in part.items() if value is not None} for part in _parts(message["content"])
        ]
        messages.append({"role": message["role"], "content": parts})
    return messages


def _parts(content: str | list[dict]) -> list[dict]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def different_prompts(prompts: list, images: list[list[Image.Image]] | None = None) -> tuple[list[int], list[int]]:
    """Rows with the same text and pictures, as a group has them, so that they share one prefill.

    Returns:
        The first row of each different prompt, and for every row which of those it is.
    """
    first: dict[tuple, int] = {}
    different, where = [], []
    for i, prompt in enumerate(prompts):
        conversation = _conversation(prompt, images[i] if images else [])
        key = tuple(
            (
                message["role"],
                part["type"],
                part["text"] if part["type"] == "text" else hashlib.blake2b(part["image"].tobytes()).digest(),
            )
            for message in conversation
            for part in message["content"]
        )
        if key not in first:
            first[key] = len(different)
            different.append(i)
        where.append(first[key])
    return different, where


def conversational(dataset: Dataset | None, task: str) -> Dataset | None:
    """`i2t`: user texts become conversations, the form in which TRL joins pictures to a prompt."""
    if dataset is None or task != "i2t" or not isinstance(dataset[0]["prompt"], str):
        return dataset
    prompts = [[{"role": "user", "content": text}] for text in dataset["prompt"]]
    return dataset.remove_columns("prompt").add_column("prompt", prompts)


def with_row_ids(dataset: Dataset | None) -> Dataset | None:
    """Number the rows in a column `row_id`, so that a row that an evaluation repeats counts once."""
    if dataset is None or "row_id" in dataset.column_names:
        return dataset
    return dataset.add_column("row_id", list(range(len(dataset))))


def user_text(prompt: str | list[dict]) -> str:
    """The user's own words in a prompt."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def prompt_with_pictures(row: dict) -> str | list[dict]:
    """The prompt of a data row, with its `images` joined to it as TRL joins them."""
    if not row.get("images"):
        return row["prompt"]
    parts = [{"type": "image", "image": image} for image in row["images"]]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": user_text(row["prompt"])}]}]
