"""Merge an adapter into its base in float32, and measure that the result is base + adapter.

bfloat16 rounds the sum of a weight and a small update to the weight itself (peft#1035, peft#2502): the sum is formed in
float32, and rounded once, at the end, if a smaller dtype is asked for.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import JanusProcessor

from .modeling import JanusForInterleavedGeneration, bind_special_ids
from .prompts import encode_prompts
from .sampling import SamplingSettings, rollout
from .weight_files import ADAPTER

PROMPT = "A red cat on a blue chair."


@dataclass
class Probe:
    """What a model answers to one prompt: logits of text `[P, V]` and of codes `[N, C]`, greedy codes and text."""

    text_logits: torch.Tensor
    image_logits: torch.Tensor
    codes: list[int]
    text: list[int]


@torch.no_grad()
def probe(model: JanusForInterleavedGeneration, processor: JanusProcessor, codes: list[int] | None = None) -> Probe:
    """Greedy completions of a fixed prompt, and logits; those of codes along `codes` (the greedy ones if None)."""
    greedy = {"greedy": True, "guidance_scale": 1.0}
    drawn = rollout(model, processor, [PROMPT], SamplingSettings("t2i", 0, **greedy), [0])
    answer = rollout(model, processor, [PROMPT], SamplingSettings("i2t", 8, **greedy), [0])
    own = [i - model.vocab_size for i in drawn.completion_ids[0] if i >= model.vocab_size]
    prompt = encode_prompts(processor, [PROMPT], draws=True)["input_ids"].to(model.device)
    joint = torch.tensor([[i + model.vocab_size for i in codes or own]], device=model.device)
    opened = torch.full_like(prompt[:, :1], model.special_ids.begin_of_image)
    embeds = model.embed_joint_ids(torch.cat([prompt, opened, joint[:, :-1]], 1))
    hidden = model.model.language_model(inputs_embeds=embeds).last_hidden_state[0]  # [P + N, H]
    image = model.model.generation_head(hidden[prompt.shape[1] :])
    text = model.lm_head(hidden[: prompt.shape[1]])
    return Probe(text.float().cpu(), image.float().cpu(), own, answer.completion_ids[0])


@dataclass
class Comparison:
    """How far two models are apart on one prompt."""

    text: float
    image: float
    same_codes: bool
    same_text: bool

    def __str__(self) -> str:
        codes, text = ("equal" if same else "DIFFERENT" for same in (self.same_codes, self.same_text))
        return (
            f"max logit difference {self.text:.2g} (text), {self.image:.2g} (image); greedy image codes {codes}, "
            f"greedy text {text}"
        )


def compare(a: Probe, b: Probe) -> Comparison:
    """Largest differences of logits, and whether the greedy completions are equal."""
    image = (a.image_logits - b.image_logits).abs().max().item()
    return Comparison((a.text_logits - b.text_logits).abs().max().item(), image, a.codes == b.codes, a.text == b.text)


def load_adapter(base: nn.Module, folder: str | Path) -> PeftModel:
    """The adapter on its base, strictly: PEFT only warns of keys that match nothing (peft#1579).

    Raises:
        ValueError: keys of the file are unknown to the model, or the model has some that the file lacks.
    """
    model = PeftModel.from_pretrained(base, str(folder))
    wanted, found = set(get_peft_model_state_dict(model)), set(load_file(Path(folder) / ADAPTER))
    if wanted != found:
        lacking, surplus = sorted(wanted - found), sorted(found - wanted)
        raise ValueError(
            f"{folder}: {len(lacking)} keys of the adapter are missing {lacking[:1]} and {len(surplus)} are unknown "
            f"{surplus[:1]}. It belongs to another model, or its file has changed; nothing was merged."
        )
    return model


def merge_into_base(model: PeftModel) -> JanusForInterleavedGeneration:
    """The base with the adapter added to its weights.

    Raises:
        ValueError: a target module with an adapter that is not 0 has the weight that it had before.
    """
    before, active = {}, []
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "lora_B") and hasattr(module, "base_layer"):
            before[name] = module.base_layer.weight.detach().clone()
            if any(layer.weight.detach().any() for layer in module.lora_B.values()):
                active.append(name)
    merged = model.merge_and_unload(safe_merge=True)
    modules = dict(merged.named_modules())
    unchanged = [name for name in active if torch.equal(modules[name].weight, before[name])]
    if unchanged:
        raise ValueError(f"{len(unchanged)} of {len(active)} modules did not change by merging, e.g. {unchanged[0]}.")
    return merged


def merge(adapter: str, base: str, output_dir: str, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    """Merge, save a stock Janus folder with its processor, read it again, and compare.

    Returns:
        Comparisons with base + adapter: of the merge in float32, and of the saved folder.
    """
    processor = JanusProcessor.from_pretrained(adapter if _has_processor(adapter) else base)
    janus = JanusForInterleavedGeneration.from_pretrained(base, dtype=torch.float32).to(device).eval()
    bind_special_ids(janus, processor)
    model = load_adapter(janus, adapter).eval()
    expected = probe(model.get_base_model(), processor)
    merged = merge_into_base(model)
    exact = compare(expected, probe(merged, processor, expected.codes))
    merged.to(dtype).save_pretrained(output_dir)
    processor.save_pretrained(output_dir)
    again = JanusForInterleavedGeneration.from_pretrained(output_dir, dtype=dtype).to(device).eval()
    bind_special_ids(again, processor)
    return exact, compare(expected, probe(again, processor, expected.codes))


def _has_processor(folder: str) -> bool:
    return (Path(folder) / "processor_config.json").is_file()
