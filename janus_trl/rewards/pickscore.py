"""PickScore: how well a picture fits its caption, by a CLIP model tuned on human preferences (arXiv:2305.01569)."""

from typing import Any

from janus_trl.rewards.calling import Scores
from janus_trl.rewards.captions import RewardPrompt, captions_of
from janus_trl.rewards.clip_models import TransformersClip, pair_cosines
from janus_trl.rewards.placement import DType, FrozenModel, Placement, check_folder

# exp(logit_scale) * cosine is about 20 to 23 for real pictures; 26 brings it near 1, as earlier image GRPO work does.
SCALE = 26.0


class PickScore:
    """exp(logit_scale) * cos(caption, picture) / 26 for each row, about 0.7 to 0.9 for pictures of a trained model.

    The model is loaded at the first call (or by `load`). Captions longer than the text tower (77 tokens) are cut before
    their end token and counted. CLIP's own processor resizes and crops the picture.

    Args:
        model: Hub id or folder of the CLIP model.
        processor: Hub id or folder of its processor.
        device, dtype, batch_size, offload: See `janus_trl.rewards.placement.Placement`.
        reward_prompt: What the picture is compared with: the user's `prompt`, the `reasoning`, or `both`.
        raw: Leave out the division by 26.

    Raises:
        ValueError: A folder that does not exist, or from `Placement`.
    """

    self_test = True

    def __init__(
        self,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        device: str = "auto",
        dtype: DType = "float32",
        batch_size: int = 8,
        offload: bool = False,
        reward_prompt: RewardPrompt = "prompt",
        raw: bool = False,
    ):
        self.placement = Placement("pickscore", device, dtype, batch_size, offload)
        folders = [check_folder("pickscore", *pair) for pair in (("model", model), ("processor", processor))]
        self.clip = FrozenModel(self.placement, lambda: TransformersClip.load("pickscore", *folders))
        self.reward_prompt, self._divisor = reward_prompt, 1.0 if raw else SCALE

    @classmethod
    def of_model(cls, model: Any, processor: Any, **args: Any) -> "PickScore":
        """The score by a CLIP model of transformers that is in memory, with its processor."""
        reward = cls(**args)
        reward.clip = FrozenModel(reward.placement, lambda: TransformersClip(model, processor))
        return reward

    def load(self) -> None:
        """Load model and processor, unless that is done already; a ValueError says what cannot be read."""
        self.clip.load()

    def __call__(
        self, prompts: list, generated_images: list, completions: list | None = None, **columns: Any
    ) -> list[float | None]:
        """One score per row; `prompts` are the user's texts, `generated_images` RGB PIL pictures."""
        captions = captions_of(prompts, completions, self.reward_prompt)
        with self.clip.ready() as clip:
            cosines = pair_cosines(clip, captions, generated_images, self.placement.batch_size)
            values = (clip.logit_scale * cosines / self._divisor).tolist()
            return Scores(values, counts={"truncated": sum(map(clip.is_cut, captions))})
