"""What a task trains: freezing, and a table that says so."""

from transformers import PreTrainedModel

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


def _size(parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # a ZeRO-3 shard reads as empty
