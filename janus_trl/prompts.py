"""Prompts: user texts or conversations with pictures, in data sets and as ids."""

import hashlib
import logging

from datasets import Dataset
from PIL import Image
from transformers import ProcessorMixin
from transformers.models.janus.processing_janus import DEFAULT_SYSTEM_PROMPT
from trl.data_utils import prepare_multimodal_messages

logger = logging.getLogger(__name__)

# The template of a checkpoint that was trained without one. `{prompt}` stands for the user's text.
PLAIN_TEMPLATE = "{prompt}"


def bind_prompt_template(processor: ProcessorMixin, template: str | None) -> str:
    """Make `template` that of the processor, which applies it to every prompt and saves it in its folder.

    SFT, rollouts and evaluation get their ids from one processor each, and those of a checkpoint come from its folder:
    so they cannot disagree. Rewards and data sets keep the user's own text.

    Args:
        template: a text with `{prompt}`; None keeps the template of the checkpoint.

    Returns:
        The template that holds. A warning says if the checkpoint was trained with another one.
    """
    known, saved = processor.tokenizer.init_kwargs, prompt_template(processor)
    if template is not None and template != saved and "prompt_template" in known:
        logger.warning(
            "prompt_template = %r, but the checkpoint was trained with %r. Leave prompt_template unset to use that.",
            template,
            saved,
        )
    known["prompt_template"] = saved if template is None else template  # saved in tokenizer_config.json
    return known["prompt_template"]


def prompt_template(processor: ProcessorMixin) -> str:
    """The template that a processor applies to the user's text."""
    return processor.tokenizer.init_kwargs.get("prompt_template", PLAIN_TEMPLATE)


def encode_prompts(
    processor: ProcessorMixin,
    prompts: list,
    images: list[list[Image.Image]] | None = None,
    draws: bool | list[bool] = False,
) -> dict:
    """Prompt and chat template, left padding, input pictures -> `input_ids`, `attention_mask` `[B, P]`, `pixel_values`.

    Args:
        prompts: user texts, or conversations in TRL's form (their pictures are taken from the messages).
        images: pictures of each row, for prompts that are texts.
        draws: whether a prompt asks for a picture (of all prompts, or of each): then it gets no system prompt, which
            in Janus speaks of understanding pictures.
    """
    texts, pictures = _render(processor, prompts, images, draws)
    has_pictures = any(pictures)
    encoded = _ids(processor, texts, images=pictures if has_pictures else None)
    return {
        "input_ids": encoded["input_ids"],
        "attention_mask": encoded["attention_mask"],
        "pixel_values": encoded["pixel_values"] if has_pictures else None,
        "num_images": [len(row) for row in pictures],
    }


def _ids(processor: ProcessorMixin, texts: list[str], **images) -> dict:
    """The processor's encoding of texts that are complete.

    In its image mode it adds no system prompt of its own, but `<begin_of_image>` to every row: cut off again, since in
    a completion that id comes after the text.
    """
    encoded = processor(
        text=texts, generation_mode="image", padding=True, padding_side="left", return_tensors="pt", **images
    )
    return {**encoded, **{name: encoded[name][:, :-1] for name in ("input_ids", "attention_mask")}}


def prompt_lengths(
    processor: ProcessorMixin, prompts: list, num_images: list[int], draws: bool | list[bool] = False
) -> list[int]:
    """Number of ids of each prompt in `encode_prompts`, from the number of its pictures: none is opened."""
    texts, pictures = _render(processor, prompts, [[None] * count for count in num_images], draws)
    frame = processor.image_start_token + processor.image_end_token
    texts = [text.replace(processor.image_token, frame) for text in texts]
    lengths = _ids(processor, texts)["attention_mask"].sum(1).tolist()
    return [length + len(row) * processor.num_image_tokens for length, row in zip(lengths, pictures, strict=True)]


def _render(
    processor: ProcessorMixin, prompts: list, images: list[list] | None, draws: bool | list[bool]
) -> tuple[list[str], list[list]]:
    """The text of each prompt in both templates, behind the system prompt where it has one; and its pictures."""
    template = prompt_template(processor)
    conversations = [_conversation(p, images[i] if images else []) for i, p in enumerate(prompts)]
    conversations = [_in_template(conversation, template) for conversation in conversations]
    texts = [processor.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in conversations]
    system = DEFAULT_SYSTEM_PROMPT if processor.use_default_system_prompt else ""
    of_rows = draws if isinstance(draws, list) else [draws] * len(texts)
    texts = [text if row_draws else system + text for text, row_draws in zip(texts, of_rows, strict=True)]
    return texts, [
        [part["image"] for m in c for part in m["content"] if part["type"] == "image"] for c in conversations
    ]


def _in_template(conversation: list[dict], template: str) -> list[dict]:
    """The conversation with its last text, the user's, in the template."""
    *before, last = conversation
    at = max((i for i, part in enumerate(last["content"]) if part["type"] == "text"), default=None)
    if at is None or template == PLAIN_TEMPLATE:
        return conversation
    parts = list(last["content"])
    parts[at] = {**parts[at], "text": template.replace("{prompt}", parts[at]["text"])}
    return [*before, {**last, "content": parts}]


def _conversation(prompt: str | list[dict], images: list[Image.Image]) -> list[dict]:
    """A conversation whose contents are lists of typed parts, in which None-valued keys are dropped.

    Pictures that no part of a conversation holds stand before its first user text, as in TRL.
    """
    pictures = [{"type": "image", "image": image} for image in images]
    if isinstance(prompt, str):
        return [{"role": "user", "content": [*pictures, {"type": "text", "text": prompt}]}]
    messages = []
    for message in prompt:
        parts = [
            {key: value for key, value in part.items() if value is not None} for part in _parts(message["content"])
        ]
        messages.append({"role": message["role"], "content": parts})
    if pictures and not any(part["type"] == "image" for message in messages for part in message["content"]):
        first = next((message for message in messages if message["role"] == "user"), messages[0])
        first["content"] = [*pictures, *first["content"]]
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
                part["text"] if part["type"] == "text" else _picture_key(part["image"]),
            )
            for message in conversation
            for part in message["content"]
        )
        if key not in first:
            first[key] = len(different)
            different.append(i)
        where.append(first[key])
    return different, where


def _picture_key(image: Image.Image) -> tuple:
    """Bytes alone do not tell a wide picture of one colour from a tall one."""
    return image.mode, image.size, hashlib.blake2b(image.tobytes()).digest()


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
    content = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def prompt_with_pictures(row: dict) -> str | list[dict]:
    """The prompt of a data row, with its `images` joined to it as TRL joins them."""
    prompt = row["prompt"]
    if not row.get("images"):
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return prepare_multimodal_messages(messages, images=row["images"])
