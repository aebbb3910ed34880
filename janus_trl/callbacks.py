"""Trainer callbacks that leave pictures behind: grids of samples, and the curve of a run.

Only the main process draws. A failure while drawing or logging is warned about once and never ends the training.
"""

import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from .curve import save_curve
from .reporting import Attempts
from .run_log import drift_over_noise, read_series

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "CurveCallback",
    "SampleGridCallback",
    "drift_over_noise",
    "read_series",
    "save_curve",
    "save_grid",
    "save_texts",
]

MARGIN = 8  # pixels around every cell of a grid
FONT_SIZE = 14
MIN_CELL_WIDTH = 192  # narrower pictures are enlarged to about this, so that a caption fits below them
MAX_CAPTION_LINES = 6


def _caption(item: Mapping[str, Any], width: int) -> str:
    """Reward, prompt and reasoning of an item, wrapped to `width` characters a line, cut to a few lines."""
    parts = [str(item["prompt"])]
    if item.get("reasoning"):
        parts.append("> " + " ".join(str(item["reasoning"]).split()))
    lines = [line for part in parts for line in textwrap.wrap(part, width) or [""]]
    if len(lines) > MAX_CAPTION_LINES:
        lines = [*lines[: MAX_CAPTION_LINES - 1], lines[MAX_CAPTION_LINES - 1][: width - 2] + " …"]
    if "reward" not in item:
        return "\n".join(lines)
    reward = item["reward"]
    return "\n".join(["not scored" if reward is None else f"reward {reward:.3f}", *lines])


def save_grid(items: Sequence[Mapping[str, Any]], path: str | Path, scale: int | None = None, columns: int = 4) -> Path:
    """Write one PNG with all pictures, each with its reward, prompt and reasoning below it.

    A cell is `scale` times the largest picture wide, on a margin of 8 pixels; the pictures are enlarged by whole
    factors with nearest neighbour, so that small ones keep their pixels.

    Args:
        items: mappings with `image` (RGB PIL image; None: a blank cell), `prompt`, and optionally `reward` (None:
            unscored; absent: not mentioned), `reasoning`.
        path: the file to write; its folder is created.
        scale: enlargement; None enlarges small pictures to about 192 pixels and leaves large ones as they are.
        columns: number of cells in a row.

    Returns:
        The path.

    Raises:
        ValueError: no items, or a `scale` or `columns` below 1.
    """
    from PIL import Image, ImageDraw, ImageFont

    if not items:
        raise ValueError("items: an empty list cannot be drawn; give at least one picture")
    if (scale is not None and scale < 1) or columns < 1:
        raise ValueError(f"scale={scale}, columns={columns}: both must be at least 1")
    blank = Image.new("RGB", (MIN_CELL_WIDTH, MIN_CELL_WIDTH), "white")
    images = [blank if item["image"] is None else item["image"] for item in items]
    largest = max([item["image"].width for item in items if item["image"] is not None], default=blank.width)
    scale = scale or max(1, math.ceil(MIN_CELL_WIDTH / largest))
    pictures = [image if image is blank else _enlarged(image, scale) for image in images]
    width, height = max(p.width for p in pictures), max(p.height for p in pictures)
    font = ImageFont.load_default(size=FONT_SIZE)
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    characters = max(10, int(width / measure.textlength("abcdefghij klmnopqrst", font=font) * 21))
    captions = [_caption(item, characters) for item in items]
    text_height = max(math.ceil(measure.multiline_textbbox((0, 0), caption, font=font)[3]) for caption in captions)

    columns = min(columns, len(items))
    rows = math.ceil(len(items) / columns)
    step_x, step_y = width + MARGIN, height + text_height + 2 * MARGIN
    canvas = Image.new("RGB", (columns * step_x + MARGIN, rows * step_y + MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    for index, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        x, y = MARGIN + index % columns * step_x, MARGIN + index // columns * step_y
        canvas.paste(picture, (x, y))
        draw.multiline_text((x, y + height + MARGIN // 2), caption, fill="black", font=font)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(path)
    return path


def save_texts(items: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Write `prompt`, `reasoning` and `reward` of each sample as one line of JSON."""
    names = ("prompt", "reasoning", "reward")
    lines = [json.dumps({name: item.get(name) for name in names}, ensure_ascii=False) for item in items]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _enlarged(image: "Image", scale: int) -> "Image":
    from PIL import Image

    image = image.convert("RGB")
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST) if scale > 1 else image


class _DrawingCallback(TrainerCallback):
    """Draws on the main process, and turns any failure into one warning: no picture is worth a run."""

    def __init__(self) -> None:
        self._attempt = Attempts()

    def _draw(self, path: Path, function: Callable[[], Any]) -> bool:
        """Whether the function, which writes `path`, did not fail."""
        return self._attempt(f"{path} was not drawn", lambda: [function()], kind="draw") is not None


class SampleGridCallback(_DrawingCallback):
    """Writes `samples/step-000010.png` in the output folder: the same prompts with the same seeds, step after step.

    The whole texts, with their rewards, are in `samples/step-000010.jsonl`, one line per picture.
    The pictures before the first update (step 0) are drawn too: they are what the later ones are compared with.

    Args:
        sample_fn: called with the global step, on every process, because sampling may be collective. Returns mappings
            with `image`, `prompt`, `reward` and `reasoning`. What it raises is not caught.
        every: number of steps between two grids; 0 draws only at the start and at the end.
        scale: enlargement of the pictures, see `save_grid`.
        send: called on the main process with the step, the samples and the path of their grid, e.g. a
            `janus_trl.reporting.SampleSender`.

    Raises:
        ValueError: `every` below 0.
    """

    def __init__(
        self,
        sample_fn: Callable[[int], Sequence[Mapping[str, Any]]],
        every: int,
        scale: int | None = None,
        send: Callable[[int, Sequence[Mapping[str, Any]], Path], None] | None = None,
    ) -> None:
        super().__init__()
        if every < 0:
            raise ValueError(f"every={every}: must be at least 0, which draws only at the start and at the end")
        self.sample_fn, self.every, self.scale, self.send = sample_fn, every, scale, send
        self._last_step: int | None = None

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Draws the pictures of the untrained (or resumed) model."""
        self._sample(args, state)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Draws every `every` steps, and the last one: at the end of the training, dashboards are closed already."""
        step = state.global_step
        if (self.every and step % self.every == 0) or step >= state.max_steps:
            self._sample(args, state)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Draws the last step, if it was not just drawn."""
        self._sample(args, state)

    def _sample(self, args, state) -> None:
        step = state.global_step
        if step == self._last_step:
            return
        self._last_step = step
        items = self.sample_fn(step)
        if items and state.is_world_process_zero:
            path = Path(args.output_dir) / "samples" / f"step-{step:06d}.png"
            texts = path.with_suffix(".jsonl")
            drawn = self._draw(path, lambda: (save_texts(items, texts), save_grid(items, path, self.scale)))
            if drawn and self.send is not None:
                self._attempt(f"{path} was not sent", lambda: self.send(step, items, path), kind="send")


class CurveCallback(_DrawingCallback):
    """Writes `curve.png` in the output folder at every save and at the end.

    Everything is read from `state.log_history`, so a resumed run draws the whole curve.
    """

    def on_save(self, args, state, control, **kwargs) -> None:
        """Draws the curve up to the checkpoint."""
        self._save(args, state)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Draws the curve of the whole run."""
        self._save(args, state)

    def _save(self, args, state) -> None:
        if state.is_world_process_zero:
            path = Path(args.output_dir) / "curve.png"
            self._draw(path, lambda: save_curve(state.log_history, path))
