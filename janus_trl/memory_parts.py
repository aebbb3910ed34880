"""Sizes that a memory plan adds up: parameters by part, copies of weights, activations; no weights are loaded."""

from dataclasses import dataclass

import torch
from transformers import JanusConfig
from transformers.modeling_utils import set_zero3_state

from .modeling import VOCABULARY_CHUNK, JanusForInterleavedGeneration
from .script_arguments import PROJECTIONS
from .trainable import freeze_for_task

# Rows of a tile in TRL's log-prob kernel.
TOKEN_CHUNK = 4096
# Feature maps of the picture's full size that the VQ decoder holds at its peak: the residual, its norm, the activation,
# a convolution's input and output, and its workspace.
VQ_MAPS = 6


@dataclass(frozen=True)
class Parameters:
    """Counts of parameters, from the modules of a model on the meta device.

    Attributes:
        total: all, adapters left out.
        trained: those with a gradient; with LoRA the adapters alone.
        vq: of the image tokenizer.
        largest_trained: of the largest tensor with a gradient.
        decoded: of what the decode engine reads: language model, both heads, the table of code embeddings.
        fused: of the matrices that the engine fuses (q, k, v; gate, up).
        adapted: of the fused or single matrices that have an adapter.
        lora: of the adapters.
    """

    total: int
    trained: int
    vq: int
    largest_trained: int
    decoded: int
    fused: int
    adapted: int
    lora: int


def count_parameters(config: JanusConfig, task: str, text: bool, lora_rank: int = 0, lora_targets=()) -> Parameters:
    """Count what `task` trains; `text` says whether text is sampled, `lora_rank` 0 means full fine-tuning."""
    with torch.device("meta"), set_zero3_state():  # in a ZeRO-3 run transformers would shard the parts of the model
        model = JanusForInterleavedGeneration(config)
    freeze_for_task(model, task, text=text)
    lm, head = model.model.language_model, model.model.generation_head
    layer, layers = lm.layers[0], len(lm.layers)
    matrices = {name: getattr(layer.self_attn, name) for name in PROJECTIONS if hasattr(layer.self_attn, name)}
    matrices |= {name: getattr(layer.mlp, name) for name in PROJECTIONS if hasattr(layer.mlp, name)}
    sizes = {name: matrix.weight.numel() for name, matrix in matrices.items()}
    groups = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("down_proj",))
    targets = set(lora_targets or PROJECTIONS) if lora_rank else set()
    lora = sum(lora_rank * (m.in_features + m.out_features) for name, m in matrices.items() if name in targets)
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    codes = config.vq_config.num_embeddings * config.text_config.hidden_size
    decoded = [*lm.parameters(), *head.parameters(), *model.lm_head.parameters()]
    return Parameters(
        total=sum(p.numel() for p in model.parameters()),
        trained=layers * lora if lora_rank else sum(trained),
        vq=sum(p.numel() for p in model.model.vqmodel.parameters()),
        largest_trained=max(lora_rank * m.in_features for m in matrices.values()) if lora_rank else max(trained),
        decoded=sum(p.numel() for p in decoded) + codes,
        fused=layers * sum(sizes[name] for group in groups[:2] for name in group),
        adapted=layers * sum(sizes[name] for group in groups if targets & set(group) for name in group),
        lora=layers * lora,
    )


@dataclass(frozen=True)
class Batch:
    """One micro-batch of the replay.

    Attributes:
        rows: completions.
        streams: 2 with guidance.
        length: positions of prompt and completion.
        codes: image codes of a row.
        text: sampled text ids of a row and those that end it.
        hidden_bytes: of one element of the hidden states: 2, or 4 with float32 weights.
        lora_bytes: of one element of an adapter; 0 without.
        checkpointing: keep the input of each layer only.
        detach: the unconditional stream keeps nothing.
    """

    rows: int
    streams: int
    length: int
    codes: int
    text: int
    hidden_bytes: int = 2
    lora_bytes: int = 0
    checkpointing: bool = True
    detach: bool = False


def layer_bytes(config: JanusConfig, batch: Batch) -> int:
    """Bytes of one decoder layer for each token while its backward begins.

    Counted on transformers' Llama in bf16 (H: hidden size, I: MLP size, in bytes a token): two norms keep the float32
    input and normalised float32 value, its bf16 and the scaled output (2 x 12 H); attention keeps q, k, v, its output
    and the output's copy (10 H); the MLP's four tensors and their gradients are 11 I at their most. Adapters in float32
    keep bf16 copies of their inputs (10 H). Allocations of a Janus-Pro-1B with 2 and 4 layers, watched on a CPU, were
    within 1 % of it: 132 KB a token, 152 KB with float32 adapters.
    """
    text = config.text_config
    hidden, mlp = text.hidden_size, text.intermediate_size
    size = (24 + 10) * hidden + 11 * mlp
    if batch.lora_bytes == 4:
        size += 10 * hidden
    return size + (batch.hidden_bytes - 2) * 4 * hidden


def backbone_bytes(config: JanusConfig, batch: Batch) -> tuple[int, int]:
    """Bytes that wait for the backward, and those of the layer that is recomputed in it."""
    layers, hidden = config.text_config.num_hidden_layers, config.text_config.hidden_size
    tokens = batch.rows * batch.length * (1 if batch.detach else batch.streams)
    embeddings = 2 * tokens * hidden * batch.hidden_bytes  # each stream's, and both in one tensor
    layer = tokens * layer_bytes(config, batch)
    if not batch.checkpointing:
        return embeddings + layers * layer, 0
    return embeddings + layers * tokens * hidden * batch.hidden_bytes, layer


def heads_bytes(config: JanusConfig, batch: Batch, full: bool, text_head: bool) -> int:
    """Bytes of the heads at their largest: hidden states of scored positions, a tile, float32 weight gradients."""
    hidden, width = config.text_config.hidden_size, config.vq_config.image_token_embed_dim
    scored = batch.rows * batch.codes
    # Both streams: gathered, projected, activated (bf16); the float32 mix of guidance and its gradient.
    image = scored * (batch.streams * 2 * (hidden + 2 * width) + 5 * 4 * width)
    tile = min(max(scored, batch.rows * batch.text), TOKEN_CHUNK) * VOCABULARY_CHUNK * 2
    text = batch.rows * batch.text * hidden * (2 + 4)
    weights = 4 * config.vq_config.num_embeddings * width if full and scored else 0
    if full and text_head:
        weights = max(weights, 6 * config.text_config.vocab_size * hidden)  # and its bf16 copy
    return image + text + tile + weights


def forward_bytes(config: JanusConfig, batch: Batch) -> int:
    """Bytes of a forward without gradient: inputs, one layer's largest tensors, hidden states."""
    tokens = batch.rows * batch.streams * batch.length
    text = config.text_config
    return tokens * (4 * batch.hidden_bytes * text.hidden_size + 8 * text.hidden_size + 6 * text.intermediate_size)


def vq_decoding_bytes(config: JanusConfig, pictures: int, element_size: int = 4) -> int:
    """Bytes of decoding `pictures` at a time: maps of full size, with the channels of the last level."""
    vq = config.vq_config
    side = vq.num_patches * 2 ** (len(vq.channel_multiplier) - 1)
    return VQ_MAPS * pictures * vq.base_channels * vq.channel_multiplier[0] * side**2 * element_size


def vision_bytes(config: JanusConfig, pictures: int, trained: bool) -> int:
    """Bytes of the vision tower for `pictures` different ones: a checkpoint of each layer and one layer's tensors."""
    vision = config.vision_config
    tokens = pictures * (vision.image_size // vision.patch_size) ** 2
    kept = 2 * vision.hidden_size * vision.num_hidden_layers if trained else 0
    return int(tokens * (kept + 2 * vision.hidden_size * (12 + 4 * vision.mlp_ratio)))
