"""What a rollout needs on a device, and what to say when it did not fit."""

import gc

import torch
from transformers import JanusConfig

from .engine_buffers import SLOT_MULTIPLE
from .rollouts import SamplingSettings

# Share of the free memory that may be planned with: the rest goes to fragments and to the matrix libraries.
USABLE = 0.85


def cache_bytes(config: JanusConfig, positions: int, streams: int, element_size: int = 2) -> int:
    """Bytes of the keys and values of one row: all layers, `positions` slots in each of `streams` streams."""
    text = config.text_config
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * text.num_key_value_heads * width * positions * streams * element_size


def row_bytes(config: JanusConfig, settings: SamplingSettings, prompt_length: int, element_size: int = 2) -> int:
    """Bytes that one more row takes while it is sampled: caches, and the logits of a step (float32 and a copy)."""
    draws = settings.task == "t2i"
    streams = 2 if draws and settings.guidance_scale != 1.0 else 1
    codes = config.vq_config.num_patches**2 if draws else 0
    positions = prompt_length + settings.max_text_length + codes + 1
    positions = -(-positions // SLOT_MULTIPLE) * SLOT_MULTIPLE  # as the decode engine rounds them
    vocabulary = config.text_config.vocab_size if settings.max_text_length else config.vq_config.num_embeddings
    return cache_bytes(config, positions, streams, element_size) + 3 * 4 * vocabulary


def out_of_memory_message(
    config: JanusConfig,
    settings: SamplingSettings,
    rows: int,
    prompt_length: int,
    free_bytes: int,
    element_size: int = 2,
) -> str:
    """Which `rollout_batch_size` was used, what a row takes, and which size would fit into `free_bytes`."""
    size = min(settings.batch_size or rows, rows)
    per_row = row_bytes(config, settings, prompt_length, element_size)
    fits = min(int(free_bytes * USABLE // per_row), size - 1)
    fits -= fits % settings.images_per_reasoning
    used = f"rollout_batch_size = {size}" + ("" if settings.batch_size else f" (unset: all {rows} rows at once)")
    said = (
        f"Out of memory in a rollout with {used}: a row takes about {per_row / 2**30:.2f} GiB and "
        f"{free_bytes / 2**30:.1f} GiB are free for rows. "
    )
    if fits >= 1:
        return said + f"rollout_batch_size: {fits} would fit."
    return said + (
        "Not even one row fits: use more GPUs under ZeRO-3, offload the optimizer (accelerate_configs/zero3_offload), "
        "or shorten max_reasoning_length or max_completion_length."
    )


def free_bytes(device: torch.device) -> int:
    """Bytes that new tensors could take on `device`, what PyTorch holds in reserve included; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    gc.collect()
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserve
