"""Dashboards: sample grids go to the ones of `report_to`, and nothing that fails there ends a run.

No module of ours imports wandb. transformers does when `report_to` names it, and TRL when it is installed.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

logger = logging.getLogger(__name__)

EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


class Attempts:
    """Calls that may fail: each kind of failure is warned about once, and never raised."""

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def __call__(self, what: str, function: Callable[[], Any], kind: str | None = None) -> Any:
        """The result of the function, or None where it raised; `what` names it in the warning of its `kind`."""
        try:
            return function()
        except Exception as error:  # a full disk, a missing font or a lost connection must not end a run of days
            self.warn(what, error, kind)
            return None

    def warn(self, what: str, error: Exception, kind: str | None = None) -> None:
        """Warn about the first failure of a kind."""
        if (kind or what) not in self._failed:
            self._failed.add(kind or what)
            reason = f"{type(error).__name__}: {error}"
            logger.warning("%s (%s); training goes on, further failures are silent", what, reason)


def guard_dashboards(callbacks: Iterable[TrainerCallback]) -> None:
    """Let the reporting callbacks of transformers (wandb, TensorBoard, …) fail without ending the training."""
    for callback in callbacks:
        if type(callback).__module__.startswith("transformers.integrations"):
            attempt, name = Attempts(), type(callback).__name__
            for event in EVENTS:
                method = functools.partial(_attempted, attempt, getattr(callback, event), f"{name} failed", name)
                setattr(callback, event, method)


def _attempted(attempt: Attempts, method: Callable, what: str, kind: str, *args, **kwargs) -> Any:
    return attempt(what, lambda: method(*args, **kwargs), kind)


class SampleSender:
    """Sends the pictures of a sample grid to wandb and TensorBoard, where the run reports to them.

    A wandb call names no `step`: wandb counts its own calls, and drops what goes backwards. The trainer's step is
    `train/global_step`, the axis that transformers defines for all metrics.

    Args:
        trainer: its arguments and callbacks say where the run reports to; the main process alone may call.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._attempt = trainer, Attempts()

    def __call__(self, step: int, items: Sequence[Mapping[str, Any]], grid: Path) -> None:
        """Send `items` (`image`, `prompt`, `reasoning`, `reward`) and the grid that was drawn of them."""
        wandb = sys.modules.get("wandb") if "wandb" in self._trainer.args.report_to else None
        if wandb is not None and wandb.run is not None:
            self._attempt("The samples were not sent to wandb", lambda: _send_to_wandb(wandb, step, items))
        for callback in self._trainer.callback_handler.callbacks:
            writer = getattr(callback, "tb_writer", None)
            if writer is not None:
                send = functools.partial(_send_to_tensorboard, writer, step, items, grid)
                self._attempt("The samples were not sent to TensorBoard", send)


def _send_to_wandb(wandb, step: int, items: Sequence[Mapping[str, Any]]) -> None:
    pictures = [wandb.Image(item["image"], caption=describe(item)) for item in items if item["image"] is not None]
    columns = ("prompt", "reasoning", "reward")
    table = wandb.Table(columns=list(columns), data=[[item.get(name) for name in columns] for item in items])
    wandb.log({"samples": pictures, "sample_texts": table, "train/global_step": step})


def _send_to_tensorboard(writer, step: int, items: Sequence[Mapping[str, Any]], grid: Path) -> None:
    import numpy as np
    from PIL import Image

    with Image.open(grid) as picture:
        writer.add_image("samples", np.asarray(picture.convert("RGB")), step, dataformats="HWC")  # [H, W, 3]
    writer.add_text("samples", "\n\n".join(describe(item) for item in items), step)


def describe(item: Mapping[str, Any]) -> str:
    """Reward, prompt and reasoning of a sample in one line each."""
    reward, reasoning = item.get("reward"), " ".join(str(item.get("reasoning") or "").split())
    lines = ["not scored" if reward is None else f"reward {reward:.3f}", str(item["prompt"])]
    return "\n".join([*lines, f"> {reasoning}"] if reasoning else lines)
