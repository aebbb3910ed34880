"""CLIPScore of a picture for its caption, by any model of open_clip (arXiv:2104.08718)."""

from typing import Any

from janus_trl.rewards.calling import Scores
from janus_trl.rewards.captions import RewardPrompt, captions_of
from janus_trl.rewards.clip_models import OpenClip, check_open_clip, pair_cosines
from janus_trl.rewards.placement import DType, FrozenModel, Placement


class ClipScore:
    """100 * max(cos(caption, picture), 0) for each row: torchmetrics' scale; the paper has 2.5 instead of 100.

    Args:
        model: Name of the architecture in open_clip (OpenAI's weights need one that ends in `-quickgelu`).
        checkpoint: Path of its weights, or a tag under which open_clip publishes them.
        device, dtype, batch_size, offload: See `janus_trl.rewards.placement.Placement`.
        reward_prompt: What the picture is compared with: the user's `prompt`, the `reasoning`, or `both`.

    Raises:
        ValueError: An unknown model, a checkpoint that is neither file nor tag, or from `Placement`.
    """

    self_test = True

    def __init__(
        self,
        model: str,
        checkpoint: str,
        device: str = "auto",
        dtype: DType = "float32",
        batch_size: int = 8,
        offload: bool = False,
        reward_prompt: RewardPrompt = "prompt",
    ):
        self.placement = Placement("clip_score", device, dtype, batch_size, offload)
        weights = check_open_clip("clip_score", model, checkpoint)
        self.clip = FrozenModel(self.placement, lambda: OpenClip.load("clip_score", model, weights))
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
            values = (100 * cosines.clamp(min=0)).tolist()
            return Scores(values, counts={"truncated": sum(map(clip.is_cut, captions))})
