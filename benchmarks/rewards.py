"""Speed of PickScore at its real size (CLIP ViT-H-14, random weights built on the device, no download).

    python benchmarks/rewards.py                            # on a GPU: bfloat16, batches of 64
    python benchmarks/rewards.py --size tiny --batch 4      # on a CPU, to test the benchmark itself

Two JSON lines. `model`: images a second through both towers, pictures prepared beforehand, one caption per picture.
`step`: seconds of the reward as a training step calls it, from decoded 384 x 384 PIL pictures and their captions (eight
different ones, as in groups of eight) to numbers, preprocessing included.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import open_clip
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from shapes import random_model

from janus_trl.rewards.clip_models import TransformersClip
from janus_trl.rewards.pickscore import PickScore

# (hidden, layers, heads, MLP) of the text and the picture tower, patch, projection.
SHAPES = {
    "vit_h_14": ((1024, 24, 16, 4096), (1280, 32, 16, 5120), 14, 1024),
    "tiny": ((32, 2, 2, 64), (32, 2, 2, 64), 56, 16),
}
PICTURE = 384  # pixels of a side, as Janus-Pro decodes them
CAPTION = "a photo of a small red ship with {} white sails on a calm blue sea, seen from above in the morning light"


def clip_processor() -> CLIPProcessor:
    """CLIP's processor with its real vocabulary, which open_clip ships, and pictures of 224 x 224."""
    source = open_clip.tokenizer.SimpleTokenizer()
    names = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocabulary = {names.get(token, token): i for token, i in source.encoder.items()}
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=list(source.bpe_ranks), model_max_length=77)
    return CLIPProcessor(tokenizer=tokenizer, image_processor=CLIPImageProcessor())


def build_clip(size: str, device: str, dtype: torch.dtype) -> CLIPModel:
    """A random CLIP of `size` with 77 text positions."""
    text, vision, patch, projection = SHAPES[size]
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    text_config = dict(zip(names, text, strict=True)) | {"hidden_act": "gelu", "eos_token_id": 49407}
    vision_config = dict(zip(names, vision, strict=True)) | {"hidden_act": "gelu", "patch_size": patch}
    config = CLIPConfig(text_config=text_config, vision_config=vision_config, projection_dim=projection)
    model = random_model(CLIPModel, config, device, dtype)
    with torch.no_grad():
        model.logit_scale.fill_(np.log(100))
    return model


def seconds(call: Callable, repeats: int) -> float:
    """The median wall time of a call, after two to warm up."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[repeats // 2]


def towers(reward: PickScore, processor: CLIPProcessor, captions: list[str], pictures: list) -> Callable:
    """Both towers on prepared inputs."""
    with reward.clip.ready() as clip:
        device, dtype = clip.module.device, clip.module.dtype
        text = processor.tokenizer(captions, padding="max_length", return_tensors="pt").to(device)
        pixels = processor.image_processor(pictures, return_tensors="pt")["pixel_values"].to(device, dtype)

    def call():
        with reward.clip.ready() as clip:
            clip.module.get_text_features(**text)
            clip.module.get_image_features(pixels)

    return call


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SHAPES, default="vit_h_14")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    processor = clip_processor()
    model = build_clip(options.size, device, getattr(torch, dtype))
    reward = PickScore.of_model(model, processor, dtype=dtype, batch_size=options.batch)
    rng = np.random.default_rng(0)
    shape = (options.batch, PICTURE, PICTURE, 3)
    pictures = [Image.fromarray(pixels) for pixels in rng.integers(0, 256, shape, dtype=np.uint8)]
    grouped = [CAPTION.format(i % 8) for i in range(options.batch)]
    line = {
        "benchmark": "rewards",
        "reward": "pickscore",
        "size": options.size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "dtype": dtype,
        "batch": options.batch,
    }
    different = [CAPTION.format(i) for i in range(options.batch)]
    taken = seconds(towers(reward, processor, different, pictures), options.repeats)
    print(
        json.dumps({**line, "measured": "model", "s": round(taken, 4), "images_per_s": round(options.batch / taken, 1)})
    )
    taken = seconds(lambda: reward(prompts=grouped, generated_images=pictures), options.repeats)
    alone = seconds(lambda: TransformersClip.pixels(processor, pictures), options.repeats)
    print(json.dumps({**line, "measured": "step", "s": round(taken, 4), "preprocessing_s": round(alone, 4)}))


if __name__ == "__main__":
    main()
