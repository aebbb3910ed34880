"""After the rewards of a step: raise on all ranks what one of them raised, leave faults out of training, log counts."""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from .reward_guard import NOT_FINITE, GuardedReward, Outcome
from .rewards.calling import Scores
from .rewards.http_calls import NoAnswer


def settle(
    functions: Sequence[GuardedReward],
    rewards: torch.Tensor,
    weights: torch.Tensor,
    accelerator: Accelerator,
    metrics: dict[str, list[float]] | None = None,
) -> torch.Tensor:
    """What TRL may train on; collective.

    A row leaves its group (all its rewards become NaN, its advantage is 0) if a reward with a weight other than 0 was
    not finite or failed there, or if all such rewards abstained; a reward with weight 0 never decides that.

    Args:
        functions: Of `guard`, just called.
        rewards: What TRL gathered, `[rows of all ranks, rewards]`; infinities are the marks of the guard.
        weights: One per reward.
        metrics: Where to append `rewards/<name>/…` and `time/reward_s/<name>`, if anywhere.

    Raises:
        RuntimeError: Naming reward, rank, row and error; caused by the original exception where it happened.
    """
    outcomes = [function.outcome or Outcome(Scores(), 0.0) for function in functions]
    here = [
        {
            "seconds": o.seconds,
            "counts": o.values.counts,
            "timeouts": o.timed_out * len(o.failed),
            "errors": (o.error is not None) * len(o.failed),
            "note": o.note,
            "unanswered": isinstance(o.error, NoAnswer),
        }
        for o in outcomes
    ]
    ranks = gather_object([here])  # [rank][reward]
    for function in functions:
        function.outcome = None
    if functions[0].calls.on_error == "raise":
        _raise(functions, ranks, next((o.error for o in outcomes if o.error is not None), None), len(rewards))
    if metrics is not None:
        _log(functions, rewards, ranks, metrics)
    trained = weights.to(rewards.device) != 0
    faulty = rewards.isinf()
    rewards = rewards.masked_fill(faulty, torch.nan)
    out = (faulty & trained).any(1) | rewards[:, trained].isnan().all(1)
    return rewards.masked_fill(out[:, None], torch.nan)


def _raise(functions: Sequence[GuardedReward], ranks: list[list[dict]], cause: BaseException | None, rows: int) -> None:
    # A rank may have a single row: a service is gone only if it answered none of the rows of all ranks.
    excused = {i for i in range(len(functions)) if rows == 1 or not all(of_rank[i]["unanswered"] for of_rank in ranks)}
    notes = [
        f"reward '{function.__name__}' failed on rank {rank}{of_rank[i]['note']}"
        for rank, of_rank in enumerate(ranks)
        for i, function in enumerate(functions)
        if of_rank[i]["note"] and not (of_rank[i]["unanswered"] and i in excused)
    ]
    if notes:
        raise RuntimeError("; ".join(notes)) from cause


def _log(functions: Sequence[GuardedReward], rewards: torch.Tensor, ranks: list[list[dict]], metrics: dict) -> None:
    calls = functions[0].calls
    for i, function in enumerate(functions):
        name, told = function.__name__, [of_rank[i] for of_rank in ranks]
        timeouts = sum(one["timeouts"] for one in told)
        counts = {"nan": (rewards[:, i] == NOT_FINITE).sum().item()}
        if function.is_async and calls.timeout is not None:
            counts["timeouts"] = timeouts
        if calls.on_error != "raise":
            counts["errors"] = sum(one["errors"] for one in told)
        for key in sorted({key for one in told for key in one["counts"]}):
            counts[key] = sum(one["counts"].get(key, 0) for one in told)
        for key, count in counts.items():
            metrics[f"rewards/{name}/{key}"].append(float(count))
        metrics[f"time/reward_s/{name}"].append(max(one["seconds"] for one in told))
