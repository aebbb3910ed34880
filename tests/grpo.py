"""Rows, rewards and settings of the short GRPO runs in tests; the fixture is `trainer_of`."""

import torch
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as PILImage
from trl import ModelConfig

from janus_trl.script_arguments import lora_config

PROMPTS = ["q", "a much longer prompt than the other ones", "two cats", "red"]
COLORS = {"a": (250, 10, 10), "b": (10, 250, 10), "c": (10, 10, 250), "d": (130, 130, 10)}


def ascending(completions, **_):
    """.1, .2, .3, .4 within every group of four."""
    return [0.1 * (1 + i % 4) for i in range(len(completions))]


def prompts_dataset(prompts=PROMPTS) -> Dataset:
    return Dataset.from_dict({"prompt": list(prompts)})


def pictures_dataset(counts=(1, 2, 0, 3)) -> Dataset:
    """Prompts "a", "b", …, each with its number of pictures in its own colour."""
    rows = [
        {"prompt": name, "images": [PILImage.new("RGB", (16, 16), COLORS[name])] * count, "answer": "A"}
        for name, count in zip(COLORS, counts, strict=False)
    ]
    features = Features({"prompt": Value("string"), "images": List(Image()), "answer": Value("string")})
    return Dataset.from_list(rows, features=features)


def lora(**kwargs):
    return lora_config(ModelConfig(use_peft=True, lora_r=2, lora_alpha=4, **kwargs))


def steps(trainer) -> list[dict]:
    """What was logged at each training step."""
    return [entry for entry in trainer.state.log_history if "grad_norm" in entry]


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
