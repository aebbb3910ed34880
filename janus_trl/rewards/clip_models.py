"""CLIP models of transformers and of open_clip behind the same three methods, and cosines of caption and picture.

Both keep the preprocessing of their library: scores are those of a direct computation.
"""

import difflib
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from janus_trl.rewards.placement import check_file, preprocess


class ClipModel(Protocol):
    """What the rewards need of a CLIP model."""

    module: torch.nn.Module
    logit_scale: float  # exp of the learnt parameter, in float32

    def text_features(self, captions: list[str]) -> torch.Tensor:
        """Unit vectors `[n, width]` in float32; longer captions are cut before their end token."""

    def image_features(self, images: Sequence) -> torch.Tensor:
        """Unit vectors `[n, width]` in float32 of RGB PIL images."""

    def is_cut(self, caption: str) -> bool:
        """Whether a caption is longer than the text tower."""


def pair_cosines(clip: ClipModel, captions: list[str], images: Sequence, batch_size: int) -> torch.Tensor:
    """Cosine of caption `i` and picture `i`, `[n]` in float32.

    The rows of a group share a caption: each one is encoded once. Nothing waits for the GPU between micro-batches, so
    that the pictures of the next one are prepared meanwhile.
    """
    different = list(dict.fromkeys(captions))
    rows = [different.index(caption) for caption in captions]
    starts = range(0, len(different), batch_size)
    texts = torch.cat([clip.text_features(different[start : start + batch_size]) for start in starts])
    pictures = image_features(clip, images, batch_size)
    return (texts[rows] * pictures).sum(-1)


def image_features(clip: ClipModel, images: Sequence, batch_size: int) -> torch.Tensor:
    """Unit vectors `[n, width]` of all images, `batch_size` at a time."""
    starts = range(0, len(images), batch_size)
    return torch.cat([clip.image_features(images[start : start + batch_size]) for start in starts])


def _unit(features: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(features.float(), dim=-1)


class TransformersClip:
    """A CLIP model of transformers with its processor."""

    def __init__(self, model: torch.nn.Module, processor: Any):
        self.module, self._processor = model, processor
        self.logit_scale = model.logit_scale.detach().float().exp().item()  # before the weights lose precision
        self._length = model.config.text_config.max_position_embeddings

    @classmethod
    def load(cls, reward: str, model: str, processor: str) -> "TransformersClip":
        """Read model and processor from the Hub or from folders.

        Raises:
            ValueError: They cannot be read, or the model is no CLIP.
        """
        from transformers import AutoModel, AutoProcessor

        try:
            loaded = AutoModel.from_pretrained(model, dtype=torch.float32)
            reader = AutoProcessor.from_pretrained(processor)
        except (OSError, ValueError) as error:  # transformers raises both for what it cannot find or does not know
            raise ValueError(
                f"reward '{reward}': model '{model}' or processor '{processor}' cannot be read: {brief(error)} "
                "Download both first, or set `args: {model: ..., processor: ...}` to local folders."
            ) from error
        if not hasattr(loaded, "logit_scale"):
            kind = type(loaded).__name__
            raise ValueError(f"reward '{reward}': model '{model}' is a {kind}; a CLIP model is needed.")
        return cls(loaded, reader)

    def text_features(self, captions: list[str]) -> torch.Tensor:
        """See `ClipModel`."""
        tokens = self._processor.tokenizer(
            captions, padding=True, truncation=True, max_length=self._length, return_tensors="pt"
        )  # truncation keeps the end token, at which the text tower reads its result
        tokens = {name: tokens[name].to(self.module.device) for name in ("input_ids", "attention_mask")}
        return _unit(self.module.get_text_features(**tokens).pooler_output)

    def image_features(self, images: Sequence) -> torch.Tensor:
        """See `ClipModel`."""
        pixels = self.pixels(self._processor, images)
        return _unit(self.module.get_image_features(pixels.to(self.module.device, self.module.dtype)).pooler_output)

    @staticmethod
    def pixels(processor: Any, images: Sequence) -> torch.Tensor:
        """Pixel values `[n, 3, height, width]` by the processor of a model."""
        reader = processor.image_processor
        return preprocess(images, lambda part: reader(images=part, return_tensors="pt")["pixel_values"])

    def is_cut(self, caption: str) -> bool:
        """See `ClipModel`."""
        return len(self._processor.tokenizer(caption, verbose=False)["input_ids"]) > self._length


class OpenClip:
    """A CLIP model of open_clip with its tokenizer and its transform for evaluation."""

    def __init__(self, model: torch.nn.Module, tokenizer: Any):
        from open_clip.transform import PreprocessCfg, image_transform_v2

        self.module, self._tokenizer = model, tokenizer
        self.logit_scale = model.logit_scale.detach().float().exp().item()
        self._transform = image_transform_v2(PreprocessCfg(**model.visual.preprocess_cfg), is_train=False)

    @classmethod
    def load(cls, reward: str, model: str, checkpoint: str) -> "OpenClip":
        """Build `model` and read the weights from a file (`{"state_dict": …}` or plain) or by a published tag.

        Raises:
            ValueError: The weights cannot be read, or do not belong to the model.
        """
        import open_clip

        try:
            built = open_clip.create_model(model, pretrained=checkpoint, device="cpu", pretrained_text=False)
        except Exception as error:  # a pickle that torch refuses raises nearly anything
            raise ValueError(
                f"reward '{reward}': checkpoint '{checkpoint}' cannot be read into the open_clip model '{model}': "
                f"{brief(error)}"
            ) from error
        return cls(built, open_clip.get_tokenizer(model))

    def text_features(self, captions: list[str]) -> torch.Tensor:
        """See `ClipModel`."""
        tokens = self._tokenizer(captions)
        return _unit(self.module.encode_text(tokens.to(self._weight.device)))

    def image_features(self, images: Sequence) -> torch.Tensor:
        """See `ClipModel`."""
        pixels = preprocess(images, lambda part: torch.stack([self._transform(image) for image in part]))
        return _unit(self.module.encode_image(pixels.to(self._weight.device, self._weight.dtype)))

    def is_cut(self, caption: str) -> bool:
        """See `ClipModel`."""
        length = self._tokenizer.context_length
        if hasattr(self._tokenizer, "encode"):
            return len(self._tokenizer.encode(caption)) + 2 > length  # + start and end token
        return len(self._tokenizer.tokenizer(caption, verbose=False)["input_ids"]) > length

    @property
    def _weight(self) -> torch.Tensor:
        return next(self.module.parameters())


def check_open_clip(reward: str, model: str, checkpoint: str) -> str:
    """The checkpoint (a path with `~` written out, or a published tag of `model`), before anything is loaded.

    Raises:
        ValueError: A model that open_clip does not know (with the nearest), or no such file and no such tag.
    """
    import open_clip

    names = open_clip.list_models()
    if model not in names:
        near = difflib.get_close_matches(model, names, n=3, cutoff=0.3) or names[:3]
        raise ValueError(
            f"reward '{reward}': model is '{model}', which open_clip does not know; did you mean {' or '.join(near)}? "
            f"`open_clip.list_models()` lists all {len(names)}."
        )
    tags = open_clip.list_pretrained_tags_by_model(model)
    if checkpoint in tags:
        return checkpoint
    try:
        return check_file(reward, "checkpoint", checkpoint)
    except ValueError as error:
        raise ValueError(f"{error} Published tags of {model}: {', '.join(tags) or 'none'}.") from None


def brief(error: BaseException) -> str:
    """An error's message on one line, cut to 300 characters; its type where it has none."""
    return " ".join(str(error).split())[:300] or type(error).__name__
