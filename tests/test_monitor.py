"""The learning-signal monitor: runs that are dead on purpose are named within 20 steps, healthy ones are left alone."""

import json
import logging
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import TrainerControl

from janus_trl.configs import JanusGRPOConfig
from janus_trl.monitor import SignalMonitorCallback, monitor_settings
from janus_trl.run_log import read_messages
from janus_trl.signal_rules import DEAD, RULES, SignalSettings, flat_reward
from tests.grpo import ascending, steps

HEALTHY = sorted((Path(__file__).parent / "data").glob("log_tiny_*.json"))


def said(trainer) -> dict[str, str]:
    return {cause: sentence for _, cause, sentence in read_messages(trainer.state.log_history)}


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


# ---- dead runs of the tiny model ------------------------------------------------------------------------------------


def constant(completions, **_):
    return [0.25] * len(completions)


def difficulty(completions, **_):
    return [0.0, 0.0, 1.0, 1.0]


def nothing(completions, **_):
    return [None] * len(completions)


def mostly_difficulty(completions, **_):
    return [0.0, 0.1, 1.0, 1.1]


def one_code(completion_ids, **_):
    """Pictures of a single code; the code is common enough in the random Janus to be found at once."""
    return [float(ids.count(111)) for ids in completion_ids]


T2I = {"max_steps": 6}
I2T = {"max_steps": 6, "task": "i2t", "max_completion_length": 2}
DEAD_RUNS = {
    "constant reward": ("no_signal", "got the reward 0.25", constant, T2I),
    "reward that does not read the completion": (
        "no_signal", "differ between prompts (standard deviation 0.71)", difficulty, {**T2I, "num_generations": 2},
    ),
    "copies": ("no_signal", "are the same. Raise temperature", one_code, {**T2I, "image_temperature": 1e-4}),
    "unscorable": ("unscorable", "every reward function returned None", nothing, T2I),
    "truncated": (
        "zero_gradient", "Raise max_completion_length", ascending, {**I2T, "mask_truncated_completions": True},
    ),
    "learning rate": ("zero_learning_rate", "The learning rate of the last 5 steps was 0", ascending,
                      {**I2T, "learning_rate": 0.0}),
    "prompt difficulty": (
        "prompt_variance", "99% of the reward variance lies between prompts", mostly_difficulty,
        {**T2I, "num_generations": 2, "scale_rewards": "batch"},
    ),
    "entropy collapse": ("entropy_image", "collapsed from", one_code, {"max_steps": 14, "learning_rate": 3e-2}),
    "entropy explosion": (  # the decay takes a fifth of every weight at each step
        "entropy_image", "exploded from", ascending, {"max_steps": 12, "weight_decay": 20.0},
    ),
    "reward hacking": (
        "kl_explosion", "The reward rises while the policy leaves the reference", one_code,
        {"max_steps": 6, "learning_rate": 3e-2, "beta": 1e-4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEAD_RUNS)
def test_a_dead_run_is_named_within_20_steps(trainer_of, caplog, name):
    cause, words, reward, settings = DEAD_RUNS[name]
    trainer = trainer_of(reward, no_signal_patience=5, **settings)
    with caplog.at_level(logging.WARNING, logger="janus_trl.monitor"):
        trainer.train()
    assert words in said(trainer).get(cause, f"silent, but: {said(trainer)}")
    assert [words in record.message for record in caplog.records].count(True) == 1  # once


def test_a_loss_that_does_not_reach_the_weights_is_named(trainer_of):
    trainer = trainer_of(max_steps=6, no_signal_patience=5)
    scores = trainer._get_per_token_logps_and_entropies

    def cut(*args, **kwargs):
        logps, entropies, aux_loss = scores(*args, **kwargs)
        return logps.detach() + 0 * logps, entropies, aux_loss

    trainer._get_per_token_logps_and_entropies = cut
    trainer.train()
    assert [log["grad_norm"] for log in steps(trainer)] == [0] * 6
    assert "the loss does not reach a trained weight" in said(trainer)["zero_gradient"]


def test_a_replay_at_another_guidance_than_the_rollout_is_named(trainer_of):
    trainer = trainer_of(max_steps=6, no_signal_patience=5, learning_rate=1e-4)
    trainer._guidance_scale = lambda mode: 5.0
    sampling = trainer.sampling_settings
    trainer.sampling_settings = lambda mode: type(s := sampling(mode))(**{**vars(s), "guidance_scale": 1.0})
    trainer.train()
    assert "what is trained is not what was sampled" in said(trainer)["replay_drift"]


def test_spikes_of_the_gradient_are_named(trainer_of):
    step = iter(range(100))

    def spiky(completions, **_):
        scale = 100.0 if next(step) in (12, 14) else 1.0
        return [scale * i for i in range(len(completions))]

    settings = {"task": "i2t", "max_completion_length": 4, "scale_rewards": "none", "learning_rate": 1e-4}
    trainer = trainer_of(spiky, max_steps=16, no_signal_patience=5, **settings)
    trainer.train()
    assert list(said(trainer)) == ["gradient_spikes"] and "2 times" in said(trainer)["gradient_spikes"]
    assert read_messages(trainer.state.log_history)[0][0] == 15


@pytest.mark.slow
def test_a_reward_that_does_not_rise_is_named_within_20_steps_of_the_window(trainer_of):
    step = iter(range(1000))

    def wavering(completions, **_):
        level = (1, -1, -1, 1)[next(step) % 4]  # no trend over any four steps
        return [level + 0.1 * i for i in range(len(completions))]

    settings = {"task": "i2t", "max_completion_length": 2, "learning_rate": 1e-6, "monitor_window": 70}
    trainer = trainer_of(wavering, max_steps=90, **settings)
    trainer.train()
    assert list(said(trainer)) == ["flat_reward"]


# ---- once, on all ranks, also after a resume ------------------------------------------------------------------------


def test_a_stopped_run_ends_like_a_finished_one(trainer_of):
    trainer = trainer_of(constant, max_steps=20, no_signal_patience=3, stop_on_no_signal=True)
    trainer.train()
    assert trainer.state.global_step == 3 and "train_runtime" in trainer.state.log_history[-1]


def test_the_monitor_can_be_switched_off(trainer_of):
    trainer = trainer_of(constant, max_steps=4, no_signal_patience=2, monitor=False)
    trainer.train()
    assert said(trainer) == {} and trainer.state.global_step == 4


def test_a_resumed_run_does_not_repeat_what_was_said(trainer_of, tmp_path, caplog):
    settings = {"no_signal_patience": 2, "save_strategy": "steps", "save_steps": 3}
    with caplog.at_level(logging.WARNING, logger="janus_trl.monitor"):
        trainer_of(constant, max_steps=3, **settings).train()
        assert len(caplog.records) == 1
        trainer = trainer_of(constant, max_steps=6, **settings)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert trainer.state.global_step == 6 and len(caplog.records) == 1
    assert [step for step, _, _ in read_messages(trainer.state.log_history)] == [2]


def test_other_ranks_keep_the_finding_and_stop_but_do_not_print(caplog):
    callback, control = SignalMonitorCallback(SignalSettings(patience=2), stop_on_no_signal=True), TrainerControl()
    state = SimpleNamespace(log_history=rows_of(3, **FLAT), global_step=3, is_world_process_zero=False)
    with caplog.at_level(logging.WARNING):
        callback.on_log(None, state, control, logs=state.log_history[-1])
    assert control.should_training_stop and not caplog.records
    assert [cause for _, cause, _ in read_messages(state.log_history)] == ["no_signal"]


@pytest.mark.parametrize("field, value", [("monitor_window", 9), ("no_signal_patience", 1)])
def test_windows_that_are_noise_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} = {value} must be >="):
        JanusGRPOConfig(report_to="none", **{field: value})


def test_stopping_without_the_monitor_is_refused():
    with pytest.raises(ValueError, match="stop_on_no_signal = True needs monitor = True"):
        JanusGRPOConfig(report_to="none", stop_on_no_signal=True, monitor=False)


# ---- rules on rows --------------------------------------------------------------------------------------------------

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


def test_every_rule_has_a_dead_run_that_it_names():
    named = {cause for cause, *_ in DEAD_RUNS.values()}
    others = {
        "no_signal_of_a_task",
        "replay_drift",
        "gradient_spikes",
        "flat_reward",
        "falling_reward",
        "entropy_text",
    }  # tested one by one
    assert named | others == set(RULES)
