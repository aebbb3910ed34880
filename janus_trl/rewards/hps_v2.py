"""HPSv2.1: human preference score of a picture for its caption, by a tuned open_clip ViT-H-14 (arXiv:2306.09341)."""

import os
from typing import Any

from janus_trl.rewards.calling import Scores
from janus_trl.rewards.captions import RewardPrompt, captions_of
from janus_trl.rewards.clip_models import OpenClip, check_open_clip, pair_cosines
from janus_trl.rewards.placement import DType, FrozenModel, Placement, check_file


class HPSv2:
    """cos(caption, picture) for each row, about 0.2 to 0.35 for pictures of a trained model.

    Args:
        checkpoint: The published weights, `HPS_v2.1_compressed.pt` (`{"state_dict": …}`) or a plain state dict.
        model: Name of the architecture in open_clip.
        device, dtype, batch_size, offload: See `janus_trl.rewards.placement.Placement`.
        reward_prompt: What the picture is compared with: the user's `prompt`, the `reasoning`, or `both`.

    Raises:
        ValueError: No such file (a published tag of CLIP is none: its weights are not HPSv2's), an architecture that
            open_clip does not know, or from `Placement`.
    """

    self_test = True

    def __init__(
        self,
        checkpoint: str,
        model: str = "ViT-H-14",
        device: str = "auto",
        dtype: DType = "float32",
        batch_size: int = 8,
        offload: bool = False,
        reward_prompt: RewardPrompt = "prompt",
    ):
        self.placement = Placement("hps_v2", device, dtype, batch_size, offload)
        # Absolute: open_clip takes a bare name like `openai` for a tag, even where such a file exists.
        path = os.path.abspath(check_file("hps_v2", "checkpoint", checkpoint))
        check_open_clip("hps_v2", model, path)
        self.clip = FrozenModel(self.placement, lambda: OpenClip.load("hps_v2", model, path))
        self.reward_prompt = reward_prompt

    def load(self) -> None:
        """Load the model, unless that is done already; a ValueError says what cannot be read."""
        self.clip.load()

    def __call__(
        self, prompts: list, generated_images: list, completions: list | None = None, **columns: Any
    ) -> list[float | None]:
        """One score per row; `prompts` are the user's texts, `generated_images` RGB PIL pictures."""
        captions = captions_of(prompts, completions, self.reward_prompt)
        with self.clip.ready() as clip:
            cosines = pair_cosines(clip, captions, generated_images, self.placement.batch_size)
            return Scores(cosines.tolist(), counts={"truncated": sum(map(clip.is_cut, captions))})
