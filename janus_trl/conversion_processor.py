"""Processor and generation configuration of a converted checkpoint, from the files beside the original weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, processors
from transformers import GenerationConfig, JanusImageProcessor, JanusProcessor, PreTrainedTokenizerFast

from .config_checks import did_you_mean
from .conversion_keys import vision_sizes
from .tiny.processor import (
    ASSISTANT,
    BEGIN_OF_IMAGE,
    CHAT_TEMPLATE,
    END_OF_IMAGE,
    IMAGE_PLACEHOLDER,
    PAD,
    USER,
)

# Words of the turns. Janus-Pro was trained with tokens, Janus-1.3B with plain words: the wrong ones cost accuracy
# (deepseek-ai/Janus#210).
TEMPLATES = {"janus_pro": (USER, ASSISTANT), "janus": ("User", "Assistant")}
GUIDANCE_SCALE = 5.0  # of the published sampling script
_IMAGE_KEYS = ("do_normalize", "image_mean", "image_std", "min_size", "rescale_factor")


def converted_processor(
    folder: Path, original: Mapping[str, Any], weights: Mapping[str, torch.Tensor], template: str = "auto"
) -> tuple[JanusProcessor, str]:
    """The processor, and the template that it has.

    Args:
        folder: the original checkpoint, with `tokenizer.json`.
        original: its configuration.
        weights: its weights by name; only shapes are looked at.
        template: `janus_pro`, `janus`, or `auto`: `janus_pro` if the tokenizer has the role tokens of Janus-Pro.

    Raises:
        ValueError: an unknown template, or a tokenizer without the tokens of Janus.
    """
    if template not in ("auto", *TEMPLATES):
        allowed = ("auto", *TEMPLATES)
        raise ValueError(
            f"template = {template!r} must be one of: {', '.join(allowed)}.{did_you_mean(template, allowed)}"
        )
    tokenizer = converted_tokenizer(folder)
    if template == "auto":
        template = "janus_pro" if USER in tokenizer.get_vocab() else "janus"
    chat = CHAT_TEMPLATE
    for token, word in zip(TEMPLATES["janus_pro"], TEMPLATES[template]):
        chat = chat.replace(token, word)
    settings = _optional_json(folder / "preprocessor_config.json")
    images = {key: settings[key] for key in _IMAGE_KEYS if key in settings}
    size, patch = vision_sizes(original, weights)
    processor = JanusProcessor(
        JanusImageProcessor(size={"height": size, "width": size}, **images),
        tokenizer,
        chat_template=chat,
        use_default_system_prompt=True,
        num_image_tokens=(size // patch) ** 2,
    )
    return processor, template


def converted_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of `tokenizer.json`, as it stands there, putting bos first as the original's class does.

    Raises:
        ValueError: without `tokenizer.json`, or a token that Janus needs is not in it.
    """
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json; copy it from the original checkpoint.")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = _optional_json(folder / "special_tokens_map.json")
    settings = _optional_json(folder / "tokenizer_config.json") | settings
    vocabulary = backend.get_vocab(with_added_tokens=True)
    bos, eos = _token(settings, "bos_token", folder), _token(settings, "eos_token", folder)
    needed = (bos, eos, PAD, IMAGE_PLACEHOLDER, BEGIN_OF_IMAGE, END_OF_IMAGE)
    if missing := [token for token in needed if token not in vocabulary]:
        raise ValueError(f"{folder / 'tokenizer.json'} lacks {', '.join(missing)}: it is no tokenizer of Janus.")
    if settings.get("add_bos_token", True) and backend.encode("a").ids[:1] != [vocabulary[bos]]:
        # The original's class (LlamaTokenizerFast) adds it when it is built; the file need not say so.
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        pad_token=PAD,
        padding_side="left",
        model_max_length=settings.get("model_max_length", 16384),
        clean_up_tokenization_spaces=False,
        additional_special_tokens=[_content(token) for token in settings.get("additional_special_tokens") or []],
        extra_special_tokens={
            "image_token": IMAGE_PLACEHOLDER,
            "boi_token": BEGIN_OF_IMAGE,
            "eoi_token": END_OF_IMAGE,
        },
    )


def converted_generation_config(processor: JanusProcessor) -> GenerationConfig:
    """Special ids, temperature 1 and the published guidance; `<begin_of_image>` where transformers looks for it."""
    tokenizer = processor.tokenizer
    special = {"boi_token_id": BEGIN_OF_IMAGE, "eoi_token_id": END_OF_IMAGE}
    return GenerationConfig(
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        temperature=1.0,
        guidance_scale=GUIDANCE_SCALE,
        generation_kwargs={name: tokenizer.convert_tokens_to_ids(token) for name, token in special.items()},
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _content(token: str | Mapping[str, Any]) -> str:
    """A token as text: it is stored as one, or as a mapping with its flags."""
    return token if isinstance(token, str) else token["content"]


def _token(settings: Mapping[str, Any], name: str, folder: Path) -> str:
    if not settings.get(name):
        raise ValueError(f"{folder}: neither tokenizer_config.json nor special_tokens_map.json has a {name}.")
    return _content(settings[name])
