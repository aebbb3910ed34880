"""Old log-probs come from the replay: ratios before and after an update, and the warnings about them."""

import logging
import math

import pytest
import torch

from tests.grpo import steps
from tests.loss_batches import build_trainer

UNALIGNED = [
    {"num_iterations": 2},
    {"steps_per_generation": 2},  # one update on each half of a rollout
    {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "per_device_train_batch_size": 2},
    {"gradient_accumulation_steps": 2, "num_iterations": 2, "per_device_train_batch_size": 2},
]


@pytest.mark.parametrize("settings", UNALIGNED)
def test_before_the_first_update_of_a_rollout_every_ratio_is_1(janus_folder, tmp_path, settings):
    trainer = build_trainer(janus_folder, tmp_path, max_steps=4, learning_rate=3e-3, beta=0.05, **settings)
    trainer.train()
    logs = steps(trainer)
    assert [("ratio/first_max" in log) for log in logs] == [True, False] * 2  # a rollout is for two steps
    for log in logs[::2]:
        assert log["ratio/first_mean"] <= log["ratio/first_max"] < 1e-5
    assert all(log["ratio/max"] > 1 + 1e-4 for log in logs[1::2])  # after an update
    assert all(log["logps/drift_max"] < 1e-5 for log in logs)  # against the policy of the rollout


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2, "steps_per_generation": 1}])
def test_with_one_update_per_rollout_the_ratio_is_1_by_construction(janus_folder, tmp_path, settings):
    trainer = build_trainer(janus_folder, tmp_path, max_steps=2, learning_rate=1e-2, **settings)
    trainer.train()
    assert all(log["ratio/first_max"] == 0 and log["ratio/max"] == 1 for log in steps(trainer))


def test_in_bf16_the_ratio_before_an_update_is_1_within_rounding(janus_folder, tmp_path, caplog):
    trainer = build_trainer(janus_folder, tmp_path, bf16=True, num_iterations=2, max_steps=2, guidance_scale=5.0)
    trainer.train()
    first, second = steps(trainer)
    assert first["ratio/first_max"] < 0.05 and not caplog.records
    assert "ratio/first_max" not in second


def test_old_log_probs_of_another_geometry_are_warned_about_once(janus_folder, tmp_path, caplog):
    trainer = build_trainer(janus_folder, tmp_path, num_iterations=2, max_steps=4)
    generate = trainer._generate_and_score_completions

    def off(inputs):
        output = generate(inputs)
        return {**output, "old_per_token_logps": output["old_per_token_logps"] - math.log(1.1)}

    trainer._generate_and_score_completions = off
    with caplog.at_level(logging.WARNING, "janus_trl"):
        trainer.train()
    assert steps(trainer)[0]["ratio/first_max"] == pytest.approx(0.1, rel=1e-3)
    (record,) = [record for record in caplog.records if record.name.startswith("janus_trl")]
    assert "ratio/first_max = 0.1" in record.message and "float32" in record.message


def test_an_update_that_destroys_the_policy_is_warned_about_once(janus_folder, tmp_path, caplog):
    trainer = build_trainer(
        janus_folder, tmp_path, num_iterations=2, max_steps=4, learning_rate=1.0, lr_scheduler_type="constant"
    )
    with caplog.at_level(logging.WARNING, "janus_trl"):
        trainer.train()
    assert max(log["ratio/max"] for log in steps(trainer)) > 10
    (record,) = [record for record in caplog.records if "ratio/max" in record.message]
    assert "Lower learning_rate" in record.message and "warmup_steps" in record.message


def test_ratios_of_a_healthy_run_are_not_warned_about(janus_folder, tmp_path, caplog):
    trainer = build_trainer(janus_folder, tmp_path, num_iterations=2, max_steps=4, learning_rate=1e-3)
    with caplog.at_level(logging.WARNING, "janus_trl"):
        trainer.train()
    assert not [record for record in caplog.records if "ratio" in record.message]
    assert torch.isfinite(torch.tensor([log["grad_norm"] for log in steps(trainer)])).all()
