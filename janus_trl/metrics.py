"""Numbers that the trainers log, computed over all ranks."""

import torch
from accelerate import Accelerator

Masked = dict[str, tuple[torch.Tensor, torch.Tensor]]  # name -> values, mask, both [B, C]


def pooled(means: Masked, maxima: Masked, accelerator: Accelerator) -> dict[str, float]:
    """Means and largest values over the masked-in positions of all ranks, in one gather. Collective.

    Values outside of a mask may be anything, NaN included. A name without a masked-in position on any rank is left
    out. The names have to be the same, in the same order, on all ranks.
    """
    sums = [part for values, mask in means.values() for part in (_inside(values, mask).sum(), mask.sum())]
    tops = [_inside(values, mask, -torch.inf).max() for values, mask in maxima.values()]
    local = torch.stack([value.double() for value in (*sums, *tops)])
    ranks = accelerator.gather(local).view(-1, len(local))
    totals, largest = ranks[:, : len(sums)].sum(0).tolist(), ranks[:, len(sums) :].amax(0).tolist()
    found = {name: total / count for name, total, count in zip(means, totals[::2], totals[1::2], strict=True) if count}
    return found | {name: top for name, top in zip(maxima, largest, strict=True) if top != -torch.inf}


def _inside(values: torch.Tensor, mask: torch.Tensor, outside: float = 0.0) -> torch.Tensor:
    return values.detach().masked_fill(~mask, outside)


class PhaseMemory:
    """Peak of allocated GPU memory by phase of a step, in GiB; nothing is measured on a CPU."""

    def __init__(self, device: torch.device):
        self.device, self.highest = device, 0.0

    def end(self, phase: str, metrics: dict[str, list[float]]) -> None:
        """Log `memory/<phase>_gib`, the peak since the phase before ended, and `memory/peak_gib`, that of the run."""
        if self.device.type != "cuda":
            return
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30
        torch.cuda.reset_peak_memory_stats(self.device)
        self.highest = max(self.highest, peak)
        # TRL logs means, and the step that DeepSpeed makes in the last of many micro-batches would vanish in one.
        for name, value in ((f"memory/{phase}_gib", peak), ("memory/peak_gib", self.highest)):
            metrics[name][:] = [max([*metrics[name], value])]
