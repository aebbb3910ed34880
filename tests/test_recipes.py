from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from trl import ModelConfig

from janus_trl.config_checks import check_batch_sizes
from janus_trl.configs import JanusGRPOConfig, JanusSFTConfig
from janus_trl.recipe import parse_recipe
from janus_trl.rewards import check_reward_specs
from janus_trl.script_arguments import JanusScriptArguments, lora_config
from janus_trl.scripts.sft import SFTScriptArguments

ROOT = Path(__file__).parent.parent
ACCELERATE_CONFIGS = sorted((ROOT / "accelerate_configs").rglob("*.y*ml"))
RECIPES = sorted((ROOT / "recipes").rglob("*.y*ml"))
HEADER = ("# Hardware:", "# Time:", "# Expected:", "# Launch:", "# Override:")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read_recipe(path: Path) -> tuple[JanusScriptArguments, JanusGRPOConfig | JanusSFTConfig, ModelConfig]:
    ours = (SFTScriptArguments, JanusSFTConfig) if "sft" in path.stem else (JanusScriptArguments, JanusGRPOConfig)
    return parse_recipe((*ours, ModelConfig), ["--config", str(path)])


def launch_processes(path: Path) -> int:
    """The number of processes of the recipe's own launch command."""
    text = path.read_text()
    command = text[text.index("# Launch:") : text.index("# Override:")]
    options = dict(word.split("=", 1) for word in command.split() if "=" in word)
    return int(options.get("NUM_PROCESSES", options.get("--num_processes", 1)))


# ---- accelerate files -----------------------------------------------------------------------------------------------


def test_the_named_accelerate_files_are_there():
    names = {path.stem for path in ACCELERATE_CONFIGS}
    assert names == {"cpu", "single_gpu", "ddp", "zero2", "zero3", "zero3_offload", "zero3_multinode"}


@pytest.mark.parametrize("path", ACCELERATE_CONFIGS, ids=name)
def test_accelerate_loads_the_file(path):
    config = load_config_from_file(str(path))
    assert config.num_processes >= 1
    assert config.mixed_precision == "no"  # the recipe's bf16 decides
    assert config.use_cpu == (path.stem == "cpu")  # the training arguments decide for the others
    stages = {"zero2": 2, "zero3": 3, "zero3_offload": 3, "zero3_multinode": 3}
    assert config.deepspeed_config.get("zero_stage") == stages.get(path.stem)


@pytest.mark.parametrize("path", ACCELERATE_CONFIGS, ids=name)
def test_batch_sizes_are_left_to_the_recipe(path):
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    for word in ("batch_size", "accumulation", "clipping", "optimizer:", "scheduler", "lr"):
        assert word not in text


# ---- recipes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_every_key_of_the_recipe_is_known_and_its_values_pass_the_checks(path):
    script, config, model = read_recipe(path)
    assert script.dataset_name and model.model_name_or_path
    if isinstance(config, JanusGRPOConfig):
        check_reward_specs(script.reward_funcs, None if config.task == "both" else config.task)
    lora_config(model)


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_no_key_is_given_twice(path):
    keys = [line.split(":")[0] for line in path.read_text().splitlines() if line[:1].isalpha()]
    assert sorted(keys) == sorted(set(keys))
    assert set(keys) == set(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_header_says_hardware_time_expectation_and_both_commands(path):
    text = path.read_text()
    for field in HEADER:
        assert field in text
    assert "make train-" in text
    assert f"RECIPE={name(path)}" in text or path.parent.name == "tiny"  # the default recipes need no RECIPE=


@pytest.mark.parametrize("path", [path for path in RECIPES if "sft" not in path.stem], ids=name)
def test_groups_fit_the_batch_of_the_launch_command(path):
    _, config, _ = read_recipe(path)
    check_batch_sizes(
        processes=launch_processes(path),
        per_device=config.per_device_train_batch_size,
        accumulation=config.gradient_accumulation_steps,
        num_generations=config.num_generations,
    )


@pytest.mark.parametrize("path", [path for path in RECIPES if path.parent.name != "tiny"], ids=name)
def test_full_fine_tuning_in_bf16_is_launched_with_deepspeed(path):
    # Plain AdamW on bf16 weights rounds updates of 1e-6 away; DeepSpeed keeps float32 master weights.
    _, config, model = read_recipe(path)
    assert config.bf16
    assert model.use_peft or "ACCELERATE=zero" in path.read_text()


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_output_folder_is_named_after_the_recipe(path):
    _, config, _ = read_recipe(path)
    assert config.output_dir == f"outputs/{path.parent.name}_{path.stem}"


def test_a_mistyped_key_is_refused(tmp_path):
    path = tmp_path / "t2i.yaml"
    path.write_text((ROOT / "recipes/janus_pro_1b/t2i_pickscore.yaml").read_text() + "guidance_scal: 3\n")
    with pytest.raises(ValueError, match="guidance_scal"):
        read_recipe(path)
