"""Trainer callbacks that leave pictures behind: grids of samples, and the curve of a run.

Only the main process draws. A failure while drawing or logging is warned about once and never ends the training.
"""

import logging
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

MARGIN = 8  # pixels around every cell of a grid
FONT_SIZE = 14
MIN_CELL_WIDTH = 192  # narrower pictures are enlarged to about this, so that a caption fits below them
MAX_CAPTION_LINES = 6
PANELS = ("reward", "entropy/text", "entropy/image", "logps/drift_mean")


def _trend(values: Sequence[float], steps: Sequence[float] | None = None) -> tuple[float, float, float]:
    """Least-squares line through `(step, value)`: slope, intercept and residual standard deviation (n - 2)."""
    steps = range(len(values)) if steps is None else steps
    n = len(values)
    mean_x, mean_y = sum(steps) / n, sum(values) / n
    spread = sum((x - mean_x) ** 2 for x in steps)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(steps, values, strict=True)) / spread if spread else 0.0
    intercept = mean_y - slope * mean_x
    residual = sum((y - intercept - slope * x) ** 2 for x, y in zip(steps, values, strict=True))
    return slope, intercept, math.sqrt(residual / (n - 2)) if n > 2 else 0.0


def drift_over_noise(rewards: Sequence[float]) -> float:
    """How far the reward has moved over a window, in units of its step-to-step noise.

    With the least-squares line `r_t = a + b t` through the `n` rewards of the window:

        drift = b (n - 1)                     what the line gains from the first step to the last
        noise = sqrt(sum_t (r_t - a - b t)^2 / (n - 2))
        drift_over_noise = drift / noise

    If there is no trend, the value scatters around 0 with a standard deviation of about sqrt(12 / n): with 30 steps,
    values beyond 1.3 in size are unlikely (2 standard deviations). Negative: the reward falls.

    Args:
        rewards: mean reward of each step, in order; values that are not finite are left out.

    Returns:
        The ratio. `nan` for fewer than three finite rewards; `inf` with the sign of the drift if the rewards lie
        exactly on a line; 0.0 if they are all equal.
    """
    values = [float(reward) for reward in rewards if reward is not None and math.isfinite(reward)]
    if len(values) < 3:
        return math.nan
    slope, _, noise = _trend(values)
    drift = slope * (len(values) - 1)
    rounding = 1e-12 * max(abs(value) for value in values)  # noise below it is float rounding
    if noise <= rounding:
        return 0.0 if abs(drift) <= rounding else math.copysign(math.inf, drift)
    return drift / noise


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
        items: mappings with `image` (RGB PIL image), `prompt`, and optionally `reward` (None: unscored; absent: not
            mentioned), `reasoning`.
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
    largest = max(item["image"].width for item in items)
    scale = scale or max(1, math.ceil(MIN_CELL_WIDTH / largest))
    pictures = [_enlarged(item["image"], scale) for item in items]
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


def _enlarged(image: "Image", scale: int) -> "Image":
    from PIL import Image

    image = image.convert("RGB")
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST) if scale > 1 else image


class _DrawingCallback(TrainerCallback):
    """Draws on the main process, and turns any failure into one warning: no picture is worth a run."""

    def __init__(self) -> None:
        self._warned = False

    def _draw(self, what: str, function: Callable[[], Any]) -> None:
        try:
            function()
        except Exception as error:  # a full disk or a missing font must not end a training of days
            if not self._warned:
                logger.warning(
                    "%s was not drawn (%s: %s); further failures are silent", what, type(error).__name__, error
                )
            self._warned = True


class SampleGridCallback(_DrawingCallback):
    """Writes `samples/step-000010.png` in the output folder: the same prompts with the same seeds, step after step.

    The pictures before the first update (step 0) are drawn too: they are what the later ones are compared with.

    Args:
        sample_fn: called with the global step, on every process, because sampling may be collective. Returns mappings
            with `image`, `prompt`, `reward` and `reasoning`. What it raises is not caught.
        every: number of steps between two grids; 0 draws only at the start and at the end.
        scale: enlargement of the pictures, see `save_grid`.

    Raises:
        ValueError: `every` below 0.
    """

    def __init__(
        self, sample_fn: Callable[[int], Sequence[Mapping[str, Any]]], every: int, scale: int | None = None
    ) -> None:
        super().__init__()
        if every < 0:
            raise ValueError(f"every={every}: must be at least 0, which draws only at the start and at the end")
        self.sample_fn, self.every, self.scale = sample_fn, every, scale
        self._last_step: int | None = None

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Draws the pictures of the untrained (or resumed) model."""
        self._sample(args, state)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Draws every `every` steps."""
        if self.every and state.global_step % self.every == 0:
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
        if state.is_world_process_zero:
            path = Path(args.output_dir) / "samples" / f"step-{step:06d}.png"
            self._draw(str(path), lambda: save_grid(items, path, self.scale))


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
            self._draw(str(path), lambda: save_curve(state.log_history, path))


def read_series(log_history: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """The steps and the finite values at which `key` was logged; a step logged twice (after a resume) counts once."""
    values = {}
    for row in log_history:
        if isinstance(row.get(key), int | float) and "step" in row:
            value = float(row[key])
            if math.isfinite(value):
                values[int(row["step"])] = value
    steps = sorted(values)
    return steps, [values[step] for step in steps]


def save_curve(log_history: Sequence[Mapping[str, Any]], path: str | Path) -> Path | None:
    """Draw the reward with its least-squares trend, the entropies and the drift of a run into one PNG.

    Args:
        log_history: `state.log_history` of a trainer: one mapping per log call, with `step`.
        path: the file to write.

    Returns:
        The path, or None (and no file) if none of the metrics has been logged.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, and no global state of pyplot
    from matplotlib.figure import Figure

    series = {key: read_series(log_history, key) for key in PANELS}
    series = {key: points for key, points in series.items() if points[0]}
    if not series:
        return None
    figure = Figure(figsize=(4 * len(series), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(series), squeeze=False)[0]
    for axes, (key, (steps, values)) in zip(panels, series.items(), strict=True):
        axes.plot(steps, values, linewidth=1.2, marker="." if len(steps) < 30 else None)
        axes.set(title=key, xlabel="step")
        axes.grid(alpha=0.3)
        if key == "reward" and len(steps) > 2:
            slope, intercept, _ = _trend(values, steps)
            ends = [steps[0], steps[-1]]
            label = f"trend {slope * (ends[1] - ends[0]):+.3f}\ndrift/noise {drift_over_noise(values):.2f}"
            axes.plot(ends, [intercept + slope * step for step in ends], "--", color="black", label=label)
            axes.legend(fontsize=8)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
