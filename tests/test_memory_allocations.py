"""Planned activations against what a backward allocates."""

import weakref

import pytest
import torch
from peft import get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import JanusConfig

from janus_trl import memory_parts as parts
from janus_trl.modeling import JanusForInterleavedGeneration, bind_special_ids
from tests.grpo import lora
from tests.joint import score
from tests.tiny import build_config, build_processor


class Live(TorchDispatchMode):
    """Bytes of the storages that operations made and that are alive, and the most there were."""

    def __init__(self, known):
        super().__init__()
        self.live = self.peak = 0
        self.kept = [tensor.untyped_storage() for tensor in known]
        self.seen = WeakIdKeyDictionary({storage: None for storage in self.kept})

    def _free(self, size: int) -> None:
        self.live -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage() not in self.seen:
                storage = leaf.untyped_storage()
                self.seen[storage] = None
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out


def wide_config(layers: int) -> JanusConfig:
    config = build_config(build_processor())
    text, width = config.text_config, 256
    text.hidden_size = config.vq_config.projection_dim = config.vq_config.image_token_embed_dim = width
    config.vision_config.projection_dim = width
    text.intermediate_size, text.num_hidden_layers, text.vocab_size = 704, layers, 128
    return config


def backward_peak(layers: int, rows: int = 8) -> tuple[int, int]:
    """Peak of a backward in bf16 with adapters and checkpoints above weights and gradients, and what is planned."""
    torch.manual_seed(0)
    processor, config = build_processor(), wide_config(layers)
    model = JanusForInterleavedGeneration(config).to(torch.bfloat16)
    ids = processor.tokenizer
    generation = model.generation_config
    generation.pad_token_id, generation.bos_token_id, generation.eos_token_id = ids.pad_token_id, ids.bos_token_id, 2
    bind_special_ids(model, processor)
    peft = get_peft_model(model, lora(), autocast_adapter_dtype=False)
    peft.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    peft.train()
    codes = model.vocab_size + torch.randint(0, 16, (rows, 16))
    batch = torch.cat([torch.randint(10, 100, (rows, 48)), codes], 1)
    labels = batch.clone()
    labels[:, :48] = -100
    watch = Live([*peft.parameters(), *peft.buffers()])
    with watch, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = score(peft, batch, torch.ones_like(batch), labels, guidance_scale=5.0).loss
    watch.peak = 0
    with watch:
        loss.backward()
    size = parts.Batch(rows, 2, batch.shape[1], 16, 0, lora_bytes=2)
    return watch.peak, sum(parts.backbone_bytes(config, size))


def test_planned_activations_are_those_that_a_backward_allocates():
    (few, planned_few), (many, planned_many) = map(backward_peak, (2, 6))
    assert planned_few == pytest.approx(few, rel=0.15)
    assert planned_many - planned_few == pytest.approx(many - few, rel=0.15)  # a checkpoint a layer
