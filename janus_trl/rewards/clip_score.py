"""CLIPScore of a picture for its caption, by any model of open_clip (arXiv:2104.08718)."""

from dataclasses import dataclass

import torch

from janus_trl.rewards.caption_reward import CaptionReward
from janus_trl.rewards.clip_models import ClipModel, check_open_clip


@dataclass(eq=False)
class ClipScore(CaptionReward):
    """100 * max(cos(caption, picture), 0) for each row: torchmetrics' scale; the paper has 2.5 instead of 100.

    Args:
        model: Name of the architecture in open_clip (OpenAI's weights need one that ends in `-quickgelu`).
        checkpoint: Path of its weights, or a tag under which open_clip publishes them.
        device, dtype, batch_size, offload, reward_prompt: See `CaptionReward`.

    Raises:
        ValueError: An unknown model, a checkpoint that is neither file nor tag, or from `Placement`.
    """

    model: str
    checkpoint: str

    reward = "clip_score"

    def _weights(self) -> tuple[str, str]:
        return self.model, check_open_clip(self.reward, self.model, self.checkpoint)

    def _values(self, clip: ClipModel, cosines: torch.Tensor) -> torch.Tensor:
        return 100 * cosines.clamp(min=0)
