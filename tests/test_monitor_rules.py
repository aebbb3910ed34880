"""The rules of the learning-signal monitor on rows of a log: what is named, and healthy runs, which are left alone."""

import json
import math
import random
from pathlib import Path

import pytest

from janus_trl.configs import JanusGRPOConfig
from janus_trl.monitor import monitor_settings
from janus_trl.signal_rules import DEAD, SignalSettings, flat_reward
from tests.monitor_rows import FLAT, HEALTHY_ROW, causes, listen, rows_of

HEALTHY = sorted((Path(__file__).parent / "data").glob("log_tiny_*.json"))


def test_patience_counts_steps_whatever_the_logging_interval():
    for every in (1, 2, 5):
        found = listen(rows_of(40, every, **FLAT), SignalSettings(patience=10))
        assert [(step, cause) for step, cause, _ in found] == [(10, "no_signal")]


def test_a_step_with_signal_starts_the_count_again():
    flat = rows_of(40, **FLAT)
    flat[8] = {**HEALTHY_ROW, "step": 9}
    assert [step for step, _, _ in listen(flat, SignalSettings(patience=10))] == [19]


def test_a_consequence_is_not_reported_beside_its_cause():
    settings = SignalSettings(patience=10, window=70, scale_rewards="batch")
    assert causes(rows_of(200, **{**FLAT, "signal/prompt_variance_share": 1.0}), settings) == ["no_signal"]


@pytest.mark.parametrize("scale, expected", [("batch", ["prompt_variance"]), ("group", []), ("none", [])])
def test_prompt_variance_matters_where_advantages_are_divided_by_it(scale, expected):
    rows = rows_of(12, **{"signal/prompt_variance_share": 0.89})
    found = listen(rows, SignalSettings(scale_rewards=scale))
    assert [cause for _, cause, _ in found] == expected
    assert all("89% of the reward variance" in s and "3.0 times too small" in s for _, _, s in found)


def test_drift_between_rollout_and_replay_is_judged_by_what_guidance_does_to_rounding():
    for guidance, drift, expected in ((1, 0.029, []), (1, 0.08, ["replay_drift"]), (5, 0.2, []), (5, 0.6168, [
        "replay_drift"]), (None, 0.6168, [])):  # fmt: skip
        rows = rows_of(12, **{"logps/drift_mean": drift})
        assert causes(rows, SignalSettings(guidance_scale=guidance)) == expected, (guidance, drift)


def test_conditional_log_probs_at_guidance_differ_from_the_sampled_ones_on_purpose():
    def guidance(**settings):
        return monitor_settings(JanusGRPOConfig(report_to="none", **settings), 100, 16).guidance_scale

    assert guidance(guidance_scale=3.0) == 3.0 and guidance(guidance_scale=3.0, logp_guidance="conditional") is None
    assert guidance(guidance_scale=1.0, logp_guidance="conditional") == guidance(guidance_scale=3.0, task="i2t") == 1.0


def test_a_kl_of_billions_from_a_few_tokens_is_named_at_once_and_a_small_one_is_not():
    rows = [*rows_of(10), *rows_of(1, first=11, kl=3e9)]
    ((step, cause, sentence),) = listen(rows)
    assert (step, cause) == (11, "kl_explosion") and "KL 3e+09 nats a token" in sentence
    assert causes(rows_of(30, kl=0.4)) == []


def noisy(count: int, drift_to_noise: float, seed: int, window: int = 100, **values) -> list[dict]:
    """Rows whose reward gains `drift_to_noise` times its noise over `window` steps."""
    draw = random.Random(seed)
    noise = 0.06
    return [
        {**row, "reward": 0.5 + noise * (drift_to_noise * i / window + draw.gauss(0, 1))}
        for i, row in enumerate(rows_of(count, **values))
    ]


def test_the_published_run_that_learned_nothing_is_named_and_the_one_that_did_is_not():
    # UniRL#141: batch scaling, drift .0021 of noise .0217 over 100 rollouts; group scaling, .0117 of .0230 over 60.
    pattern = (1, -1, -1, 1)
    dead = [{**r, "reward": 0.78 + 0.0021 * i / 99 + 0.0217 * pattern[i % 4]} for i, r in enumerate(rows_of(100))]
    alive = [{**r, "reward": 0.78 + 0.0117 * i / 59 + 0.0230 * pattern[i % 4]} for i, r in enumerate(rows_of(60))]
    ((step, cause, sentence),) = listen(dead)
    assert (step, cause) == (100, "flat_reward") and "drift is 0.10 of its step-to-step noise" in sentence
    assert causes(alive) == []


def test_a_reward_without_trend_is_named_soon_after_the_window():
    runs = [noisy(200, 0.0, seed) for seed in range(200)]
    in_time = [any(flat_reward(run[:n], SignalSettings()) for n in range(100, 121)) for run in runs]
    at_last = [any(flat_reward(run[:n], SignalSettings()) for n in range(100, 201, 5)) for run in runs]
    assert sum(in_time) >= 0.75 * len(runs) and sum(at_last) >= 0.97 * len(runs)


def test_a_falling_reward_is_named_and_one_that_has_risen_and_stays_there_is_not():
    assert causes(noisy(150, -3.0, 0)) == ["falling_reward"]
    peak = 0.5 + 0.06 * 5
    risen = [*noisy(100, 5.0, 0), *({**row, "reward": row["reward"] + peak - 0.5} for row in noisy(200, 0.0, 1))]
    assert causes([{**row, "step": step} for step, row in enumerate(risen, start=1)]) == []


def mixed(t2i: list[dict], i2t: list[dict]) -> list[dict]:
    """Two tasks in turn, at different levels of reward; what is logged by task stands beside what is logged jointly."""
    pairs = zip(t2i, i2t, strict=True)
    rows = [row for a, b in pairs for row in ({**a, "reward/t2i": a["reward"]}, lowered(b))]
    return [{**row, "step": step} for step, row in enumerate(rows, start=1)]


def lowered(row: dict) -> dict:
    return {**row, "reward": row["reward"] - 0.4, "reward/i2t": row["reward"] - 0.4}


def test_tasks_of_a_mixed_run_are_judged_apart():
    flat, rising = noisy(60, 0.0, 3), noisy(60, 3.0, 4, window=60)
    assert causes(mixed(flat, flat)) == ["flat_reward"]
    assert causes(mixed(flat, rising)) == []
    falling = noisy(60, -4.0, 5, window=60)
    assert causes(mixed(rising, falling)) == ["falling_reward"]


def of_task(row: dict, task: str) -> dict:
    return row | {f"{key}/{task}": value for key, value in row.items() if key not in ("step", "grad_norm")}


def in_turn(order: str, **of: dict) -> list[dict]:
    """Rows of both tasks, `t` or `i` for each."""
    names = {"t": "t2i", "i": "i2t"}
    rows = zip(rows_of(len(order)), order, strict=True)
    return [of_task({**row, **of.get(names[letter], {})}, names[letter]) for row, letter in rows]


def test_a_task_without_signal_is_named_and_ends_no_run():
    settings = SignalSettings(patience=10)
    ((step, cause, sentence),) = listen(in_turn("ti" * 20, t2i=FLAT), settings)
    assert (step, cause) == (19, "no_signal_of_a_task") and sentence.startswith("Task t2i: no group")
    assert cause not in DEAD
    assert causes(in_turn("ti" * 20, t2i=FLAT, i2t=FLAT), settings) == ["no_signal"]


def test_norms_and_entropies_of_a_rare_task_are_judged_by_its_own():
    rows = in_turn("iiiiiiiiiiiit" * 6, t2i={"grad_norm": 15.0})
    for row in rows:
        del row["entropy/text" if "reward/t2i" in row else "entropy/image"]
    assert causes(rows) == []


def test_rollouts_of_one_prompt_that_differ_in_difficulty_do_not_read_as_one_constant():
    rows = [{**row, "reward": 0.1 * i} for i, row in enumerate(rows_of(10, **FLAT))]
    ((_, _, sentence),) = listen(rows, SignalSettings(patience=10))
    assert "rewards differ between prompts" in sentence


# ---- healthy runs ---------------------------------------------------------------------------------------------------


def read_log(path: Path) -> list[dict]:
    content = json.loads(path.read_text())
    return [dict(zip(content["keys"], row, strict=True)) for row in content["rows"]]


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
@pytest.mark.parametrize("every", [1, 5])
def test_the_default_tiny_runs_are_left_alone(path, every):
    """The logs of `recipes/tiny/t2i.yaml` and `i2t.yaml`, as logged at every step and as averaged over five."""
    rows = read_log(path)
    averaged = [
        {key: sum(row[key] for row in part) / every if key != "step" else part[-1]["step"] for key in part[0]}
        for part in (rows[i : i + every] for i in range(0, len(rows), every))
    ]
    settings = SignalSettings(max_entropy={"text": math.log(69), "image": math.log(128)})
    assert len(averaged) * every >= 120 and listen(averaged, settings) == []


def healthy(seed: int, count: int = 130) -> list[dict]:
    """A learning run at the noise of the tiny ones: drift over noise from 1.6, then flat; sparse and spiky signals."""
    draw = random.Random(seed)
    gain, noise, knee = draw.uniform(1.6, 5.0), draw.uniform(0.02, 0.1), draw.uniform(0.6, 1.2) * count
    rows = []
    for row in rows_of(count):
        time = min(1.0, row["step"] / knee)
        row["reward"] = 0.4 + noise * (gain * time + draw.gauss(0, 1))
        row["grad_norm"] = 0.5 * math.exp(draw.gauss(0, 0.6))
        row["signal/flat_groups"] = sum(draw.random() < 0.3 + 0.4 * time for _ in range(8)) / 8
        row["signal/prompt_variance_share"] = min(1.0, max(0.0, draw.gauss(0.4, 0.2)))
        row["entropy/text"] = 0.5 * (1 - 0.7 * time) * math.exp(draw.gauss(0, 0.2))
        row["entropy/image"] = 2.0 * (1 - 0.3 * time) * math.exp(draw.gauss(0, 0.1))
        row["kl"], row["logps/drift_mean"] = 0.3 * time * draw.uniform(0.5, 1.5), 0.02 * math.exp(draw.gauss(0, 0.2))
        rows.append(row)
    return rows


def test_simulated_healthy_runs_are_left_alone_in_99_of_100():
    settings = SignalSettings(scale_rewards="batch", max_entropy={"text": math.log(69), "image": math.log(128)})
    spoken = [found for seed in range(200) if (found := listen(healthy(seed), settings))]
    assert len(spoken) <= 2, spoken
