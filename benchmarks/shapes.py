"""Random models of real shapes, built in place: no download, no file."""

import torch
from transformers import GenerationConfig, JanusConfig, JanusProcessor, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from janus_trl.modeling import JanusForInterleavedGeneration, bind_special_ids
from janus_trl.tiny.processor import build_config, build_processor

# Language models of Janus-Pro (hidden, layers, heads, MLP); the vocabulary has 102,400 ids, the codebook 16,384.
SHAPES = {"1b": (2048, 24, 16, 5632), "7b": (4096, 30, 32, 11008)}


def random_model(
    kind: type[PreTrainedModel], config: PreTrainedConfig, device: str, dtype: torch.dtype
) -> PreTrainedModel:
    """A model of `kind`: matrices normal with deviation 0.02, the same at every call, norms that change nothing."""
    with torch.device(device), no_init_weights():
        torch.set_default_dtype(dtype)
        model = kind(config)
        torch.set_default_dtype(torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return model


def build(size: str, device: str, dtype: torch.dtype) -> tuple[JanusForInterleavedGeneration, JanusProcessor]:
    """A random model of `size` (`tiny`, `1b`, `7b`) and a processor whose ids it can use."""
    processor = build_processor()
    config = build_config(processor.tokenizer) if size == "tiny" else _config(size, processor)
    model = random_model(JanusForInterleavedGeneration, config, device, dtype)
    with torch.no_grad():
        # Embeddings of unit size and a head that is not flat, so that guidance and sampling have something to do.
        model.model.generation_head.vision_head.weight.mul_(3)
        model.model.language_model.embed_tokens.weight.mul_(50)
    ids = processor.tokenizer
    model.generation_config = GenerationConfig(
        pad_token_id=ids.pad_token_id,
        bos_token_id=ids.bos_token_id,
        eos_token_id=ids.eos_token_id,
        guidance_scale=5.0,
        do_sample=True,
        generation_kwargs={"boi_token_id": ids.convert_tokens_to_ids(processor.image_start_token)},
    )
    bind_special_ids(model, processor)
    return model.eval(), processor


def _config(size: str, processor: JanusProcessor) -> JanusConfig:
    hidden, layers, heads, mlp = SHAPES[size]
    ids = processor.tokenizer
    text = {
        "model_type": "llama",
        "vocab_size": 102400,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "pad_token_id": ids.pad_token_id,
        "bos_token_id": ids.bos_token_id,
        "eos_token_id": ids.eos_token_id,
    }
    vision = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 16,
        "num_image_tokens": 576,
        "projection_dim": hidden,
        "depth": 2,
    }
    vq = {"embed_dim": 8, "num_embeddings": 16384, "projection_dim": hidden, "image_token_embed_dim": hidden}
    return JanusConfig(
        text_config=text,
        vision_config=vision,
        vq_config=vq,
        image_token_id=ids.convert_tokens_to_ids(processor.image_token),
        tie_word_embeddings=False,
    )
