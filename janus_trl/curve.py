"""The curve of a run: its log as one picture."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .run_log import TASKS, drift_over_noise, read_messages, read_series, trend_line

COLUMNS = 4
PANELS = {  # title -> logged key -> label
    "reward": {"reward": ""},
    "spread of the reward": {
        "signal/within_group_std": "within groups",
        "signal/between_group_std": "between groups",
    },
    "signal/flat_groups": {"signal/flat_groups": ""},
    "entropy/text": {"entropy/text": ""},
    "entropy/image": {"entropy/image": ""},
    "kl": {"kl": ""},
    "grad_norm": {"grad_norm": ""},
    "logps/drift_mean": {"logps/drift_mean": ""},
}


def save_curve(log_history: Sequence[Mapping[str, Any]], path: str | Path) -> Path | None:
    """Draw a run into one PNG: the reward with its least-squares trend, its spread, entropies, KL, gradient, drift.

    A dotted line marks each step where the monitor spoke; its sentences stand below.

    Args:
        log_history: `state.log_history` of a trainer: one mapping per log call, with `step`.
        path: the file to write.

    Returns:
        The path, or None (and no file) if none of the metrics has been logged.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, and no global state of pyplot
    from matplotlib.figure import Figure

    drawn = {title: _lines(log_history, keys) for title, keys in PANELS.items()}
    drawn = {title: lines for title, lines in drawn.items() if lines}
    if not drawn:
        return None
    messages = read_messages(log_history)
    columns = min(COLUMNS, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    said = [f"step {step}: {sentence}" for step, _, sentence in messages]
    text = "\n".join(line for part in said for line in textwrap.wrap(part, 58 * columns))
    figure = Figure(
        figsize=(4 * columns, 3.2 * rows + 0.17 * text.count("\n") + 0.3 * bool(text)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (title, lines) in zip(panels, drawn.items(), strict=False):
        _draw_panel(axes, title, lines)
        for step, _, _ in messages:
            axes.axvline(step, linestyle=":", color="red")
    for axes in panels[len(drawn) :]:
        axes.set_axis_off()
    if text:
        figure.supxlabel(text, x=0.01, horizontalalignment="left", fontsize=8, color="red")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _lines(log_history: Sequence[Mapping[str, Any]], keys: Mapping[str, str]) -> dict[str, tuple[list, list]]:
    """The series of a panel that have been logged, by label; those of each task where both were."""
    series = {}
    for key, label in keys.items():
        by_task = {f"{label} {task}".strip(): read_series(log_history, f"{key}/{task}") for task in TASKS}
        both = all(points[0] for points in by_task.values())
        series |= by_task if both else {label: read_series(log_history, key)}
    return {label: points for label, points in series.items() if points[0]}


def _draw_panel(axes, title: str, lines: Mapping[str, tuple[list, list]]) -> None:
    for label, (steps, values) in lines.items():
        axes.plot(steps, values, linewidth=1.2, marker="." if len(steps) < 30 else None, label=label or None)
        if title == "reward" and len(steps) > 2:
            slope, intercept, _ = trend_line(values, steps)
            ends = [steps[0], steps[-1]]
            trend = f"trend {slope * (ends[1] - ends[0]):+.3f}\ndrift/noise {drift_over_noise(values):.2f}"
            axes.plot(ends, [intercept + slope * step for step in ends], "--", color="black", label=trend)
    axes.set(title=title, xlabel="step")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
