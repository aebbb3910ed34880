"""LAION's aesthetic predictor: a linear head, or a stack of them, on the picture features of CLIP ViT-L/14."""

import re
from typing import Any

import torch

from janus_trl.rewards.calling import Scores
from janus_trl.rewards.clip_models import TransformersClip, brief, image_features
from janus_trl.rewards.placement import DType, FrozenModel, Placement, check_file, check_folder


class Aesthetic:
    """The head's value for each picture, about 1 to 10; the caption does not matter.

    Args:
        head: File of the head's state dict, such as `sac+logos+ava1-l14-linearMSE.pth` (five linear layers without
            activation between them) or `sa_0_4_vit_l_14_linear.pth` (one).
        model: Hub id or folder of the CLIP model that the head was trained on.
        processor: Hub id or folder of its processor; that of the model if unset.
        device, dtype, batch_size, offload: See `janus_trl.rewards.placement.Placement`. The head runs in float32.

    Raises:
        ValueError: A file or folder that does not exist, or from `Placement`.
    """

    self_test = True

    def __init__(
        self,
        head: str,
        model: str = "openai/clip-vit-large-patch14",
        processor: str | None = None,
        device: str = "auto",
        dtype: DType = "float32",
        batch_size: int = 8,
        offload: bool = False,
    ):
        self.placement = Placement("aesthetic", device, dtype, batch_size, offload)
        self._head_path = check_file("aesthetic", "head", head)
        pairs = (("model", model), ("processor", processor or model))
        self._folders = [check_folder("aesthetic", *pair) for pair in pairs]
        self._head: torch.nn.Sequential | None = None
        self.clip = FrozenModel(self.placement, self._load)

    def load(self) -> None:
        """Load model and head, unless that is done already; a ValueError says what cannot be read."""
        self.clip.load()

    def _load(self) -> TransformersClip:
        clip = TransformersClip.load("aesthetic", *self._folders)
        self._head = read_head(self._head_path, clip.module.config.projection_dim)
        return clip

    def __call__(self, generated_images: list, **columns: Any) -> list[float | None]:
        """One score per picture (RGB PIL)."""
        with self.clip.ready() as clip:
            features = image_features(clip, generated_images, self.placement.batch_size)
            return Scores(self._head.to(features.device)(features).squeeze(-1).tolist())


def read_head(path: str, width: int) -> torch.nn.Sequential:
    """The linear layers in a state dict, in the order of their numbers (`layers.0.weight`, or just `weight`).

    Args:
        path: File of the state dict.
        width: Width of the features that the first layer takes.

    Raises:
        ValueError: The file cannot be read, holds something else than linear layers, or their shapes do not lead from
            `width` to one number.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises nearly anything for a file that is not its own
        raise ValueError(f"reward 'aesthetic': head '{path}' cannot be read: {brief(error)}") from error
    state = state.get("state_dict", state) if isinstance(state, dict) else {}
    names = sorted((name.removesuffix("weight") for name in state if name.endswith("weight")), key=_numbers)
    layers = []
    for name in names:
        weight, bias = state[f"{name}weight"], state.get(f"{name}bias")
        if weight.ndim != 2 or bias is None or bias.shape != weight.shape[:1]:
            raise ValueError(f"reward 'aesthetic': head '{path}': '{name}weight' and its bias are no linear layer.")
        layers.append(torch.nn.Linear(weight.shape[1], weight.shape[0]))
        layers[-1].load_state_dict({"weight": weight, "bias": bias})
    widths = [layer.in_features for layer in layers] + [layer.out_features for layer in layers[-1:]]
    fits = all(left.out_features == right.in_features for left, right in zip(layers, layers[1:], strict=False))
    if not layers or not fits or widths[0] != width or widths[-1] != 1:
        found = ", ".join(f"{layer.in_features} -> {layer.out_features}" for layer in layers) or "no linear layers"
        raise ValueError(
            f"reward 'aesthetic': head '{path}' has {found}; the CLIP model's features have width {width}, and "
            f"the head must lead from {width} to 1. Set `args: {{model: ...}}` to the CLIP it was trained on."
        )
    return torch.nn.Sequential(*layers).float().eval().requires_grad_(False)


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]
