"""Every refused field says its name, its value, the rule and the fix, before any weights are loaded."""

import re

import pytest
import torch
from trl import ModelConfig

from janus_trl.config_checks import check_batch_sizes
from janus_trl.configs import JanusGRPOConfig, JanusSFTConfig
from janus_trl.script_arguments import PROJECTIONS, lora_config


@pytest.fixture
def grpo(tmp_path):
    return lambda **settings: JanusGRPOConfig(output_dir=str(tmp_path), report_to="none", **settings)


@pytest.mark.parametrize("config", [JanusGRPOConfig, JanusSFTConfig])
def test_bf16_with_deepspeed_needs_a_gpu(config, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match="bf16 = True, but no GPU is visible.*Set bf16: false"):
        config(output_dir=str(tmp_path), report_to="none", bf16=True)


@pytest.fixture
def sft(tmp_path):
    return lambda **settings: JanusSFTConfig(output_dir=str(tmp_path), report_to="none", **settings)


REFUSED = [
    ({"task": "t2v"}, "task = 't2v'", "t2i, i2t"),
    ({"logp_guidance": "both"}, "logp_guidance = 'both'", "guided, conditional"),
    ({"guidance_scale": 0.5}, "guidance_scale = 0.5", "must be >= 1 .*published with 5"),
    ({"guidance_scale": float("nan")}, "guidance_scale = nan", "must be >= 1"),
    ({"eval_guidance_scale": 0.0}, "eval_guidance_scale = 0.0", "must be >= 1"),
    ({"max_reasoning_length": -1}, "max_reasoning_length = -1", "must be >= 0 .*0 opens the image at once"),
    ({"rollout_batch_size": 0}, "rollout_batch_size = 0", "must be >= 1 .*unset"),
    ({"sample_steps": -5}, "sample_steps = -5", "must be >= 0"),
    ({"num_samples": -1}, "num_samples = -1", "must be >= 0"),
    ({"temperature": 0.0}, "temperature = 0.0", "must be > 0. Use 1.0"),
    ({"image_temperature": -1.0}, "image_temperature = -1.0", "must be > 0. Use 1.0"),
    ({"use_vllm": True}, "use_vllm = True", "vLLM has no Janus.*Set use_vllm: False"),
    (
        {"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching = True",
        "Set use_transformers_continuous_batching: False",
    ),
    ({"use_liger_kernel": True}, "use_liger_kernel = True", "Set use_liger_kernel: False"),
    ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32 = True", "Set cast_lm_head_to_fp32: False"),
    ({"top_p": 0.9}, "top_p = 0.9", "full softmax.*Set top_p: 1.0"),
    ({"top_k": 50}, "top_k = 50", "full softmax.*Set top_k: 0"),
    ({"min_p": 0.1}, "min_p = 0.1", "full softmax.*Set min_p: None"),
    ({"repetition_penalty": 1.1}, "repetition_penalty = 1.1", "full softmax.*Set repetition_penalty: 1.0"),
    ({"fp16": True}, "fp16 = True", "bf16"),
    ({"log_multimodal": True}, "log_multimodal = True", "Remove it"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "value", "rule"), REFUSED, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_a_refused_field_names_value_rule_and_fix(grpo, settings, value, rule):
    with pytest.raises(ValueError, match=f"{re.escape(value)}.*{rule}"):
        grpo(**settings)


@pytest.mark.parametrize(("settings", "near"), [
    ({"task": "i2r"}, "i2t"), ({"logp_guidance": "guide"}, "guided"), ({"logp_guidance": "Conditional"}, "conditional"),
])  # fmt: skip
def test_a_mistyped_value_is_answered_with_the_nearest(grpo, settings, near):
    with pytest.raises(ValueError, match=f"must be one of: .*Did you mean '{near}'"):
        grpo(**settings)


def test_a_value_near_to_none_gets_the_list_only(grpo):
    with pytest.raises(ValueError, match="must be one of: t2i, i2t, both[.]$"):
        grpo(task="video")


def test_defaults_that_are_set_on_purpose(grpo):
    args = grpo()
    assert args.disable_dropout and not args.log_multimodal and not args.remove_unused_columns
    assert args.num_generations_eval == 1 and args.guidance_scale == 5.0 and args.eval_guidance_scale is None
    assert args.task == "t2i" and args.max_reasoning_length == 0 and args.logp_guidance == "guided"


def test_boundary_values_are_accepted(grpo):
    args = grpo(
        guidance_scale=1.0, eval_guidance_scale=1.0, max_reasoning_length=0, rollout_batch_size=1, sample_steps=0,
        num_samples=0, temperature=1e-6, top_k=0, top_p=1.0,
    )  # fmt: skip
    assert args.guidance_scale == 1.0 and args.rollout_batch_size == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without GPU")
def test_without_gpu_the_run_is_on_cpu_in_float32(grpo, sft):
    for args in (grpo(), sft()):
        assert args.use_cpu and args.bf16 is False and args.device.type == "cpu"


def test_more_processes_than_accelerate_sees_are_refused(grpo, monkeypatch):
    from types import SimpleNamespace

    from janus_trl.config_checks import check_world_size

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes were started, but accelerate sees 1.*accelerate_configs/"):
        check_world_size(SimpleNamespace(world_size=1))
    check_world_size(SimpleNamespace(world_size=2))


# ---- batch sizes ----------------------------------------------------------------------------------------------------


def test_batch_sizes_that_are_no_whole_groups_are_refused_with_the_sum_and_two_fixes(grpo):
    with pytest.raises(ValueError) as error:
        grpo(per_device_train_batch_size=3, gradient_accumulation_steps=2, num_generations=4)
    message = str(error.value)
    assert "1 processes x per_device_train_batch_size 3 x gradient_accumulation_steps 2 = 6" in message
    assert "num_generations = 4" in message and "completions, not prompts" in message
    assert "Set gradient_accumulation_steps: 4 (12 completions a step) or num_generations: 3" in message


@pytest.mark.parametrize(("processes", "per_device", "accumulation", "group"), [
    (1, 3, 2, 4), (8, 1, 1, 6), (2, 5, 1, 4), (1, 1, 1, 8), (3, 7, 1, 2),
])  # fmt: skip
def test_both_fixes_of_the_message_are_accepted(processes, per_device, accumulation, group):
    with pytest.raises(ValueError) as error:
        check_batch_sizes(processes, per_device, accumulation, group)
    fixed = int(re.search(r"gradient_accumulation_steps: (\d+)", str(error.value))[1])
    check_batch_sizes(processes, per_device, fixed, group)
    if found := re.search(r"or num_generations: (\d+)", str(error.value)):
        check_batch_sizes(processes, per_device, accumulation, int(found[1]))
    else:
        size = int(re.search(r"or per_device_train_batch_size: (\d+)", str(error.value))[1])
        check_batch_sizes(processes, size, accumulation, group)


@pytest.mark.parametrize("extra", [
    {"steps_per_generation": 3}, {"generation_batch_size": 6}, {"generation_batch_size": 1}, {"steps_per_generation": 1}
])  # fmt: skip
def test_the_fixes_hold_where_the_generation_batch_has_its_own_field(extra):
    """What sets the generation batch is what the message has to name: more accumulation would change nothing."""
    with pytest.raises(ValueError) as error:
        check_batch_sizes(1, 2, 4, 4, **extra)
    (name,) = extra
    found = re.search(rf"Set {name}: (\d+)", str(error.value))
    assert found, str(error.value)
    check_batch_sizes(1, 2, 4, 4, **{name: int(found[1])})
    assert "gradient_accumulation_steps" not in str(error.value)


def test_the_proposed_batch_is_at_least_the_one_asked_for_and_fills_every_process(grpo, monkeypatch):
    with pytest.raises(ValueError, match=r"Set gradient_accumulation_steps: 8 \(24 completions a step\)"):
        check_batch_sizes(1, 3, 5, 4)
    with pytest.raises(ValueError, match="Set generation_batch_size: 24 or"):
        check_batch_sizes(2, 3, 1, 8, generation_batch_size=18)  # TRL wants a multiple of 2 x 3
    args = grpo(per_device_train_batch_size=3, num_generations=8, generation_batch_size=24)
    assert args.steps_per_generation == 8


def test_batch_sizes_that_are_whole_groups_pass():
    check_batch_sizes(8, 1, 1, 8)
    check_batch_sizes(1, 2, 4, 8)
    check_batch_sizes(1, 2, 1, 8, steps_per_generation=4)
    check_batch_sizes(1, 2, 1, 8, generation_batch_size=16)


@pytest.mark.parametrize("group", [0, 1])
def test_a_group_of_one_is_refused(group):
    with pytest.raises(ValueError, match=rf"num_generations = {group}.*at least 2. Set num_generations: 8"):
        check_batch_sizes(1, 8, 1, group)


def test_the_check_knows_the_number_of_processes(grpo, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"3 processes x per_device_train_batch_size 4"):
        grpo(per_device_train_batch_size=4, num_generations=8)


# ---- SFT ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_guidance_dropout_is_a_share(sft, value):
    with pytest.raises(ValueError, match=rf"guidance_dropout = {value} must lie in 0 … 1"):
        sft(guidance_dropout=value)


@pytest.mark.parametrize("settings", [{"max_length": 512}, {"packing": True}])
def test_sft_refuses_to_cut_images(sft, settings):
    with pytest.raises(ValueError, match="max_length and packing are not supported.*Remove them"):
        sft(**settings)


def test_sft_refuses_what_would_call_the_stock_forward_with_joint_ids(sft):
    with pytest.raises(ValueError, match="label_smoothing_factor = 0.1"):
        sft(label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="use_liger_kernel = True"):
        sft(use_liger_kernel=True)


def test_sft_refuses_float16(sft):
    with pytest.raises(ValueError, match="fp16 = True is not supported.*use bf16"):
        sft(fp16=True)


def test_sft_leaves_the_rows_to_the_collator(sft):
    args = sft(guidance_dropout=1.0)
    assert args.dataset_kwargs["skip_prepare_dataset"] is True and args.max_length is None
    assert not args.remove_unused_columns and sft(guidance_dropout=0.0).guidance_dropout == 0.0


# ---- LoRA -----------------------------------------------------------------------------------------------------------


def adapted(model, **settings) -> set[str]:
    from peft import get_peft_model

    wrapped = get_peft_model(model, lora_config(ModelConfig(use_peft=True, **settings)))
    return {n.split(".lora_A")[0] for n, _ in wrapped.named_parameters() if "lora_A" in n}


@pytest.mark.parametrize("names", [None, "all-linear", ["all-linear"], list(PROJECTIONS)])
def test_lora_reaches_the_seven_projections_of_the_language_model_only(model, names):
    modules = adapted(model, lora_target_modules=names)
    assert len(modules) == 2 * 7
    assert all(m.startswith("base_model.model.model.language_model.layers.") for m in modules)
    assert {m.rsplit(".", 1)[1] for m in modules} == set(PROJECTIONS)


def test_named_projections_are_taken_and_do_not_match_the_vision_tower(model):
    modules = adapted(model, lora_target_modules=["v_proj", "q_proj"])
    assert sorted(m.split("layers.")[1] for m in modules) == [
        "0.self_attn.q_proj", "0.self_attn.v_proj", "1.self_attn.q_proj", "1.self_attn.v_proj"
    ]  # fmt: skip


def test_lora_arguments_are_passed_on():
    config = lora_config(ModelConfig(use_peft=True, lora_r=3, lora_alpha=5, lora_dropout=0.25, use_rslora=True))
    assert (config.r, config.lora_alpha, config.lora_dropout, config.use_rslora) == (3, 5, 0.25, True)
    assert lora_config(ModelConfig()) is None


def test_an_unknown_projection_is_refused():
    with pytest.raises(
        ValueError, match=r"lora_target_modules: \['q_prj'\].*Use any of: q_proj, k_proj, v_proj.*'q_proj'\?"
    ):
        lora_config(ModelConfig(use_peft=True, lora_target_modules=["q_prj", "v_proj"]))
