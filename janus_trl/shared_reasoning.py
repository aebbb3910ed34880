"""Advantages where several images are drawn from one reasoning (T2I-R1, arXiv 2505.00703)."""

import torch


def advantages_per_token(
    advantages: torch.Tensor,
    completion_ids: torch.LongTensor,
    vocab_size: int,
    images_per_reasoning: int,
    scored: torch.BoolTensor | None = None,
) -> torch.Tensor:
    r"""One advantage for every position of the completions, `[B, C]`.

    A group has `n` reasonings `t_b` with `k` images `x_bi` each, and TRL's advantage `A_bi` of every completion. The
    codes of an image get its own `A_bi`. What is known about a reasoning is the mean over its images,

        A_b = 1/k sum_i A_bi        (with `scale_rewards` none: mean reward of t_b minus that of the group)

    so its text gets `A_b`. Each reasoning stands in `k` rows; a loss that is a mean over the `n k` rows counts it
    k / (n k) = 1/n times, as one of `n` reasonings: no further weight is needed. Without clipping the gradient is
    the one of `A_bi` on all positions, since `sum_i A_bi grad log p(t_b) = k A_b grad log p(t_b)`. With clipping it is
    not: there the copies of a text would be cut at different sides, each by the luck of its own image.

    An image that no reward scored says nothing about its reasoning: it is left out of the mean, as TRL leaves it out of
    that of the group, and its codes have TRL's advantage for it, 0. A reasoning without a scored image has 0 as well.

    Args:
        advantages: `[B]`, rows of a reasoning after one another; 0 where a row was not scored.
        completion_ids: joint ids `[B, C]`; those from `vocab_size` on are image codes.
        scored: `[B]`, which rows have a reward; all if None.
    """
    scored = torch.ones_like(advantages, dtype=torch.bool) if scored is None else scored
    shape = (-1, images_per_reasoning)
    sums, counts = (advantages * scored).view(shape).sum(1), scored.view(shape).sum(1)
    of_reasoning = (sums / counts.clamp(min=1)).repeat_interleave(images_per_reasoning)
    return torch.where(completion_ids >= vocab_size, advantages.unsqueeze(1), of_reasoning.unsqueeze(1))


def scored_rows(rewards: torch.Tensor, rank: int, rows: int) -> torch.BoolTensor:
    """Which of the `rows` rows of a rank have a reward, `[rows]`.

    Args:
        rewards: `[N, F]` of all ranks, in their order; NaN where a reward function gave none.
    """
    return ~rewards[rank * rows : (rank + 1) * rows].isnan().all(1)
