"""Where the model of a reward lives: device, precision, loading outside of ZeRO-3, and moving away between steps."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

DType = Literal["float32", "bfloat16", "float16"]
PREPROCESSING_THREADS = 8


@dataclass(frozen=True)
class Placement:
    """Where and how a reward's model runs.

    Attributes:
        reward: Name of the reward, for messages.
        device: `auto` is this rank's GPU, or the CPU where there is none.
        dtype: Precision of the weights; features are compared in float32.
        batch_size: Pictures scored at a time.
        offload: Keep the weights in CPU memory between calls, so that the update has the GPU for itself.

    Raises:
        ValueError: An unknown device (`cuda:N` would pile all ranks on one card), no CUDA where it is asked for, or a
            batch size below 1.
    """

    reward: str
    device: str = "auto"
    dtype: DType = "float32"
    batch_size: int = 8
    offload: bool = False

    def __post_init__(self):
        check_device(self.device, self.reward)
        if self.batch_size < 1:
            raise ValueError(f"reward '{self.reward}': batch_size is {self.batch_size}; it must be at least 1.")

    @property
    def target(self) -> torch.device:
        """The device that scores."""
        if self.device == "cpu" or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())


class FrozenModel:
    """The model of a reward: loaded at first use, frozen, in eval mode, whole on every rank, unknown to the trainer.

    Args:
        placement: Where it runs.
        load: Returns an object with the network in `module` and methods that use it.
    """

    def __init__(self, placement: Placement, load: Callable[[], Any]):
        self.placement, self._load = placement, load
        self._scorer: Any = None

    @property
    def loaded(self) -> bool:
        """Whether the weights are in memory."""
        return self._scorer is not None

    def load(self) -> None:
        """Load the weights, unless that is done already.

        Raises:
            ValueError: They cannot be read, or parameters are empty.
        """
        if self.loaded:
            return
        with outside_zero_init():
            scorer = self._load()
        check_weights_present(scorer.module, self.placement.reward)
        scorer.module.eval().requires_grad_(False).to(dtype=getattr(torch, self.placement.dtype))
        if not self.placement.offload:
            scorer.module.to(self.placement.target)
        self._scorer = scorer

    @contextmanager
    def ready(self) -> Iterator[Any]:
        """What `load` returned, on its device; no gradients, and autocast off: scores do not depend on the policy's."""
        self.load()
        target, module = self.placement.target, self._scorer.module
        try:
            module.to(target)
            with torch.inference_mode(), torch.autocast(target.type, enabled=False):
                yield self._scorer
        finally:
            if self.placement.offload and target.type != "cpu":
                module.to("cpu")


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


def check_folder(reward: str, argument: str, value: str) -> str:
    """A Hub id as it is, or the path of a folder with `~` written out.

    Raises:
        ValueError: It looks like a path, and there is no such folder.
    """
    path = os.path.expanduser(value)
    if value.startswith((".", "/", "~")) and not os.path.isdir(path):
        raise ValueError(f"reward '{reward}': {argument} is '{value}'; there is no such folder.")
    return path


def check_file(reward: str, argument: str, value: str) -> str:
    """The path of a file, with `~` written out.

    Raises:
        ValueError: There is no such file.
    """
    path = os.path.expanduser(value)
    if not os.path.isfile(path):
        raise ValueError(f"reward '{reward}': {argument} is '{value}'; there is no such file. Download it first.")
    return path


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


def preprocess(images: Sequence, to_pixels: Callable[[list], torch.Tensor]) -> torch.Tensor:
    """Pixel values `[n, 3, height, width]` of PIL images, in threads: resizing leaves Python's lock.

    Args:
        images: PIL images.
        to_pixels: Pixel values of a list of images, the same for an image whatever its neighbours.
    """
    threads = min(PREPROCESSING_THREADS, os.cpu_count() or 1, len(images))
    if threads < 2:
        return to_pixels(list(images))
    size = -(-len(images) // threads)
    parts = [list(images[start : start + size]) for start in range(0, len(images), size)]
    with ThreadPoolExecutor(threads) as pool:
        return torch.cat(list(pool.map(to_pixels, parts)))
