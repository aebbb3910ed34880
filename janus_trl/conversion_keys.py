"""Original DeepSeek checkpoints (`model_type: multi_modality`) in the terms of transformers: names, shapes, sizes.

The original modules are those of github.com/deepseek-ai/Janus (`janus/models`); transformers names and sizes are those
of `models/janus`. Sizes that the original configuration leaves to its code (widths of the vision tower, levels of the
VQ model) are read off the weights, and every weight is then checked against the model that the configuration builds.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import JanusConfig, JanusForConditionalGeneration, LlamaConfig

from .config_checks import did_you_mean

# Heads of the SigLIP towers: the one size that neither the original configuration nor a shape tells.
VISION_HEADS = {"siglip_large_patch16_384": 16, "siglip_so400m_patch14_384": 16, "siglip_so400m_patch14_224": 16}
CONFIG_SECTIONS = (
    "language_config",
    "vision_config",
    "aligner_config",
    "gen_vision_config",
    "gen_aligner_config",
    "gen_head_config",
)
LM_HEAD = "language_model.lm_head.weight"

# Weights without a use: usage statistics of the codebook, the pooled output of SigLIP, tables of old transformers.
_DROPPED = re.compile(
    r"gen_vision_model\.quantize\.codebook_used"
    r"|vision_model\.vision_tower\.attn_pool\..+"
    r"|language_model\.model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)
# Original prefix -> transformers prefix, and the replacements behind it, in order.
_PARTS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "language_model.model.": ("model.language_model.", ()),
    "language_model.lm_head.": ("lm_head.", ()),
    "gen_embed.": ("model.generation_embeddings.", ()),
    "gen_head.": ("model.generation_head.", ((r"^output_mlp_projector\.", "proj_out."),)),
    "gen_aligner.": ("model.generation_aligner.", ()),
    "aligner.": ("model.aligner.", ()),
    "gen_vision_model.": (
        "model.vqmodel.",
        (
            (r"^encoder\.conv_blocks\.", "encoder.down."),
            (r"^decoder\.conv_blocks\.", "decoder.up."),
            (r"^((?:encoder|decoder)\.(?:down|up)\.\d+)\.res\.", r"\1.block."),
            (r"^((?:encoder|decoder)\.mid)\.0\.", r"\1.block_1."),
            (r"^((?:encoder|decoder)\.mid)\.1\.", r"\1.attn_1."),
            (r"^((?:encoder|decoder)\.mid)\.2\.", r"\1.block_2."),
        ),
    ),
    "vision_model.vision_tower.": (
        "model.vision_model.",
        (
            (r"^pos_embed$", "embeddings.position_embedding.weight"),
            (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
            (r"^norm\.", "post_layernorm."),
            (r"^blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.self_attn.projection_layer."),
            (r"^blocks\.(\d+)\.attn\.", r"encoder.layers.\1.self_attn."),
            (r"^blocks\.(\d+)\.norm([12])\.", r"encoder.layers.\1.layer_norm\2."),
            (r"^blocks\.(\d+)\.", r"encoder.layers.\1."),
        ),
    ),
}


def converted_name(name: str) -> str | None:
    """The transformers name of an original weight; None if it has no use there.

    A fused `qkv` keeps that part of its name: see `converted_tensors`. A name that is not known comes back unchanged,
    and the check against the model names it.
    """
    if _DROPPED.fullmatch(name):
        return None
    for prefix, (ours, replacements) in _PARTS.items():
        if not name.startswith(prefix):
            continue
        rest = name.removeprefix(prefix)
        if prefix.endswith("aligner."):
            rest = re.sub(r"^layers\.(\d+)\.", _aligner_layer, rest)
        for pattern, replacement in replacements:
            rest = re.sub(pattern, replacement, rest)
        return ours + rest
    return name


def _aligner_layer(match: re.Match) -> str:
    """An aligner is Linear, then GELU and Linear again and again: the even places have weights."""
    place = int(match[1])
    if place % 2:
        return match[0]
    return f"hidden_layers.{place // 2 - 1}." if place else "fc1."


def converted_tensors(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What an original weight becomes: nothing, one weight, or `q`, `k`, `v` `[D, …]` of a fused `[3 D, …]`."""
    ours = converted_name(name)
    if ours is None:
        return {}
    if re.search(r"\.self_attn\.qkv\.", ours):
        return {ours.replace(".qkv.", f".{part}_proj."): chunk for part, chunk in zip("qkv", tensor.chunk(3))}
    if ours.endswith("embeddings.position_embedding.weight"):
        return {ours: tensor.squeeze(0)}  # [1, N, D]
    return {ours: tensor}


def converted_config(original: Mapping[str, Any], weights: Mapping[str, torch.Tensor], ids: dict) -> JanusConfig:
    """The configuration of the model.

    Args:
        original: `config.json` of the original.
        weights: its weights by name; only their shapes are looked at, so meta tensors do.
        ids: `pad`, `bos`, `eos` and `image` ids of the tokenizer.

    Raises:
        ValueError: a section or size is missing, or the original has parts that transformers' Janus has not.
    """
    params = _checked_sections(original)
    language = {k: v for k, v in original["language_config"].items() if k not in ("torch_dtype", "dtype")}
    language = {k: v for k, v in language.items() if not k.startswith("_")}
    tied = LM_HEAD not in weights  # what the checkpoint holds decides, not what a configuration says
    special = {"pad_token_id": ids["pad"], "bos_token_id": ids["bos"], "eos_token_id": ids["eos"]}
    text = LlamaConfig(**{**language, **special, "tie_word_embeddings": tied})
    return JanusConfig(
        text_config=text.to_dict(),
        vision_config=_vision_config(params, weights),
        vq_config=_vq_config(params, weights),
        image_token_id=ids["image"],
        tie_word_embeddings=tied,
        **special,
    )


def _checked_sections(original: Mapping[str, Any]) -> dict[str, dict]:
    """The `params` of each section; the projectors are two-way MLPs and the towers known ones."""
    if missing := [name for name in CONFIG_SECTIONS if name not in original]:
        raise ValueError(
            f"config.json lacks {', '.join(missing)}: it is no Janus or Janus-Pro (JanusFlow is another model, which "
            "transformers does not have)."
        )
    params = {name: original[name].get("params", {}) for name in CONFIG_SECTIONS[1:]}
    for name in ("aligner_config", "gen_aligner_config"):
        kind = params[name].get("projector_type", "mlp_gelu")
        if kind != "mlp_gelu":
            raise ValueError(f"{name}.params.projector_type = {kind!r}; only 'mlp_gelu' exists in transformers' Janus.")
    tower = params["vision_config"].get("model_name")
    if tower not in VISION_HEADS:
        known = ", ".join(VISION_HEADS)
        raise ValueError(
            f"vision_config.params.model_name = {tower!r} must be one of: {known}.{did_you_mean(tower, VISION_HEADS)}"
        )
    return params


def vision_sizes(original: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Width of an input picture and of a patch, in pixels.

    Raises:
        ValueError: the configuration or the weights do not tell.
    """
    size = original.get("vision_config", {}).get("params", {}).get("image_size")
    if not isinstance(size, int):
        raise ValueError(f"config.json: vision_config.params.image_size is {size!r}; it must be a number of pixels.")
    return size, _shape(weights, "vision_model.vision_tower.patch_embed.proj.weight")[-1]


def _vision_config(params: dict[str, dict], weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    tower = "vision_model.vision_tower."
    width, channels, patch, _ = _shape(weights, f"{tower}patch_embed.proj.weight")
    size, aligner = params["vision_config"]["image_size"], params["aligner_config"]
    return {
        "hidden_size": width,
        "num_hidden_layers": _count(weights, rf"{re.escape(tower)}blocks\.(\d+)\."),
        "num_attention_heads": VISION_HEADS[params["vision_config"]["model_name"]],
        "mlp_ratio": _shape(weights, f"{tower}blocks.0.mlp.fc1.weight")[0] / width,
        "num_channels": channels,
        "patch_size": patch,
        "image_size": size,
        "num_image_tokens": (size // patch) ** 2,
        "projection_dim": aligner["n_embed"],
        "depth": aligner["depth"],
    }


def _vq_config(params: dict[str, dict], weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    encoder = "gen_vision_model.encoder."
    base, channels = _shape(weights, f"{encoder}conv_in.weight")[:2]
    levels = _count(weights, rf"{re.escape(encoder)}conv_blocks\.(\d+)\.")
    outputs = [_shape(weights, f"{encoder}conv_blocks.{i}.res.0.conv2.weight")[0] for i in range(levels)]
    return {
        "embed_dim": params["gen_vision_config"]["n_embed"],
        "num_embeddings": params["gen_vision_config"]["image_token_size"],
        "latent_channels": _shape(weights, f"{encoder}conv_out.weight")[0],
        "in_channels": channels,
        "out_channels": channels,
        "base_channels": base,
        "channel_multiplier": [width // base for width in outputs],
        "num_res_blocks": _count(weights, rf"{re.escape(encoder)}conv_blocks\.0\.res\.(\d+)\."),
        "projection_dim": params["gen_aligner_config"]["n_embed"],
        "num_hidden_layers": params["gen_aligner_config"]["depth"],
        "image_token_embed_dim": params["gen_head_config"]["n_embed"],
    }


def _shape(weights: Mapping[str, torch.Tensor], name: str) -> tuple[int, ...]:
    if name not in weights:
        raise ValueError(f"The checkpoint lacks {name}, so it does not hold a whole Janus.")
    return tuple(weights[name].shape)


def _count(weights: Mapping[str, torch.Tensor], pattern: str) -> int:
    """Number of different indices that group 1 of `pattern` takes."""
    return len({match[1] for name in weights if (match := re.match(pattern, name))})


def check_weights(config: JanusConfig, converted: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights that are not exactly those of the model that `config` builds; nothing is allocated.

    Raises:
        ValueError: naming the first missing, unexpected or misshapen weights.
    """
    with torch.device("meta"):
        expected = JanusForConditionalGeneration(config).state_dict()
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    misshapen = [
        f"{name} {list(converted[name].shape)} instead of {list(expected[name].shape)}"
        for name in sorted(expected.keys() & converted.keys())
        if converted[name].shape != expected[name].shape
    ]
    found = {
        "missing": sorted(expected.keys() - converted.keys()),
        "unexpected": sorted(converted.keys() - expected.keys()),
        "misshapen": misshapen,
    }
    if any(found.values()):
        lines = [f"{len(names)} {kind}, the first: {', '.join(names[:3])}" for kind, names in found.items() if names]
        raise ValueError(f"The weights are not those of the model in config.json: {'; '.join(lines)}.")
