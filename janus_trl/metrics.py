"""Numbers that the trainers log, computed over all ranks."""

import torch
from accelerate import Accelerator


def masked_mean(values: torch.Tensor, mask: torch.Tensor, accelerator: Accelerator) -> float | None:
    """Mean of `values` `[B, C]` where `mask`, over all ranks; None where nothing is masked in. Collective."""
    local = torch.stack([(values * mask).sum().double(), mask.sum().double()])
    total, count = accelerator.gather(local).view(-1, 2).sum(0).tolist()
    return total / count if count else None


def drift(
    sampled: torch.Tensor, replayed: torch.Tensor, mask: torch.Tensor, accelerator: Accelerator
) -> tuple[float, float]:
    """Mean and largest |rollout log-prob - replay log-prob| over sampled ids and all ranks. Collective."""
    difference = (sampled - replayed).abs() * mask
    mean = masked_mean(difference, mask, accelerator)
    largest = accelerator.gather(difference.max().reshape(1)).max().item()
    return mean or 0.0, largest


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
        metrics[f"memory/{phase}_gib"].append(peak)
        metrics["memory/peak_gib"].append(self.highest)
