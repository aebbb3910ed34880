"""Rows of a batch that repeat: what is computed from them needs computing once."""

import torch


def distinct_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.LongTensor]:
    """The different rows of `[N, ...]` in order of appearance, `[U, ...]`, and which of them each row equals, `[N]`.

    Equality is exact; sums decide which rows are compared, so that rows cost one pass each (`torch.unique` sorts).
    """
    sums = values.flatten(1).sum(1, dtype=torch.float64).tolist()
    kept: list[int] = []
    which: list[int] = []
    for row, total in enumerate(sums):
        same = (i for i, other in enumerate(kept) if sums[other] == total and torch.equal(values[other], values[row]))
        found = next(same, len(kept))
        if found == len(kept):
            kept.append(row)
        which.append(found)
    return values[kept], torch.tensor(which, device=values.device)
