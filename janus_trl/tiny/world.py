"""The embedded world: 32x32 pictures of colored shapes in a 2x2 grid of cells.

A scene is four words, one for each cell in reading order: ``"red circle"`` and so on, or ``"empty"``. Everything else
(pictures, plans, prompts, questions, grades) is derived from that value, so ground truth is always known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from PIL import Image

IMAGE_SIZE = 32
CELL_SIZE = IMAGE_SIZE // 2
CELLS = ("top-left", "top-right", "bottom-left", "bottom-right")
SHAPES = ("circle", "square", "triangle", "cross")
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (45, 80, 220),
    "yellow": (235, 195, 30),
    "purple": (150, 50, 190),
}
BACKGROUND = (220, 220, 220)
OBJECTS = tuple(f"{color} {shape}" for color in COLORS for shape in SHAPES)
EMPTY = "empty"
UNREADABLE = "unreadable"
NO_OBJECTS = "nothing"
SPLITS = {"train": 70, "validation": 15, "test": 15}  # percent

# Size and place of a shape at full jitter, in shares of the cell and in pixels. Jitter the eye cannot use is entropy
# of the image codes, and that entropy is noise in the policy gradient: pictures use a quarter of it by default.
RADIUS, RADIUS_JITTER, OFFSET_JITTER = 0.35, 0.04, 1.0


@dataclass(frozen=True)
class Scene:
    """What a picture shows: one word pair or ``"empty"`` for each of the four cells, in the order of `CELLS`.

    Raises:
        ValueError: if `cells` has another length than four or names an unknown object.
    """

    cells: tuple[str, ...]

    def __post_init__(self) -> None:
        unknown = [cell for cell in self.cells if cell != EMPTY and cell not in OBJECTS]
        if len(self.cells) != len(CELLS) or unknown:
            raise ValueError(
                f"cells={self.cells!r} must hold {len(CELLS)} entries, each '{EMPTY}' or '<color> <shape>' "
                f"with a color of {', '.join(COLORS)} and a shape of {', '.join(SHAPES)}."
            )

    @classmethod
    def of(cls, objects: dict[str, str]) -> "Scene":
        """Scene from ``{cell: object}``; cells that are not named stay empty."""
        return cls(tuple(objects.get(cell, EMPTY) for cell in CELLS))

    @property
    def objects(self) -> dict[str, str]:
        """``{cell: object}`` of the occupied cells, in reading order."""
        return {cell: name for cell, name in zip(CELLS, self.cells) if name != EMPTY}


def split_of(text: str) -> str:
    """Split that a text belongs to, from its hash: the same on every machine and for every seed."""
    bucket = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") % 100
    edges = np.cumsum(list(SPLITS.values()))
    return tuple(SPLITS)[int(np.searchsorted(edges, bucket, side="right"))]


def plan_text(scene: Scene) -> str:
    """Layout in plain words, such as ``"top-left red circle, bottom-right blue square"``."""
    return ", ".join(f"{cell} {name}" for cell, name in scene.objects.items()) or NO_OBJECTS


def parse_plan(text: str) -> Scene | None:
    """Scene that a plan describes (spaces and the order of cells are free), or None where the text is no plan."""
    objects: dict[str, str] = {}
    if text.strip() == NO_OBJECTS:
        return Scene.of(objects)
    for part in text.split(","):
        cell, _, name = " ".join(part.split()).partition(" ")
        if cell not in CELLS or name not in OBJECTS or cell in objects:
            return None
        objects[cell] = name
    return Scene.of(objects)


def sample_scene(rng: np.random.Generator, num_objects: int | None = None) -> Scene:
    """Random scene of `num_objects` shapes (1 to 4 where it is not given) in random cells."""
    count = int(rng.integers(1, len(CELLS) + 1)) if num_objects is None else num_objects
    cells = rng.permutation(len(CELLS))[:count]
    return Scene.of({CELLS[cell]: OBJECTS[rng.integers(len(OBJECTS))] for cell in cells})


def shape_masks(shape: str, radius: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Anti-aliased coverage of one cell by a shape.

    Args:
        shape: one of `SHAPES`.
        radius: half the extent of the shape in pixels, (n,).
        offset: x and y of its center against the center of the cell in pixels, (n, 2).

    Returns:
        Coverage in [0, 1], (n, CELL_SIZE, CELL_SIZE), from the signed distance to the outline.
    """
    axis = np.arange(CELL_SIZE) + 0.5 - CELL_SIZE / 2
    x = axis[None, None, :] - offset[:, 0, None, None]
    y = axis[None, :, None] - offset[:, 1, None, None]
    r = radius[:, None, None]
    if shape == "circle":
        distance = np.hypot(x, y) - r
    elif shape == "square":
        distance = np.maximum(abs(x), abs(y)) - 0.88 * r
    elif shape == "triangle":  # apex (0, -r), base from (-r, .85 r) to (r, .85 r)
        slant = (1.85 * abs(x) - (y + r)) / np.hypot(1.85, 1.0)
        distance = np.maximum(slant, y - 0.85 * r)
    else:
        bar = 0.36 * r
        distance = np.minimum(np.maximum(abs(x) - r, abs(y) - bar), np.maximum(abs(x) - bar, abs(y) - r))
    return np.clip(0.5 - distance, 0.0, 1.0)


def render_batch(scenes: Sequence[Scene], rng: np.random.Generator, jitter: float = 0.25) -> np.ndarray:
    """Pictures of scenes, (n, IMAGE_SIZE, IMAGE_SIZE, 3) uint8. See `render`."""
    pictures = np.empty((len(scenes), IMAGE_SIZE, IMAGE_SIZE, 3))
    pictures[:] = BACKGROUND
    # Drawn for every cell, used or not, so that equal generators place equal shapes equally.
    radii = CELL_SIZE * (RADIUS + jitter * RADIUS_JITTER * rng.uniform(-1, 1, (len(scenes), len(CELLS))))
    offsets = jitter * OFFSET_JITTER * rng.uniform(-1, 1, (len(scenes), len(CELLS), 2))
    names = np.array([scene.cells for scene in scenes], dtype=object).reshape(len(scenes), len(CELLS))
    for name in OBJECTS:
        rows, cells = np.nonzero(names == name)
        if not len(rows):
            continue
        color, shape = name.split()
        masks = shape_masks(shape, radii[rows, cells], offsets[rows, cells])[..., None]  # (k, 16, 16, 1)
        patches = BACKGROUND + masks * (np.array(COLORS[color]) - BACKGROUND)
        for row, cell, patch in zip(rows, cells, patches):
            top, left = CELL_SIZE * (cell // 2), CELL_SIZE * (cell % 2)
            pictures[row, top : top + CELL_SIZE, left : left + CELL_SIZE] = patch
    return np.round(pictures).astype(np.uint8)


def render(scene: Scene, rng: np.random.Generator, jitter: float = 0.25) -> Image.Image:
    """Picture of a scene.

    Args:
        scene: what to draw.
        rng: source of size and place of the shapes.
        jitter: share of the full jitter (radius .31 to .39 of the cell, place ±1 pixel).

    Returns:
        RGB picture of IMAGE_SIZE x IMAGE_SIZE pixels.
    """
    return Image.fromarray(render_batch([scene], rng, jitter)[0])
