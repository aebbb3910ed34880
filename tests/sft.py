"""Rows of every kind for SFT, and a trainer on them."""

from datasets import Features, Image, List, Value
from PIL import Image as PILImage

from janus_trl.configs import JanusSFTConfig
from janus_trl.sft_trainer import JanusSFTTrainer

COLORS = ["red", "lime", "blue", "black", "white", "gold", "pink", "gray"]
CODES = list(range(16))
FEATURES = Features({
    "prompt": Value("string"), "images": List(Image()), "reasoning": Value("string"), "image": Image(),
    "completion": Value("string"),
})  # fmt: skip


def picture(color: str, size: tuple[int, int] = (16, 16)) -> PILImage.Image:
    return PILImage.new("RGB", size, color)


def row(prompt="q", images=(), reasoning="", image=None, completion="") -> dict:
    return {
        "prompt": prompt, "images": list(images), "reasoning": reasoning, "image": image, "completion": completion
    }  # fmt: skip


def mixed_rows() -> list[dict]:
    """Pictures with and without reasoning, answers about no, one and two pictures."""
    rows = [
        row(f"draw {color}", image=picture(color), reasoning="plan " * (i % 2)) for i, color in enumerate(COLORS[:4])
    ]
    counts = (0, 1, 2, 1)
    return rows + [
        row(f"what {i}", images=[picture(COLORS[4 + i])] * count, completion=f"answer {i}")
        for i, count in enumerate(counts)
    ]


def labels_of(batch, index=0) -> list[int]:
    return [i for i in batch["labels"][index].tolist() if i != -100]


def sft_trainer(folder, output, dataset, eval_dataset=None, model=None, processor=None, **settings):
    defaults = {
        "output_dir": str(output), "report_to": "none", "per_device_train_batch_size": 8, "max_steps": 20,
        "learning_rate": 1e-2, "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no",
        "disable_tqdm": True, "guidance_dropout": 0.0,
        "codes_cache_dir": str(output / "codes"),
    }  # fmt: skip
    return JanusSFTTrainer(
        model or folder, JanusSFTConfig(**{**defaults, **settings}), dataset, eval_dataset, processing_class=processor
    )
