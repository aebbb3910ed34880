"""The learning-signal monitor in runs: those that are dead on purpose are named within 20 steps, once, on all ranks."""

import logging
from types import SimpleNamespace

import pytest
from transformers import TrainerControl

from janus_trl.configs import JanusGRPOConfig
from janus_trl.monitor import SignalMonitorCallback
from janus_trl.run_log import read_messages
from janus_trl.signal_rules import RULES, SignalSettings
from tests.grpo import ascending, steps
from tests.monitor_rows import FLAT, rows_of


def said(trainer) -> dict[str, str]:
    return {cause: sentence for _, cause, sentence in read_messages(trainer.state.log_history)}


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
