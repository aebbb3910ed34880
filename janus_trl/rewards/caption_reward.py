"""What rewards that compare picture and caption by CLIP share: arguments, loading, cosines, counts of cut captions."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from janus_trl.rewards.calling import Scores
from janus_trl.rewards.captions import RewardPrompt, captions_of
from janus_trl.rewards.clip_models import ClipModel, OpenClip, TransformersClip, pair_cosines
from janus_trl.rewards.placement import DType, FrozenModel, Placement


@dataclass(kw_only=True, eq=False)
class CaptionReward:
    """One score per row from the cosine of its caption and its picture; the model is loaded at the first call.

    A subclass names itself in `reward`, says in `_weights` what `kind.load` reads, and in `_values` what a cosine is
    worth. Captions longer than the text tower are cut before their end token and counted.

    Args:
        device, dtype, batch_size, offload: See `janus_trl.rewards.placement.Placement`.
        reward_prompt: What the picture is compared with: the user's `prompt`, the `reasoning`, or `both`.
    """

    reward: ClassVar[str]
    kind: ClassVar[type[OpenClip] | type[TransformersClip]] = OpenClip
    self_test: ClassVar[bool] = True

    device: str = "auto"
    dtype: DType = "float32"
    batch_size: int = 8
    offload: bool = False
    reward_prompt: RewardPrompt = "prompt"

    def __post_init__(self):
        self.placement = Placement(self.reward, self.device, self.dtype, self.batch_size, self.offload)
        weights = self._weights()  # checked before anything is loaded
        self.clip = FrozenModel(self.placement, lambda: self.kind.load(self.reward, *weights))

    def _values(self, clip: ClipModel, cosines: torch.Tensor) -> torch.Tensor:
        return cosines  # [n]

    def load(self) -> None:
        """Load the model, unless that is done already; a ValueError says what cannot be read."""
        self.clip.load()

    def __call__(
        self, prompts: list, generated_images: list, completions: list | None = None, **columns: Any
    ) -> list[float | None]:
        """One score per row; `prompts` are the user's texts, `generated_images` RGB PIL pictures."""
        captions = captions_of(prompts, completions, self.reward_prompt)
        with self.clip.ready() as clip:
            values = self._values(clip, pair_cosines(clip, captions, generated_images, self.placement.batch_size))
            return Scores(values.tolist(), counts={"truncated": sum(map(clip.is_cut, captions))})
