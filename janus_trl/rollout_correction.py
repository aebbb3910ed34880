"""Importance sampling against the mismatch between what sampled a rollout and what trains on it."""

import torch


def importance_sampling_ratio(
    replayed: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor, mode: str, minimum: float | None, maximum: float
) -> torch.Tensor:
    """Replay over rollout probability of every sampled id, bounded: TRL's token-level correction for vLLM.

    An expectation under the sampler q of a term weighted by pi / q is one under the policy pi, whatever q is. The
    bound keeps the variance of the weights finite at the price of some bias (truncated importance sampling,
    Ionides 2008).

    Args:
        replayed: log-probs of the training forward under the policy of the rollout, `[B, C]`.
        sampled: log-probs of the rollout, `[B, C]`.
        mask: `[B, C]`, true where an id was sampled.
        mode: `truncate` clamps ratios to `minimum … maximum`, `mask` sets those outside to 0.

    Returns:
        `[B, C]`, not negative, without gradient; 1 where `mask` is false.
    """
    ratio = (replayed - sampled).detach().masked_fill(~mask, 0.0).exp()
    if mode == "truncate":
        return ratio.clamp(min=minimum, max=maximum)
    outside = ratio > maximum
    if minimum is not None:
        outside = outside | (ratio < minimum)
    return ratio.masked_fill(outside, 0.0)
