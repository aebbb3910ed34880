"""Original-layout checkpoints for tests: a random stock model with the published names, and the published loop."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import JanusConfig, JanusForConditionalGeneration, LlamaConfig, LlamaForCausalLM

from tests.tiny import BOI, BOS, EOS, PAD, PLACEHOLDER, build_processor

# (language_config, vision blocks, aligner depth, generation aligner depth, VQ levels). 7B differs from 1B in the width
# of everything behind the towers and in the number of layers; here also in depth, grouped heads and missing defaults.
SHAPES = {
    "1b": ({"hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 4}, 1, 2, 2, [1, 1, 1]),
    "7b": ({"hidden_size": 64, "num_hidden_layers": 3, "num_key_value_heads": 2}, 2, 3, 3, [1, 2]),
}


def original_config(shape: str, vocabulary: int) -> dict:
    """`config.json` as published, with small sizes."""
    language, _, depth, generation_depth, _ = SHAPES[shape]
    width = language["hidden_size"]
    language = {
        "model_type": "llama", "vocab_size": vocabulary, "intermediate_size": 2 * width, "num_attention_heads": 4,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
        "_attn_implementation": "flash_attention_2", **language,
    }  # fmt: skip

    def section(kind: str, cls: str, **params) -> dict:
        return {"cls": cls, "model_type": kind, "params": params}

    mlp = {"projector_type": "mlp_gelu", "n_embed": width}
    return {
        "architectures": ["MultiModalityCausalLM"], "model_type": "multi_modality", "torch_dtype": "bfloat16",
        "language_config": language,
        "vision_config": section("vision", "CLIPVisionTower", image_size=16, model_name="siglip_large_patch16_384",
                                 select_feature="same", select_layer=-1),
        "aligner_config": section("aligner", "MlpProjector", depth=depth, input_dim=32, **mlp),
        "gen_vision_config": section("gen_vision", "VQ-16", image_token_size=24, n_embed=8),
        "gen_aligner_config": section("gen_aligner", "MlpProjector", depth=generation_depth, input_dim=8, **mlp),
        "gen_head_config": section("gen_head", "vision_head", image_token_embed=width, image_token_size=24,
                                   n_embed=width),
    }  # fmt: skip


def published_config(language: dict, width: int) -> dict:
    """`config.json` of Janus-Pro at its real sizes; what a width leaves to the defaults of Llama is not written."""
    config = original_config("1b", 102400)
    config["language_config"] = {
        "model_type": "llama",
        "max_position_embeddings": 16384,
        "vocab_size": 102400,
    } | language
    config["vision_config"]["params"]["image_size"] = 384
    for name in ("aligner_config", "gen_aligner_config", "gen_head_config"):
        config[name]["params"]["n_embed"] = width
    config["gen_vision_config"]["params"]["image_token_size"] = 16384
    config["gen_head_config"]["params"] |= {"image_token_size": 16384, "image_token_embed": width}
    return config


def stock_model(shape: str, vocabulary: int, seed: int = 0) -> JanusForConditionalGeneration:
    """The model that a conversion has to give: written down beside the conversion, not derived from it."""
    language, blocks, depth, generation_depth, levels = SHAPES[shape]
    width = language["hidden_size"]
    ids = build_processor().tokenizer
    special = {"pad_token_id": ids.pad_token_id, "bos_token_id": ids.bos_token_id, "eos_token_id": ids.eos_token_id}
    text = {
        "model_type": "llama", "vocab_size": vocabulary, "intermediate_size": 2 * width, "num_attention_heads": 4,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **special, **language,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "num_hidden_layers": blocks, "num_attention_heads": 16, "image_size": 16, "patch_size": 4,
        "projection_dim": width, "num_image_tokens": 16, "mlp_ratio": 2.0, "depth": depth,
    }  # fmt: skip
    vq = {
        "embed_dim": 8, "num_embeddings": 24, "latent_channels": 16, "base_channels": 32, "num_res_blocks": 1,
        "channel_multiplier": levels, "projection_dim": width, "image_token_embed_dim": width,
        "num_hidden_layers": generation_depth,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = JanusConfig(
        text_config=text, vision_config=vision, vq_config=vq, tie_word_embeddings=False,
        image_token_id=ids.convert_tokens_to_ids(PLACEHOLDER),
    )  # fmt: skip
    model = JanusForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.5 if parameter.ndim > 1 else 0.05
            parameter.copy_((parameter if parameter.ndim == 1 else 0) + spread * torch.randn_like(parameter))
    return model.eval()


def original_names(model: JanusForConditionalGeneration) -> dict[str, torch.Tensor]:
    """The weights of a stock model under their published names, written as the published modules have them."""
    found, state = {}, dict(model.state_dict())
    for name, tensor in state.items():
        if match := re.fullmatch(r"model\.vision_model\.encoder\.layers\.(\d+)\.self_attn\.q_proj\.(\w+)", name):
            parts = [state[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            found[f"vision_model.vision_tower.blocks.{match[1]}.attn.qkv.{match[2]}"] = torch.cat(parts)
        elif not re.search(r"vision_model.*\.[kv]_proj\.", name):
            found[_original_name(name)] = tensor
    position = "vision_model.vision_tower.pos_embed"
    found[position] = found[position].unsqueeze(0)
    width = found["vision_model.vision_tower.norm.weight"].shape[0]
    unused = {
        "gen_vision_model.quantize.codebook_used": torch.zeros(64),
        "vision_model.vision_tower.attn_pool.latent": torch.ones(1, 1, width),
        "vision_model.vision_tower.attn_pool.q.weight": torch.ones(width, width),
        "language_model.model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    return {**found, **unused}


def _original_name(name: str) -> str:
    exact = {
        "lm_head.weight": "language_model.lm_head.weight",
        "model.vision_model.embeddings.position_embedding.weight": "vision_model.vision_tower.pos_embed",
    }
    if name in exact:
        return exact[name]
    for ours, theirs in (
        ("model.language_model.", "language_model.model."),
        ("model.generation_embeddings.", "gen_embed."),
        ("model.generation_head.proj_out.", "gen_head.output_mlp_projector."),
        ("model.generation_head.", "gen_head."),
        ("model.generation_aligner.", "gen_aligner."),
        ("model.aligner.", "aligner."),
        ("model.vqmodel.", "gen_vision_model."),
        ("model.vision_model.embeddings.patch_embedding.", "vision_model.vision_tower.patch_embed.proj."),
        ("model.vision_model.post_layernorm.", "vision_model.vision_tower.norm."),
        ("model.vision_model.encoder.layers.", "vision_model.vision_tower.blocks."),
    ):
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
            break
    name = name.replace("aligner.fc1.", "aligner.layers.0.")
    name = re.sub(r"hidden_layers\.(\d+)", lambda m: f"layers.{2 * int(m[1]) + 2}", name)
    if name.startswith("gen_vision_model."):
        name = name.replace("encoder.down", "encoder.conv_blocks").replace("decoder.up.", "decoder.conv_blocks.")
        name = name.replace(".block.", ".res.").replace("mid.block_1", "mid.0").replace("mid.attn_1", "mid.1")
        return name.replace("mid.block_2", "mid.2")
    if name.startswith("vision_model."):
        name = name.replace("self_attn.projection_layer", "attn.proj").replace("layer_norm", "norm")
    return name


def save_original(folder: Path, shape: str, form: str = "safetensors", change=None) -> JanusForConditionalGeneration:
    """Write an original-layout folder and return the stock model that it stands for.

    Args:
        form: `safetensors`, `bin`, `bin_shards` or `safetensors_shards`.
        change: called with the weights before they are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processor = build_processor()
    model = stock_model(shape, len(processor.tokenizer)).to(torch.bfloat16)
    names = original_names(model)
    if change:
        change(names)
    (folder / "config.json").write_text(json.dumps(original_config(shape, len(processor.tokenizer))))
    save_weights(folder, names, form)
    backend = json.loads(processor.tokenizer.backend_tokenizer.to_str())
    backend["post_processor"] = None  # as published: the class of the tokenizer adds bos
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    tokens = {"bos_token": BOS, "eos_token": {"content": EOS, "lstrip": False}, "pad_token": None}
    settings = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "model_max_length": 16384, **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    extra = [PLACEHOLDER, "<|User|>", "<|Assistant|>"]
    (folder / "special_tokens_map.json").write_text(json.dumps({**tokens, "additional_special_tokens": extra}))
    images = {"image_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "min_size": 2, "do_normalize": True}
    (folder / "preprocessor_config.json").write_text(json.dumps({**images, "rescale_factor": 1 / 255}))
    return model


def save_weights(folder: Path, names: dict[str, torch.Tensor], form: str) -> None:
    """One file, or three with an index."""
    stem, suffix = ("model", "safetensors") if form.startswith("safetensors") else ("pytorch_model", "bin")
    write = save_file if suffix == "safetensors" else torch.save
    names = {name: tensor.clone().contiguous() for name, tensor in names.items()}
    if not form.endswith("shards"):
        write(names, folder / f"{stem}.{suffix}")
        return
    where, keys = {}, sorted(names)
    for i in range(3):
        file = f"{stem}-{i + 1:05d}-of-00003.{suffix}"
        write({key: names[key] for key in keys[i::3]}, folder / file)
        where |= dict.fromkeys(keys[i::3], file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": where}))


class PublishedModel(nn.Module):
    """The generating half of the published model, under its own names (language model, image tables and head)."""

    def __init__(self, config: dict):
        super().__init__()
        head, vision = config["gen_head_config"]["params"], config["gen_vision_config"]["params"]
        width = head["n_embed"]
        language = {k: v for k, v in config["language_config"].items() if k not in ("torch_dtype",) and k[0] != "_"}
        self.language_model = LlamaForCausalLM(LlamaConfig(**language, tie_word_embeddings=False))
        self.gen_embed = nn.Embedding(vision["image_token_size"], vision["n_embed"])
        self.gen_aligner = nn.ModuleDict({"layers": self._mlp(config["gen_aligner_config"]["params"])})
        self.gen_head = nn.ModuleDict(
            {
                "output_mlp_projector": nn.Linear(width, head["image_token_embed"]),
                "vision_head": nn.Linear(head["image_token_embed"], head["image_token_size"]),
            }
        )

    @staticmethod
    def _mlp(params: dict) -> nn.Sequential:
        layers: list[nn.Module] = [nn.Linear(params["input_dim"], params["n_embed"])]
        for _ in range(1, params["depth"]):
            layers += [nn.GELU(), nn.Linear(params["n_embed"], params["n_embed"])]
        return nn.Sequential(*layers)

    def load(self, names: dict[str, torch.Tensor]) -> "PublishedModel":
        """Take the weights of an original checkpoint in float32; the parts that this class lacks are left out."""
        parts = ("language_model.", "gen_embed.", "gen_aligner.", "gen_head.")
        ours = {k: v.float() for k, v in names.items() if k.startswith(parts) and "inv_freq" not in k}
        self.load_state_dict(ours, strict=True)
        return self.eval()

    @torch.no_grad()
    def greedy_codes(self, input_ids: list[int], pad: int, count: int, guidance: float) -> list[int]:
        """The loop of `generation_inference.py`, likeliest code each time: even rows conditional, odd rows not."""
        tokens = torch.tensor([input_ids, input_ids])
        tokens[1, 1:-1] = pad
        embeds, cache, codes = self.language_model.get_input_embeddings()(tokens), None, []
        for _ in range(count):
            out = self.language_model.model(inputs_embeds=embeds, use_cache=True, cache=cache)
            cache = out.cache
            hidden = self.gen_head["output_mlp_projector"](out.last_hidden_state[:, -1])
            logits = self.gen_head["vision_head"](nn.functional.gelu(hidden))
            code = (logits[1] + guidance * (logits[0] - logits[1])).argmax()
            codes.append(code.item())
            embeds = self.gen_aligner["layers"](self.gen_embed(code)).expand(2, 1, -1)
        return codes


def prompt_ids(text: str) -> list[int]:
    """The published prompt of a picture: bos, the turn, `<begin_of_image>`."""
    tokenizer = build_processor().tokenizer
    return tokenizer(f"<|User|>: {text}\n\n<|Assistant|>:{BOI}")["input_ids"]


def pad_id() -> int:
    return build_processor().tokenizer.convert_tokens_to_ids(PAD)
