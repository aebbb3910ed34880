"""Builds the random Janus of the tests: 0.4 M parameters, 16 codes, real special-token names and template."""

import string

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusImageProcessor,
    JanusProcessor,
    PreTrainedTokenizerFast,
)

PAD, BOS, EOS = "<｜▁pad▁｜>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
BOI, EOI, PLACEHOLDER = "<begin_of_image>", "<end_of_image>", "<image_placeholder>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|User|>: ' if m.role == 'user' else '<|Assistant|>: ' }}"
    "{% for c in m.content %}{% if c.type == 'image' %}<image_placeholder>\n{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{{ '\n\n' }}{% endfor %}{% if add_generation_prompt %}<|Assistant|>:{% endif %}"
)


def build_processor(specials: tuple[str, ...] = (PAD, BOS, EOS, PLACEHOLDER, BOI, EOI)) -> JanusProcessor:
    """A letter-level processor; the order of `specials` sets their ids."""
    tokens = [*specials, "<|User|>", "<|Assistant|>", "<unk>", *string.printable]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token="<unk>",
        padding_side="left",
        additional_special_tokens=["<|User|>", "<|Assistant|>"],
        extra_special_tokens={"image_token": PLACEHOLDER, "boi_token": BOI, "eoi_token": EOI},
    )
    images = JanusImageProcessor(
        size={"height": 16, "width": 16}, min_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return JanusProcessor(images, fast, chat_template=TEMPLATE, num_image_tokens=16)


def build_config(processor: JanusProcessor, codebook: int = 16, tied: bool = False) -> JanusConfig:
    ids = processor.tokenizer
    text = {
        "model_type": "llama", "vocab_size": len(ids), "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512,
        "pad_token_id": ids.pad_token_id, "bos_token_id": ids.bos_token_id, "eos_token_id": ids.eos_token_id,
        "tie_word_embeddings": tied,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
        "projection_dim": 32, "num_image_tokens": 16, "mlp_ratio": 2.0, "depth": 2, "hidden_dropout_rate": 0.0,
    }  # fmt: skip
    vq = {
        "embed_dim": 8, "num_embeddings": codebook, "latent_channels": 32, "base_channels": 32,
        "channel_multiplier": [1, 1, 1], "num_res_blocks": 1, "projection_dim": 32, "image_token_embed_dim": 32,
        "num_patches": 4, "double_latent": False, "num_hidden_layers": 2,
    }  # fmt: skip
    config = JanusConfig(
        text_config=text,
        vision_config=vision,
        vq_config=vq,
        image_token_id=ids.convert_tokens_to_ids(PLACEHOLDER),
        tie_word_embeddings=tied,
    )
    return config


def build_random_janus(folder: str, codebook: int = 16, tied: bool = False, processor=None, seed: int = 0) -> None:
    """Save a random Janus and its processor to `folder`. Wide initial weights, so that distributions are not flat."""
    processor = processor or build_processor()
    torch.manual_seed(seed)
    model = JanusForConditionalGeneration(build_config(processor, codebook, tied))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "vqmodel" not in name:
                parameter.normal_(0, 0.2)
    ids = processor.tokenizer
    model.generation_config = GenerationConfig(
        pad_token_id=ids.pad_token_id, bos_token_id=ids.bos_token_id, eos_token_id=ids.eos_token_id,
        guidance_scale=5.0, do_sample=True, generation_kwargs={"boi_token_id": ids.convert_tokens_to_ids(BOI)},
    )  # fmt: skip
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
