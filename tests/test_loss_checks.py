"""Options of the loss that cannot work are refused, with field, value, rule and fix, before any weights load."""

import math
import re

import pytest

from janus_trl.configs import JanusGRPOConfig
from janus_trl.grpo_trainer import JanusGRPOTrainer
from janus_trl.loss_checks import check_entropy_targets
from janus_trl.modeling import JanusForInterleavedGeneration
from janus_trl.scripts import grpo
from tests.grpo import ascending, prompts_dataset
from tests.tiny import build_config, build_processor

NAN, INF = float("nan"), float("inf")
REFUSED = [
    ({"text_loss_weight": -0.5}, "text_loss_weight = -0.5 must be >= 0 (0 leaves these ids out of the loss)"),
    ({"image_loss_weight": NAN}, "image_loss_weight = nan must be >= 0"),
    ({"image_loss_weight": INF}, "image_loss_weight = inf must be finite"),
    ({"text_loss_weight": 0.0, "image_loss_weight": 0.0}, "both 0: nothing is trained. Set one above 0"),
    ({"epsilon_text": 0.0}, "epsilon_text = 0.0 must be a finite number > 0"),
    ({"epsilon_high_image": -1.0}, "epsilon_high_image = -1.0 must be a finite number > 0"),
    ({"epsilon_image": 0.1, "importance_sampling_level": "sequence", "loss_type": "grpo"},
     "epsilon_image = 0.1 needs importance_sampling_level: token"),
    ({"epsilon_high_text": 0.1, "loss_type": "sapo"}, "no effect with loss_type = 'sapo'"),
    ({"entropy_coef_text": NAN}, "entropy_coef_text = nan must be a finite number"),
    ({"entropy_target_image": 0.0}, "entropy_target_image = 0.0 must be a finite number > 0 (nats"),
    ({"entropy_target_text": -2.0}, "entropy_target_text = -2.0 must be a finite number > 0"),
    ({"entropy_coef_lr": 0.0}, "entropy_coef_lr = 0.0 must be a finite number > 0 (ReasonGen-R1 trained with 5e-5)"),
    ({"entropy_coef_limit": -5e-3}, "entropy_coef_limit = -0.005 must be a finite number > 0"),
    ({"entropy_coef_image": 0.1, "entropy_target_image": 1.0},
     "entropy_coef_image = 0.1 is where the control of entropy_target_image starts"),
    ({"entropy_coef": 0.01, "entropy_coef_text": 0.01}, "entropy_coef = 0.01, use_adaptive_entropy = False act on"),
    ({"use_adaptive_entropy": True, "entropy_target_text": 2.0}, "Set entropy_coef: 0.0 and use_adaptive_entropy: f"),
    ({"rollout_correction": "truncated"}, "must be one of: none, truncate, mask. Did you mean 'truncate'?"),
    ({"rollout_correction_max": 0.0}, "rollout_correction_max = 0.0 must be a finite number > 0 (3.0 is TRL's"),
    ({"rollout_correction_min": -0.1}, "rollout_correction_min = -0.1 must be >= 0"),
    ({"rollout_correction_min": 3.0}, "rollout_correction_min = 3.0 must be < rollout_correction_max = 3.0"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_a_refused_option_names_value_rule_and_fix(tmp_path, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        JanusGRPOConfig(output_dir=str(tmp_path), report_to="none", **settings)


def test_boundary_values_are_accepted_and_all_options_are_off_by_default(tmp_path):
    args = JanusGRPOConfig(output_dir=str(tmp_path), report_to="none")
    assert args.text_loss_weight == args.image_loss_weight == 1 and args.rollout_correction == "none"
    assert args.entropy_coef_text == args.entropy_coef_image == 0
    assert args.entropy_target_text is args.entropy_target_image is args.epsilon_text is args.epsilon_image is None
    JanusGRPOConfig(
        output_dir=str(tmp_path), report_to="none", text_loss_weight=0.0, entropy_coef_text=-0.1,
        entropy_coef_image=5e-3, entropy_target_image=2.0, rollout_correction_min=0.0, entropy_coef=0.0,
    )  # fmt: skip


TARGETS = [("text", 109), ("image", 16)]  # the tiny Janus has 109 text ids and 16 codes


@pytest.mark.parametrize(("name", "count"), TARGETS)
def test_a_target_above_the_entropy_of_uniform_ids_is_refused_before_weights_load(
    janus_folder, tmp_path, monkeypatch, name, count
):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(JanusForInterleavedGeneration, "from_pretrained", refuse)
    target = math.log(count) + 1e-3
    options = {"max_reasoning_length": 6, f"entropy_target_{name}": target}
    args = JanusGRPOConfig(output_dir=str(tmp_path), report_to="none", **options)
    message = f"entropy_target_{name} = {target} must be <= ln {count} = {math.log(count):.3f} nats"
    with pytest.raises(ValueError, match=re.escape(message)):
        JanusGRPOTrainer(janus_folder, ascending, args, prompts_dataset())


@pytest.mark.parametrize(("name", "count"), TARGETS)
def test_a_target_at_the_bound_is_accepted(tmp_path, name, count):
    options = {"max_reasoning_length": 6, f"entropy_target_{name}": math.log(count) - 1e-9}
    args = JanusGRPOConfig(output_dir=str(tmp_path), report_to="none", **options)
    check_entropy_targets(args, build_config(build_processor()))


def test_the_script_refuses_the_target_in_its_dry_run():
    with pytest.raises(ValueError, match=r"entropy_target_image = 9.0 must be <= ln 128 = 4.852 nats.*Lower it"):
        grpo.configure(["--config", "recipes/tiny/t2i.yaml", "--entropy_target_image", "9.0", "--dry_run", "true"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"image_loss_weight": 0.0},
            "image_loss_weight = 0.0: task = 't2i' with max_reasoning_length = 0 samples nothing",
        ),
        ({"task": "i2t", "text_loss_weight": 0.0}, "text_loss_weight = 0.0: task = 'i2t' samples nothing else"),
        (
            {"entropy_target_text": 1.0},
            "entropy_target_text = 1.0 has no effect: task = 't2i' with max_reasoning_length",
        ),
        (
            {"task": "i2t", "entropy_target_image": 1.0},
            "entropy_target_image = 1.0 has no effect: task = 'i2t' samples no",
        ),
        (
            {"loss_type": "cispo", "epsilon_image": 0.2},
            "epsilon_image = 0.2 is a distance from 1, and loss_type = 'cispo'",
        ),
    ],
)
def test_options_that_leave_nothing_to_train_or_have_no_effect_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        JanusGRPOConfig(output_dir=str(tmp_path), report_to="none", **options)
