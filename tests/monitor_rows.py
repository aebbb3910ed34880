"""Logged rows for the tests of the learning-signal monitor, and what it says about them."""

from types import SimpleNamespace

from transformers import TrainerControl

from janus_trl.monitor import SignalMonitorCallback
from janus_trl.run_log import read_messages
from janus_trl.signal_rules import SignalSettings

HEALTHY_ROW = {
    "reward": 0.5, "grad_norm": 0.5, "learning_rate": 1e-4, "kl": 0.1, "entropy/text": 0.5, "entropy/image": 2.0,
    "signal/within_group_std": 0.3, "signal/between_group_std": 0.1, "signal/flat_groups": 0.2,
    "signal/prompt_variance_share": 0.3, "signal/duplicates": 0.1, "logps/drift_mean": 1e-6,
    "completions/clipped_ratio": 0.0,
}  # fmt: skip
FLAT = {"signal/flat_groups": 1.0, "signal/within_group_std": 0.0, "signal/between_group_std": 0.0, "grad_norm": 0.0}


def rows_of(count: int, every: int = 1, first: int = 1, **values) -> list[dict]:
    steps = range(first, first + count)
    return [{**HEALTHY_ROW, **values, "step": step * every} for step in steps]


def listen(rows: list[dict], settings: SignalSettings | None = None, **options) -> list[tuple[int, str, str]]:
    """What the monitor says when it gets the rows one after another."""
    callback = SignalMonitorCallback(settings or SignalSettings(), **options)
    state = SimpleNamespace(log_history=[], global_step=0, is_world_process_zero=True)
    for row in rows:
        state.log_history.append(row)
        state.global_step = row["step"]
        callback.on_log(None, state, TrainerControl(), logs=row)
    return read_messages(state.log_history)


def causes(rows: list[dict], settings: SignalSettings | None = None) -> list[str]:
    return [cause for _, cause, _ in listen(rows, settings)]
