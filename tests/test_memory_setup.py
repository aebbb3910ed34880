"""The machine, the settings and the rewards that a memory plan is made for."""

from pathlib import Path

import pytest
from trl import ModelConfig

from janus_trl.configs import JanusGRPOConfig
from janus_trl.memory_setup import Machine, Run, machine_from, reward_bytes

ROOT = Path(__file__).parent.parent


def test_rewards_known_by_name_count_where_they_are_on_the_gpu():
    whole = reward_bytes(["pickscore", "format"])
    assert whole == 4 * 986_109_441
    assert reward_bytes([{"name": "pickscore", "args": {"dtype": "bfloat16"}}]) == whole / 2
    assert reward_bytes([{"name": "pickscore", "args": {"device": "cpu"}}, "my_module:reward"]) == 0


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("zero3", Machine(8, 3)),
        ("zero2", Machine(8, 2)),
        ("ddp", Machine(8)),
        ("zero3_offload", Machine(8, 3, True, True)),
    ],
)
def test_the_machine_is_that_of_the_accelerate_file(name, machine, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert machine_from(name, 8) == machine == machine_from(f"accelerate_configs/{name}.yaml", 8)
    assert not machine_from("cpu", None).gpu


def test_the_machine_of_an_accelerate_file_that_names_one_of_deepspeed(tmp_path):
    settings, file = tmp_path / "zero.json", tmp_path / "own.yaml"
    file.write_text(f"num_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: {settings}\n")
    with pytest.raises(ValueError, match="deepspeed_config_file = .*zero.json of the accelerate file does not exist"):
        machine_from(str(file), None)
    settings.write_text('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}')
    assert machine_from(str(file), None) == Machine(2, 3, offload_optimizer=True)
    settings.write_text('{"zero_optimization": {"stage": 2}}')
    assert machine_from(str(file), 4) == Machine(4, 2)


def test_the_machine_of_a_running_launcher_is_in_its_environment(monkeypatch):
    for name, value in (
        ("USE_DEEPSPEED", "true"),
        ("DEEPSPEED_ZERO_STAGE", "3"),
        ("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu"),
    ):
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert machine_from(None, None) == Machine(4, 3, offload_optimizer=True)


def test_a_run_is_read_from_the_recipe(tmp_path):
    args = JanusGRPOConfig(
        str(tmp_path),
        beta=0.1,
        num_generations=4,
        per_device_train_batch_size=8,
        guidance_scale=1.0,
        rollout_batch_size=2,
        bf16=False,
    )
    run = Run.of(args, ModelConfig(dtype="bfloat16", use_peft=True, lora_r=4, lora_target_modules=["q_proj"]), 10, 8, 4)
    assert (run.micro_batch, run.rows, run.group, run.rollout_batch_size, run.prompt_length) == (4, 8, 4, 2, 10)
    assert run.reference and not run.guided and run.weight_bytes == 2
    assert run.lora_rank == 4 and run.lora_targets == ("q_proj",)
