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


def peak_memory_gib(device: torch.device) -> float | None:
    """Peak of allocated GPU memory since the start, in GiB; None on CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
