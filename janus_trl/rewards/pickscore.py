"""PickScore: how well a picture fits its caption, by a CLIP model tuned on human preferences (arXiv:2305.01569)."""

import logging
import os
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

logger = logging.getLogger(__name__)

# exp(logit_scale) * cosine is about 20 to 23 for real pictures; 26 brings it near 1, as earlier image GRPO work does.
SCALE = 26.0


class PickScore:
    """exp(logit_scale) * cos(caption, picture) / 26 for each row, about 0.7 to 0.9 for pictures of a trained model.

    The model is loaded at the first call (or by `load`), frozen, in eval mode, and whole on every rank. Captions longer
    than the text tower (77 tokens) are cut before their end token. CLIP's own processor resizes and crops the picture.

    Args:
        model: Hub id or folder of the CLIP model.
        processor: Hub id or folder of its processor.
        device: `auto` is this rank's GPU, or the CPU where there is none.
        dtype: Precision of the weights.
        batch_size: Rows scored at a time.
        raw: Leave out the division by 26.

    Raises:
        ValueError: An unknown device (`cuda:N` would pile all ranks on one card), no CUDA where it is asked for, a
            folder that does not exist, a batch size below 1.
    """

    def __init__(
        self,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        device: str = "auto",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        batch_size: int = 8,
        raw: bool = False,
    ):
        check_device(device, "pickscore")
        for field, value in (("model", model), ("processor", processor)):
            if value.startswith((".", "/", "~")) and not os.path.isdir(os.path.expanduser(value)):
                raise ValueError(f"reward 'pickscore': {field} is '{value}'; there is no such folder.")
        if batch_size < 1:
            raise ValueError(f"reward 'pickscore': batch_size is {batch_size}; it must be at least 1.")
        self._model_name, self._processor_name = os.path.expanduser(model), os.path.expanduser(processor)
        self._device_name, self._dtype = device, getattr(torch, dtype)
        self._batch_size, self._divisor = batch_size, 1.0 if raw else SCALE
        self._model: Any = None
        self._processor: Any = None

    def __call__(self, prompts: list[str], generated_images: list, **columns: Any) -> list[float]:
        """One score per row; `prompts` are the captions, `generated_images` RGB PIL pictures."""
        self.load()
        scores: list[float] = []
        for start in range(0, len(prompts), self._batch_size):
            rows = slice(start, start + self._batch_size)
            scores += self._score_batch(prompts[rows], generated_images[rows])
        return scores

    def load(self) -> None:
        """Load model and processor, unless that is done already.

        Raises:
            ValueError: They cannot be read, or parameters are empty.
        """
        if self._model is not None:
            return
        from transformers import AutoModel, AutoProcessor

        try:
            with outside_zero_init():
                model = AutoModel.from_pretrained(self._model_name, dtype=self._dtype)
            self._processor = AutoProcessor.from_pretrained(self._processor_name)
        except (OSError, ValueError) as error:  # transformers raises both for what it cannot find or does not know
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"reward 'pickscore': model '{self._model_name}' or processor '{self._processor_name}' cannot be read: "
                f"{reason} Download both first, or set `args: {{model: ..., processor: ...}}` to local folders."
            ) from error
        if not hasattr(model, "logit_scale"):
            raise ValueError(
                f"reward 'pickscore': model '{self._model_name}' is a {type(model).__name__}; a CLIP model is needed."
            )
        check_weights_present(model, "pickscore")
        self._model = model.eval().requires_grad_(False).to(_resolve_device(self._device_name))

    def _score_batch(self, captions: list[str], images: list) -> list[float]:
        device = self._model.device
        text = self._processor.tokenizer(
            list(captions),
            padding=True,
            truncation=True,  # keeps the end token, at which the text tower reads its result
            max_length=self._model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        )
        pixels = self._processor.image_processor(images=list(images), return_tensors="pt")["pixel_values"]
        # Autocast off: this forward must not depend on the precision of the policy around it.
        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            output = self._model(
                input_ids=text["input_ids"].to(device),
                attention_mask=text["attention_mask"].to(device),
                pixel_values=pixels.to(device, self._dtype),
            )
        # logits_per_image: (pictures, captions), already times exp(logit_scale); row i belongs to caption i.
        return (output.logits_per_image.diagonal().float() / self._divisor).tolist()


def check_device(device: str, reward: str) -> None:
    """Accept `auto`, `cuda` (where there is one) and `cpu` only.

    Raises:
        ValueError: Any other string, with the reason.
    """
    if device.startswith("cuda:"):
        raise ValueError(
            f"reward '{reward}': device is '{device}', which would put the model of every rank on one card; "
            "write 'auto' or 'cuda' for each rank's own GPU."
        )
    if device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"reward '{reward}': device is '{device}'; valid: auto, cuda, cpu.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"reward '{reward}': device is 'cuda', but no GPU is visible; write 'auto' or 'cpu'.")


def _resolve_device(device: str) -> torch.device:
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def outside_zero_init() -> Iterator[None]:
    """Let `from_pretrained` load whole weights under ZeRO-3, which otherwise shards every model from then on."""
    from transformers.integrations import deepspeed as integration

    reference = integration._hf_deepspeed_config_weak_ref
    config = reference() if reference is not None else None
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            integration.set_hf_deepspeed_config(config)


def check_weights_present(model: torch.nn.Module, reward: str) -> None:
    """Refuse a model with empty or meta parameters (a shard of ZeRO-3, or weights that were never read).

    Raises:
        ValueError: Names the reward and the first such parameter.
    """
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0 or parameter.is_meta:
            raise ValueError(
                f"reward '{reward}': parameter '{name}' has shape {tuple(parameter.shape)} on {parameter.device} after "
                "loading; its weights are missing or sharded by ZeRO-3."
            )


def check_rows(dataset: Any) -> None:
    """Warn about captions outside the Latin script: the text tower was trained on English."""
    prompts = [str(prompt) for prompt in dataset["prompt"]]
    foreign = sum(any(c.isalpha() and not unicodedata.name(c, "").startswith("LATIN") for c in p) for p in prompts)
    if foreign:
        share = 100 * foreign / len(prompts)
        logger.warning(
            "reward 'pickscore': %.1f %% of the prompts (%d of %d) are not in Latin script; PickScore understands "
            "English only, and its scores are noise for them.",
            share,
            foreign,
            len(prompts),
        )
