"""Small random CLIP models: one of transformers in a folder, one of open_clip with a registered configuration."""

import json
from pathlib import Path

import numpy as np
import open_clip
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

CAPTIONS = ["a cat", "ab" * 60, "", "a bee", "c c c", "tea", "bat", "a"]
OPEN_CLIP_NAME = "tiny-open-clip"
OPEN_CLIP_CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


def pictures(count: int = len(CAPTIONS)) -> list[Image.Image]:
    """Noise of one seed, not square."""
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 255, (20, 24, 3), dtype=np.uint8)) for _ in range(count)]


def save_clip(folder: str) -> str:
    """A CLIP of transformers with 16 text positions, letters for tokens and pictures of 16 x 16."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    vocabulary = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[], model_max_length=16)
    image_processor = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    CLIPProcessor(tokenizer=tokenizer, image_processor=image_processor).save_pretrained(folder)
    shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    text = dict(vocab_size=len(vocabulary), max_position_embeddings=16, bos_token_id=len(vocabulary) - 2, **shape)
    text |= dict(eos_token_id=len(vocabulary) - 1, pad_token_id=len(vocabulary) - 1)
    vision = dict(image_size=16, patch_size=8, **shape)
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    spread(model)
    with torch.no_grad():
        model.logit_scale.fill_(3.0)
    model.save_pretrained(folder)
    return folder


def spread(model: torch.nn.Module) -> None:
    """Widen the weights: they start so small that all pictures would look alike."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


def register_open_clip(folder: Path) -> torch.nn.Module:
    """Make `OPEN_CLIP_NAME` known to open_clip, and a random model of it."""
    path = folder / f"{OPEN_CLIP_NAME}.json"
    path.write_text(json.dumps(OPEN_CLIP_CONFIG))
    open_clip.add_model_config(path)
    torch.manual_seed(0)
    model = open_clip.create_model(OPEN_CLIP_NAME).eval()
    spread(model)
    return model
