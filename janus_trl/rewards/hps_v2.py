"""HPSv2.1: human preference score of a picture for its caption, by a tuned open_clip ViT-H-14 (arXiv:2306.09341)."""

import os
from dataclasses import dataclass

from janus_trl.rewards.caption_reward import CaptionReward
from janus_trl.rewards.clip_models import check_open_clip
from janus_trl.rewards.placement import check_file


@dataclass(eq=False)
class HPSv2(CaptionReward):
    """cos(caption, picture) for each row, about 0.2 to 0.35 for pictures of a trained model.

    Args:
        checkpoint: The published weights, `HPS_v2.1_compressed.pt` (`{"state_dict": …}`) or a plain state dict.
        model: Name of the architecture in open_clip.
        device, dtype, batch_size, offload, reward_prompt: See `CaptionReward`.

    Raises:
        ValueError: No such file (a published tag of CLIP is none: its weights are not HPSv2's), an architecture that
            open_clip does not know, or from `Placement`.
    """

    checkpoint: str
    model: str = "ViT-H-14"

    reward = "hps_v2"

    def _weights(self) -> tuple[str, str]:
        # Absolute: open_clip takes a bare name like `openai` for a tag, even where such a file exists.
        path = os.path.abspath(check_file(self.reward, "checkpoint", self.checkpoint))
        return self.model, check_open_clip(self.reward, self.model, path)
