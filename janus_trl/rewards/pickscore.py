"""PickScore: how well a picture fits its caption, by a CLIP model tuned on human preferences (arXiv:2305.01569)."""

from dataclasses import dataclass, field
from typing import Any

import torch

from janus_trl.rewards.caption_reward import CaptionReward
from janus_trl.rewards.clip_models import ClipModel, TransformersClip
from janus_trl.rewards.placement import FrozenModel, check_folder

# exp(logit_scale) * cosine is about 20 to 23 for real pictures; 26 brings it near 1, as earlier image GRPO work does.
SCALE = 26.0


@dataclass(eq=False)
class PickScore(CaptionReward):
    """exp(logit_scale) * cos(caption, picture) / 26 for each row, about 0.7 to 0.9 for pictures of a trained model.

    CLIP's own processor resizes and crops the picture.

    Args:
        model: Hub id or folder of the CLIP model.
        processor: Hub id or folder of its processor.
        device, dtype, batch_size, offload, reward_prompt: See `CaptionReward`.
        raw: Leave out the division by 26.

    Raises:
        ValueError: A folder that does not exist, or from `Placement`.
    """

    model: str = "yuvalkirstain/PickScore_v1"
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    raw: bool = field(default=False, kw_only=True)

    reward, kind = "pickscore", TransformersClip

    @classmethod
    def of_model(cls, model: Any, processor: Any, **args: Any) -> "PickScore":
        """The score by a CLIP model of transformers that is in memory, with its processor."""
        reward = cls(**args)
        reward.clip = FrozenModel(reward.placement, lambda: TransformersClip(model, processor))
        return reward

    def _weights(self) -> list[str]:
        return [check_folder(self.reward, name, getattr(self, name)) for name in ("model", "processor")]

    def _values(self, clip: ClipModel, cosines: torch.Tensor) -> torch.Tensor:
        return clip.logit_scale * cosines / (1.0 if self.raw else SCALE)
