"""What a task trains: freezing, and a table that says so."""

import logging

import torch
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# Sub-modules of `JanusModel` that a task gives no gradient: left trainable they cost optimizer state and stop DDP.
_UNUSED = {
    "t2i": ("vqmodel", "vision_model", "aligner"),
    "i2t": ("vqmodel", "generation_embeddings", "generation_aligner", "generation_head"),
    "both": ("vqmodel",),
}
_PARTS = (
    "language_model",
    "generation_embeddings",
    "generation_aligner",
    "generation_head",
    "vision_model",
    "aligner",
    "vqmodel",
)


def freeze_for_task(model: PreTrainedModel, task: str, with_adapter: bool = False, text: bool = True) -> None:
    """Freeze what `task` (`t2i`, `i2t`, `both`) does not train; with an adapter PEFT froze all else already.

    Without sampled `text` (`t2i` that opens the image at once) the text head gets no gradient either: 0.4 of the 7 G
    parameters of Janus-Pro-7B. Where it is tied to the embeddings it trains with them.
    """
    if with_adapter:
        return
    for name in _UNUSED[task]:
        getattr(model.model, name).requires_grad_(False)
    if not text and model.lm_head.weight is not model.get_input_embeddings().weight:
        model.lm_head.requires_grad_(False)


def trainable_table(model: PreTrainedModel) -> str:
    """One line per part of the model: name, parameters, and trained, LoRA or frozen."""
    lines = [f"{'module':<24}{'parameters':>15}  state"]
    for name, module in [*((part, getattr(model.model, part)) for part in _PARTS), ("lm_head", model.lm_head)]:
        named = list(module.named_parameters())
        total = sum(_size(p) for _, p in named)
        trained = sum(_size(p) for _, p in named if p.requires_grad)
        lora = any("lora_" in key for key, _ in named)
        state = f"LoRA ({trained:,} trained)" if lora else "trained" if trained else "frozen"
        lines.append(f"{name:<24}{total:>15,}  {state}")
    return "\n".join(lines)


def report_trained(model: PreTrainedModel, learning_rate: float, has_master_weights: bool) -> None:
    """Print `trainable_table`, and warn of `lost_updates`."""
    print(trainable_table(model))
    if not has_master_weights and (warning := lost_updates(model, learning_rate)):
        logger.warning(warning)


def lost_updates(model: PreTrainedModel, learning_rate: float) -> str | None:
    """Why a run without float32 master weights will not learn, or None.

    A step of AdamW moves a weight by about the learning rate. Beside a 16-bit weight that is less than half the gap to
    the next one, it is rounded away (Micikevicius et al. 2018, arXiv 1710.03740, section 3.1).
    """
    low = [p.detach() for p in model.parameters() if p.requires_grad and p.element_size() == 2]
    if not low:
        return None
    mean = sum(p.abs().sum(dtype=torch.float32).item() for p in low) / sum(p.numel() for p in low)
    half_gap = mean * torch.finfo(low[0].dtype).eps / 4  # of a value in the middle of its binade, at least
    if learning_rate >= half_gap:
        return None
    kind = str(low[0].dtype).removeprefix("torch.")
    return (
        f"learning_rate = {learning_rate:g}, but the trained weights are {kind}, {mean:.2g} in the mean, and steps "
        f"below {half_gap:.1g} are rounded away: this run will learn next to nothing. Set dtype: float32, train an "
        "adapter (use_peft: true), or launch with accelerate_configs/zero2.yaml or zero3.yaml, where DeepSpeed keeps "
        "float32 copies."
    )


def _size(parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # a ZeRO-3 shard reads as empty
