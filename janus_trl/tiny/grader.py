"""Reads pictures of the embedded world by exhaustive template matching.

Each cell x is compared with every template t = mask * (color - background), over shapes, sizes, places and colors. With
d = x - background the squared residual is |d|^2 - 2 <d, t> + |t|^2, so all templates cost one matrix product.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image

from janus_trl.tiny.world import BACKGROUND, CELL_SIZE, COLORS, EMPTY, IMAGE_SIZE, SHAPES, UNREADABLE, shape_masks

# Largest squared residual, as a share of the template's energy, at which a cell still shows that object. A loose bound
# (.35) lets a policy learn swollen, sloppy shapes that still pass.
RESIDUAL_BOUND = 0.15
# A cell is empty if its energy is below this share of the energy of the faintest template.
EMPTY_BOUND = 0.10
RADII = np.array([0.31, 0.33, 0.35, 0.37, 0.39]) * CELL_SIZE
OFFSETS = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])


def read_picture(images: Image.Image | Sequence[Image.Image]) -> list[list[str]]:
    """What each cell of each picture shows.

    Args:
        images: one picture or several; other sizes and modes are turned into RGB of 32x32 first.

    Returns:
        One list of four words for each picture, in the order of `CELLS`: an object such as ``"red circle"``,
        ``"empty"``, or ``"unreadable"`` where no template is near enough.
    """
    pictures = [images] if isinstance(images, Image.Image) else list(images)
    readings: list[list[str]] = []
    for start in range(0, len(pictures), 256):  # 256 pictures: 10 MB of scores
        arrays = np.stack([_as_array(picture) for picture in pictures[start : start + 256]])
        readings += _read_arrays(arrays)
    return readings


def _as_array(picture: Image.Image) -> np.ndarray:
    """RGB values of a picture, (32, 32, 3) float32."""
    picture = picture.convert("RGB")
    if picture.size != (IMAGE_SIZE, IMAGE_SIZE):
        picture = picture.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BOX)
    return np.asarray(picture, dtype=np.float32)


@cache
def _templates() -> tuple[np.ndarray, np.ndarray]:
    """Masks (shapes * sizes * places, pixels of a cell) and color offsets from the background (colors, 3)."""
    radius, x, y = (grid.ravel() for grid in np.meshgrid(RADII, OFFSETS, OFFSETS, indexing="ij"))
    masks = np.concatenate([shape_masks(shape, radius, np.stack([x, y], axis=1)) for shape in SHAPES])
    colors = np.array(list(COLORS.values()), dtype=np.float32) - np.array(BACKGROUND, dtype=np.float32)
    return masks.reshape(len(masks), -1).astype(np.float32), colors


def _read_arrays(arrays: np.ndarray) -> list[list[str]]:
    """Readings of pictures (n, 32, 32, 3)."""
    masks, colors = _templates()
    n = len(arrays)
    cells = (arrays - np.float32(BACKGROUND)).reshape(n, 2, CELL_SIZE, 2, CELL_SIZE, 3)
    cells = cells.transpose(0, 1, 3, 2, 4, 5).reshape(n * 4, CELL_SIZE**2, 3)  # (cells, pixels, 3)
    energy = np.square(cells).sum((1, 2))  # (cells,)
    by_color = (cells @ colors.T).transpose(0, 2, 1)  # (cells, colors, pixels)
    overlap = by_color @ masks.T  # (cells, colors, masks)
    template_energy = np.square(colors).sum(1)[:, None] * np.square(masks).sum(1)[None, :]  # (colors, masks)
    residual = (energy[:, None, None] - 2 * overlap) / template_energy + 1
    flat = residual.reshape(n * 4, -1)
    best = flat.argmin(1)
    color, mask = np.divmod(best, len(masks))
    shape = mask // (len(masks) // len(SHAPES))
    readable = flat[np.arange(n * 4), best] <= RESIDUAL_BOUND
    blank = energy <= EMPTY_BOUND * template_energy.min()
    color_names = tuple(COLORS)
    words = [
        EMPTY if blank[i] else f"{color_names[color[i]]} {SHAPES[shape[i]]}" if readable[i] else UNREADABLE
        for i in range(n * 4)
    ]
    return [words[4 * i : 4 * i + 4] for i in range(n)]
