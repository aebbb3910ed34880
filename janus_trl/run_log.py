"""Numbers read off the log of a run (`state.log_history`): series, messages, and the trend of the reward."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

TASKS = ("t2i", "i2t")
MESSAGE = "monitor/"  # prefix of the keys under which the monitor keeps its sentences in the log


def trend_line(values: Sequence[float], steps: Sequence[float] | None = None) -> tuple[float, float, float]:
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
    slope, _, noise = trend_line(values)
    drift = slope * (len(values) - 1)
    rounding = 1e-12 * max(abs(value) for value in values)  # noise below it is float rounding
    if noise <= rounding:
        return 0.0 if abs(drift) <= rounding else math.copysign(math.inf, drift)
    return drift / noise


def read_series(log_history: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """The steps and the finite values at which `key` was logged; a step logged twice (after a resume) counts once."""
    values = {}
    for row in log_history:
        if isinstance(row.get(key), int | float) and "step" in row:
            value = float(row[key])
            if math.isfinite(value):
                values[int(row["step"])] = value
    steps = sorted(values)
    return steps, [values[step] for step in steps]


def read_messages(log_history: Sequence[Row]) -> list[tuple[int, str, str]]:
    """What the monitor said: step, cause and sentence, in order; a cause told again after a resume counts once."""
    said = {}
    for row in log_history:
        for key, value in row.items():
            if key.startswith(MESSAGE):
                said.setdefault(key.removeprefix(MESSAGE), (int(row["step"]), value))
    return sorted((step, cause, sentence) for cause, (step, sentence) in said.items())


def training_rows(log_history: Sequence[Row]) -> list[Row]:
    """The rows of training steps by step; of a step logged twice (after a resume) the later row."""
    rows = {row["step"]: row for row in log_history if "reward" in row and "step" in row}
    return [rows[step] for step in sorted(rows)]


def logging_interval(rows: Sequence[Row]) -> float:
    """Steps from one row to the next."""
    steps = [row["step"] for row in rows]
    gaps = [b - a for a, b in zip(steps, steps[1:], strict=False)]
    return statistics.median(gaps[-20:]) if gaps else float(steps[0]) if steps else 1.0


def last_steps(rows: Sequence[Row], steps: int, at_least: int = 2) -> list[Row]:
    """The rows that cover the last `steps` steps (`at_least` so many rows); empty if the run is shorter."""
    count = max(at_least, math.ceil(steps / max(1.0, logging_interval(rows))))
    return list(rows[-count:]) if len(rows) >= count else []


def series(rows: Sequence[Row], key: str) -> list[float]:
    """The finite values of `key`."""
    values = (row.get(key) for row in rows)
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def always(rows: Sequence[Row], key: str, condition: Callable[[float], bool]) -> bool:
    """Whether every row has a finite `key` for which the condition holds; False for no rows."""
    values = series(rows, key)
    return bool(rows) and len(values) == len(rows) and all(map(condition, values))


def rows_by_task(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each task of a mixed run, with what was logged of it (`reward/t2i`, …) as `reward`, …; else all rows.

    In the order of `TASKS`.
    """
    if not all(series(rows, f"reward/{task}") for task in TASKS):
        return [list(rows)]
    return [[_of_task(row, f"/{task}") for row in rows if series([row], f"reward/{task}")] for task in TASKS]


def _of_task(row: Row, ending: str) -> Row:
    return {**row, **{key.removesuffix(ending): value for key, value in row.items() if key.endswith(ending)}}


def drift_per_step(rows: Sequence[Row], interval: float | None = None) -> tuple[float, float]:
    """Drift of the reward over its noise, and the standard error of that ratio without a trend, both of single steps.

    A row that averages k steps has less noise by sqrt(k), and so has its ratio more. `interval` is k; the distance of
    the rows by default.
    """
    rewards, interval = series(rows, "reward"), logging_interval(rows) if interval is None else interval
    if len(rewards) < 10:
        return math.nan, math.nan
    ratio = drift_over_noise(rewards) / math.sqrt(max(1.0, interval))
    return ratio, math.sqrt(12 / (len(rewards) * max(1.0, interval)))


def reward_trend(state, rewards: Sequence[float], window: int, key: str = "reward") -> float | None:
    """`signal/drift_to_noise`: `drift_per_step` over the last `window` steps, up to the step that is being logged.

    Args:
        state: the trainer's state, with the log so far.
        rewards: mean rewards of the rollouts since the last row.
        window: steps.
        key: `reward`, or that of a task, `reward/t2i`.

    Returns:
        The ratio; None without a reward, with fewer than ten rows, and for a line without noise.
    """
    finite = [reward for reward in rewards if math.isfinite(reward)]
    if not finite:
        return None
    rows = [*training_rows(state.log_history), {"step": state.global_step, key: statistics.fmean(finite)}]
    interval = logging_interval(rows)  # steps that a row averages
    rows = [{"step": row["step"], "reward": row[key]} for row in rows if series([row], key)]
    count = math.ceil(window / max(1.0, logging_interval(rows)))
    ratio, _ = drift_per_step(rows[-max(10, count) :], interval)
    return ratio if math.isfinite(ratio) else None
