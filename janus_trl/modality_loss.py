"""Text and image codes apart in TRL's GRPO loss: weights, clip ranges, correction of the sampler, and their metrics.

TRL's `_compute_loss` stays as it is. It asks for the scores first and reads advantages, old and reference log-probs
after that: `LossBatch` hands it a copy of the batch and completes the copy as soon as the scores are there.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .configs import JanusGRPOConfig
from .rollout_correction import importance_sampling_ratio

# Log-ratios are bounded before the exponential, which overflows float32 at 88; verl and TRL's VESPO use 20 as well.
MAX_LOG_RATIO = 20.0


class LossBatch:
    """One micro-batch on its way through TRL's loss.

    Attributes:
        inputs: what TRL's loss reads, a copy.
        mask: `[B, C]`, the ids that were sampled (neither padding nor forced).
        is_code: `[B, C]`, the image codes; all other ids, `<begin_of_image>` and eos too, are text.
        logps, entropies: `[B, C]`, set by `scored`; the entropies carry their gradient.
        old_logps: log-probs under the policy of the rollout, from the same forward as `logps`.
        ref_logps: those of the reference model; None without one.
        correction: importance-sampling ratio of the rollout `[B, C]`; None without `rollout_correction`.
    """

    def __init__(self, inputs: dict, vocab_size: int, args: JanusGRPOConfig):
        self.args, self.inputs = args, dict(inputs)
        mask = inputs["completion_mask"]
        self.mask = (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()
        self.is_code = inputs["completion_ids"] >= vocab_size
        self.advantages = inputs["advantages"]
        if self.advantages.dim() == 1:
            self.advantages = self.advantages.unsqueeze(1)
        self.logps = self.entropies = self.old_logps = self.ref_logps = self.correction = None

    def segments(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`text` and `image`, each with the mask of its sampled ids."""
        yield "text", self.mask & ~self.is_code
        yield "image", self.mask & self.is_code

    def scored(self, logps: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        """Complete `inputs` from the scores `[B, C]`, before TRL reads it; the log-probs that TRL is to use.

        Old and reference log-probs are bounded, so that no exponential of TRL overflows: at ids that do not count
        (an infinity times a mask of 0 is NaN) they become those of the policy.
        """
        now = self.logps = logps.detach()
        self.entropies, self.old_logps = entropies, now
        if (old := self.inputs.get("old_per_token_logps")) is not None:
            self.old_logps = torch.maximum(old, now - MAX_LOG_RATIO).where(self.mask, now)
            self.inputs["old_per_token_logps"] = self.old_logps
        if (ref := self.inputs.get("ref_per_token_logps")) is not None:
            self.ref_logps = torch.minimum(ref, now + MAX_LOG_RATIO).where(self.mask, now)
            self.inputs["ref_per_token_logps"] = self.ref_logps
        if self.args.rollout_correction != "none":
            self._correct()
        weights = self.args.text_loss_weight, self.args.image_loss_weight
        return logps if weights == (1.0, 1.0) else scale_gradient(logps, self.by_modality(*weights, like=logps))

    def _correct(self) -> None:
        """Weight every id by replay over rollout probability, as TRL does for vLLM."""
        args, sampled = self.args, self.inputs["sampling_per_token_logps"]
        self.correction = importance_sampling_ratio(
            self.old_logps, sampled, self.mask, args.rollout_correction, args.rollout_correction_min,
            args.rollout_correction_max,
        )  # fmt: skip
        if args.loss_type == "vespo":  # its weights are those of whole rows: TRL multiplies the ratios there
            self.inputs["importance_sampling_ratio"] = self.correction
        else:  # not negative, so it passes through the minimum of the clipped loss, and through its sign
            self.inputs["advantages"] = self.advantages * self.correction

    def by_modality(self, text: float, image: float, like: torch.Tensor) -> torch.Tensor:
        """`[B, C]`: `image` at image codes, `text` elsewhere."""
        return torch.full_like(like, text, requires_grad=False).masked_fill(self.is_code, image)

    @contextmanager
    def clip_ranges(self, trainer) -> Iterator[None]:
        """While it is open, TRL clips with the epsilons of each modality, `[B, C]`, where the config sets any."""
        before = trainer.epsilon_low, trainer.epsilon_high
        self.epsilon_low, self.epsilon_high = before
        ranges = {name: self._clip_range(name, *before) for name in ("text", "image")}
        if any(pair != before for pair in ranges.values()):
            low, high = zip(*ranges.values(), strict=True)
            like = torch.empty(self.mask.shape, device=self.mask.device)
            self.epsilon_low, self.epsilon_high = self.by_modality(*low, like), self.by_modality(*high, like)
        trainer.epsilon_low, trainer.epsilon_high = self.epsilon_low, self.epsilon_high
        try:
            yield
        finally:
            trainer.epsilon_low, trainer.epsilon_high = before

    def _clip_range(self, modality: str, low: float, high: float) -> tuple[float, float]:
        """Lower and upper epsilon; `epsilon_text` sets both sides, `epsilon_high_text` the upper one alone."""
        both, above = getattr(self.args, f"epsilon_{modality}"), getattr(self.args, f"epsilon_high_{modality}")
        low, high = (low, high) if both is None else (both, both)
        return low, high if above is None else above


def scale_gradient(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`values` with their gradient multiplied by `weights`.

    On log-probs it weights policy and KL term of every loss type alike, and leaves TRL's normalisers, its metrics and
    the value of the loss as they are.
    """
    return values.detach() + weights * (values - values.detach())
