"""The JPEG size is that of a file."""

import numpy as np
import pytest
from PIL import Image

from janus_trl.rewards import get_reward_funcs


def reward_of(name: str, **args):
    return get_reward_funcs({"name": name, "args": args}).funcs[0]


def test_the_jpeg_size_is_the_kilobytes_of_the_file(tmp_path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    images = [noise, Image.new("RGB", (64, 64), "red")]
    sizes = []
    for image in images:
        image.save(tmp_path / "x.jpg", quality=95)
        sizes.append((tmp_path / "x.jpg").stat().st_size / 1000)
    assert reward_of("jpeg_size")(prompts=["", ""], completions=["", ""], generated_images=images) == sizes
    smaller = reward_of("jpeg_size", smaller=True, quality=50)(prompts=[""], completions=[""], generated_images=[noise])
    assert sizes[0] > 5 * sizes[1] and -sizes[0] < smaller[0] < 0
    with pytest.raises(ValueError, match="quality is 100; it must be from 1 to 95"):
        reward_of("jpeg_size", quality=100)
