"""What a rollout has to learn from: the spread of its rewards within and between groups, computed over all ranks.

GRPO compares the completions of one prompt. Spread within the groups is the only thing that the policy can act on;
spread between them is prompt difficulty (UniRL#141: 89 % of the reward variance of a run that learned nothing).
"""

from collections.abc import Sequence

import torch
from accelerate import Accelerator

FLAT_TOLERANCE = 1e-6  # relative to the size of the rewards: float32 rounding of a weighted sum of equal rewards


def flat_groups(rewards: torch.Tensor) -> torch.Tensor:
    """Which groups have no spread, so that all their advantages are 0.

    Args:
        rewards: `[groups, G]`; NaN where a completion could not be scored. Fewer than two scored completions are flat.

    Returns:
        `[groups]` booleans.
    """
    low = rewards.nan_to_num(nan=torch.inf).min(1).values
    high = rewards.nan_to_num(nan=-torch.inf).max(1).values
    size = rewards.nan_to_num(nan=0.0).abs().max(1).values
    return high - low <= FLAT_TOLERANCE * size  # -inf if nothing was scored


def reward_spread(rewards: torch.Tensor) -> dict[str, float]:
    """Spread within and between groups, without the groups that could not be scored.

    With the population variances, total = between + within, where `within` is the mean over the completions:

        within_group_std        mean over groups of the unbiased standard deviation, as in `scale_rewards: group`
        between_group_std       unbiased standard deviation of the group means
        prompt_variance_share   between / total, 0 for equal rewards

    `scale_rewards: batch` divides by the square root of `total`: with a share s, advantages have a mean square of
    1 - s. A baseline over the batch instead of the group would make s the share of the advantage variance that the
    policy cannot act on.

    Args:
        rewards: `[groups, G]`; NaN where a completion could not be scored.

    Returns:
        The three numbers by name; empty if nothing could be scored.
    """
    rewards = rewards.double()
    rewards = rewards[~rewards.isnan().all(1)]
    if not len(rewards):
        return {}
    counts = (~rewards.isnan()).sum(1)  # [groups]
    means = rewards.nanmean(1)
    squares = ((rewards - means[:, None]) ** 2).nansum(1)
    stds = (squares / (counts - 1).clamp(min=1)).sqrt()
    total_mean = (means * counts).sum() / counts.sum()
    between, within = ((means - total_mean) ** 2 * counts).sum().item(), squares.sum().item()
    negligible = (FLAT_TOLERANCE * rewards.nan_to_num(nan=0.0).abs().max().item()) ** 2 * counts.sum().item()
    return {
        "within_group_std": stds.mean().item(),
        "between_group_std": means.std().item() if len(means) > 1 else 0.0,
        "prompt_variance_share": between / (between + within) if between + within > negligible else 0.0,
    }


def duplicate_share(keys: torch.Tensor) -> float:
    """Share of completions that equal another one of their group.

    Args:
        keys: `[groups, G]` integers, equal for equal completions.
    """
    equal = (keys[:, :, None] == keys[:, None, :]).sum(2) > 1  # one: itself
    return equal.double().mean().item()


def completion_keys(completion_ids: torch.Tensor, completion_mask: torch.Tensor) -> torch.Tensor:
    """`[B]` int64 hashes of the ids `[B, C]` that the mask keeps: eight bytes a row to gather."""
    rows = zip(completion_ids.tolist(), completion_mask.tolist(), strict=True)
    keys = [hash(tuple(i for i, keep in zip(ids, mask, strict=True) if keep)) for ids, mask in rows]
    return torch.tensor(keys, device=completion_ids.device)


def signal_metrics(
    rewards_per_func: torch.Tensor,
    weights: torch.Tensor,
    names: Sequence[str],
    num_generations: int,
    output: dict[str, torch.Tensor],
    accelerator: Accelerator,
) -> dict[str, float]:
    """The metrics of one rollout by their logged names, equal on all ranks. Collective.

    Args:
        rewards_per_func: `[N, F]` rewards of all ranks, groups one after another; NaN where a function gave None.
        weights: `[F]` weights of the functions.
        names: `F` names of the functions.
        num_generations: completions of a prompt, G.
        output: the rows of this rank: `completion_ids` and `completion_mask` `[B, C]`, `advantages` `[B]`.
        accelerator: gathers what this rank knows alone.
    """
    rewards_per_func = rewards_per_func.double()
    rewards = (rewards_per_func * weights.to(rewards_per_func)).nansum(1)
    rewards[rewards_per_func.isnan().all(1)] = torch.nan
    groups = rewards.view(-1, num_generations)
    keys = accelerator.gather(completion_keys(output["completion_ids"], output["completion_mask"]))
    metrics = {f"signal/{name}": value for name, value in reward_spread(groups).items()}
    metrics["signal/flat_groups"] = flat_groups(groups).double().mean().item()
    metrics["signal/advantage_abs_mean"] = accelerator.gather(output["advantages"]).abs().mean().item()
    metrics["signal/duplicates"] = duplicate_share(keys.view(-1, num_generations))
    for i, name in enumerate(names):
        spread = reward_spread(rewards_per_func[:, i].view(-1, num_generations))
        if spread:
            metrics[f"rewards/{name}/within_group_std"] = spread["within_group_std"]
    return metrics
