"""What the tests of data share: rows written to files, and what is loaded from them."""

import json
from pathlib import Path

from PIL import Image

from janus_trl.data import load_dataset_splits


def pixel(image: Image.Image) -> tuple[int, ...]:
    return image.getpixel((0, 0))


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(name, task="t2i", **options):
    return load_dataset_splits(str(name), task=task, **options)["train"]
