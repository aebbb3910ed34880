"""What is logged about a micro-batch of the loss: text and image codes apart, and the ratios of an update."""

import logging

import torch
from accelerate import Accelerator

from .metrics import Masked, pooled
from .modality_loss import LossBatch

logger = logging.getLogger(__name__)

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # loss types that clip the ratio on both sides
LARGEST_FIRST = 0.05  # of |ratio - 1| before an update: rounding gives 1e-5 in float32 and less than this in bf16
LARGEST_RATIO = 10.0  # after an update


def loss_metrics(batch: LossBatch, accelerator: Accelerator, first: bool) -> dict[str, float]:
    """Drift, entropies, KL, clip fractions and ratios over all ranks, named as in TRL; collective, one gather.

    Args:
        batch: a micro-batch that TRL's loss has been computed of.
        first: whether the policy is still that of the rollout.
    """
    means: Masked = {}
    maxima: Masked = {}
    for terms in (_sampler_terms(batch), _ratio_terms(batch, first)):
        means |= terms[0]
        maxima |= terms[1]
    for name, where in batch.segments():
        means[f"entropy/{name}"] = batch.entropies, where
        means |= {metric: (value, where) for metric, value in _clipped(batch, name).items()}
        if batch.ref_logps is not None:
            distance = (batch.ref_logps - batch.logps).abs()
            means[f"kl/{name}"] = _kl(batch), where
            means[f"kl/{name}_log_ratio_mean"] = maxima[f"kl/{name}_log_ratio_max"] = distance, where
    found = pooled(means, maxima, accelerator)
    smallest = found.pop("-min", None)
    return found if smallest is None else found | {"sampling/importance_sampling_ratio/min": -smallest}


def _sampler_terms(batch: LossBatch) -> tuple[Masked, Masked]:
    """Rollout against replay of the rollout's policy; with a correction also under TRL's names for vLLM."""
    # After the first update of a rollout the policy has moved: `old_logps` have not.
    drift = (batch.inputs["sampling_per_token_logps"] - batch.old_logps).abs(), batch.mask
    means, maxima = {"logps/drift_mean": drift}, {"logps/drift_max": drift}
    if batch.correction is not None:
        ratio, name = (batch.correction, batch.mask), "sampling/importance_sampling_ratio"
        means |= {"sampling/sampling_logp_difference/mean": drift, f"{name}/mean": ratio}
        maxima |= {"sampling/sampling_logp_difference/max": drift, f"{name}/max": ratio}
        maxima["-min"] = -batch.correction, batch.mask
    return means, maxima


def _ratio_terms(batch: LossBatch, first: bool) -> tuple[Masked, Masked]:
    ratio = (batch.logps - batch.old_logps).exp()
    distance = (ratio - 1).abs(), batch.mask
    means, maxima = {}, {"ratio/max": (ratio, batch.mask)}
    if first:
        means["ratio/first_mean"] = maxima["ratio/first_max"] = distance
    return means, maxima


def _kl(batch: LossBatch) -> torch.Tensor:
    """TRL's per-token KL `[B, C]`: the k3 estimator (http://joschu.net/blog/kl-approx.html), times the ratio."""
    log_ratio = batch.ref_logps - batch.logps
    kl = log_ratio.exp() - log_ratio - 1
    return kl * _ratio(batch) if batch.args.use_bias_correction_kl else kl


def _ratio(batch: LossBatch) -> torch.Tensor:
    """TRL's importance weight of each id under the policy of the rollout, `[B, C]`."""
    log_ratio = batch.logps - batch.old_logps
    if batch.args.importance_sampling_level == "sequence":
        mean = (log_ratio * batch.mask).sum(-1) / batch.mask.sum(-1).clamp(min=1)
        log_ratio = mean.unsqueeze(-1).expand_as(log_ratio)
    return log_ratio.exp()


def _clipped(batch: LossBatch, name: str) -> dict[str, torch.Tensor]:
    """Which ids TRL's loss clips, `[B, C]`, under its metric names with the modality; none where it does not clip."""
    ratio, advantages = _ratio(batch), batch.advantages
    above = (ratio > 1 + batch.epsilon_high) & (advantages > 0)
    if batch.args.loss_type == "cispo":
        above = (ratio > batch.epsilon_high) & (advantages > 0)
        return {f"cispo_clip_ratio/{name}": above.float()}
    if batch.args.loss_type not in CLIPPED:
        return {}
    if batch.args.delta is not None:
        above = (ratio.clamp(max=batch.args.delta) > 1 + batch.epsilon_high) & (advantages > 0)
    below = (ratio < 1 - batch.epsilon_low) & (advantages < 0)
    shares = {"low": below, "high": above, "region": below | above}
    return {f"clip_ratio/{name}_{side}_mean": share.float() for side, share in shares.items()}


class RatioWarnings:
    """Says once on the main process when old log-probs do not fit, and once when an update was too large."""

    def __init__(self, accelerator: Accelerator):
        self._speaks, self._said = accelerator.is_main_process, set()

    def check(self, metrics: dict[str, float]) -> None:
        """Look at the metrics of a micro-batch."""
        first, largest = metrics.get("ratio/first_max", 0.0), metrics.get("ratio/max", 1.0)
        if first > LARGEST_FIRST:
            self._say(
                "first",
                f"ratio/first_max = {first:.3g}: before any update, the probability of an id already differs from the "
                f"old one by more than {LARGEST_FIRST:.0%}, so clipping acts on rounding. Train in float32 or lower "
                "guidance_scale; rollout_correction weights such noise.",
            )
        elif largest > LARGEST_RATIO:
            self._say(
                "largest",
                f"ratio/max = {largest:.3g}: an update made an id more than {LARGEST_RATIO:g} times as likely. Lower "
                "learning_rate, use warmup_steps, or make fewer updates per rollout (num_iterations).",
            )

    def _say(self, key: str, message: str) -> None:
        if self._speaks and key not in self._said:
            logger.warning(message)
        self._said.add(key)
