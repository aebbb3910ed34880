"""The scripts before a run: what is refused and how, and what a dry run says."""

import importlib
import json
from functools import partial
from pathlib import Path

import pytest

from janus_trl.checkpoints import write_manifest
from janus_trl.modeling import JanusForInterleavedGeneration
from janus_trl.scripts import grpo, sft
from tests.tiny_recipes import ROOT, SFT, T2I, small_data, write_recipe


@pytest.fixture(autouse=True)
def small_tiny_data(monkeypatch):
    small_data(monkeypatch)


@pytest.fixture
def recipe(tmp_path):
    """Writes a variation of a tiny recipe; None removes a key."""
    return partial(write_recipe, tmp_path)


@pytest.fixture
def no_weights(monkeypatch):
    """Loading weights fails the test."""

    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(JanusForInterleavedGeneration, "from_pretrained", refuse)


@pytest.fixture
def refused(no_weights, capsys):
    """Calls the script with arguments that it has to refuse, and returns its one message."""

    def call(*argv: str, script=grpo) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            script.main(list(argv))
        assert stop.value.code == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        return lines[0]

    return call


def checkpoint_folder(folder: Path, **config) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_an_output_folder_that_cannot_be_written_is_refused(recipe, refused, tmp_path):
    (tmp_path / "out").write_text("a file")
    assert "cannot be written: File exists" in refused("--config", recipe())


@pytest.mark.parametrize(("value", "reason"), [
    ("true", "has no whole checkpoint"), ("checkpoint-7", "there is no such folder"),
])  # fmt: skip
def test_a_checkpoint_that_is_not_there_is_refused(recipe, refused, value, reason):
    message = refused("--config", recipe(), "--resume_from_checkpoint", value)
    assert reason in message and "auto" in message


def test_a_base_that_is_no_hub_id_is_refused(recipe, refused):
    assert "must be a Hub id, owner/name" in refused("--config", recipe(base_model_id="../models/janus"))


@pytest.mark.parametrize(
    "key, value, nearest",
    [
        ("guidance_scal", 3, "guidance_scale"),
        ("guidance_weight", 5, "guidance_scale"),
        ("learning-rate", "1e-5", "learning_rate"),
        ("num_generation", 4, "num_generations"),
    ],
)
def test_an_unknown_key_of_a_recipe_is_named_with_the_nearest_one(recipe, refused, key, value, nearest):
    message = refused("--config", recipe(**{key: value}))
    assert f"recipe.yaml: there is no option '{key}'. Did you mean '{nearest}'?" in message


@pytest.mark.parametrize(
    "flag, name, nearest",
    [
        ("--guidance_scal", "guidance_scal", "guidance_scale"),
        ("--learning-rat", "learning-rat", "learning_rate"),
        ("--num_gen", "num_gen", None),  # no abbreviations: they would change meaning when an option is added
        ("--max_step=5", "max_step", "max_steps"),
    ],
)
def test_an_unknown_flag_is_named_with_the_nearest_one(refused, flag, name, nearest):
    words = [flag] if "=" in flag else [flag, "5"]
    message = refused("--config", T2I, *words)
    assert f"command line: there is no option '{name}'" in message
    if nearest:
        assert f"Did you mean '{nearest}'?" in message


def test_a_missing_recipe_lists_those_that_exist(refused, monkeypatch):
    monkeypatch.chdir(ROOT)
    message = refused("--config", "recipes/tiny/t2x.yaml")
    assert "recipes/tiny/t2x.yaml: there is no such file" in message
    assert "recipes/tiny/t2i.yaml" in message and "recipes/tiny/i2t.yaml" in message


def test_config_without_a_path_is_refused(refused):
    assert "--config needs the path of a recipe" in refused("--config")


@pytest.mark.parametrize("text, kind", [("- task\n- t2i\n", "list"), ("hello\n", "str"), ("", "NoneType")])
def test_a_recipe_that_is_no_mapping_is_refused(refused, tmp_path, text, kind):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert f"must hold `key: value` lines, but holds a {kind}" in refused("--config", str(path))


def test_a_recipe_that_is_no_yaml_is_refused(refused, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("task: [t2i\n")
    assert "recipe.yaml is not valid YAML: " in refused("--config", str(path))


def test_a_value_of_a_wrong_type_is_refused(recipe, refused):
    message = refused("--config", T2I, "--learning_rate", "fast")
    assert "learning_rate" in message and "fast" in message
    assert "max_steps" in refused("--config", T2I, "--max_steps", "1.5")


def test_a_missing_data_file_is_named(refused):
    message = refused("--config", T2I, "--dataset_name", "no/such/prompts.txt")
    assert "dataset_name is 'no/such/prompts.txt'; there is no such file" in message


def test_a_missing_column_lists_those_found(refused, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"caption": "a cat", "demands": "[]"}\n')
    message = refused("--config", T2I, "--dataset_name", str(path), "--text_column", "captoin")
    assert (
        "text_column is 'captoin'" in message and "columns found: caption, demands; did you mean 'caption'?" in message
    )


def test_batch_sizes_that_do_not_divide_show_the_sum_and_two_fixes(refused):
    message = refused("--config", T2I, "--per_device_train_batch_size", "3", "--num_generations", "2")
    assert "1 processes x per_device_train_batch_size 3 x gradient_accumulation_steps 1 = 3" in message
    assert "num_generations = 2" in message
    assert "gradient_accumulation_steps: 2 (6 completions a step)" in message and "num_generations: 3" in message


def test_a_group_of_one_is_refused(refused):
    assert "a group needs at least 2" in refused("--config", T2I, "--num_generations", "1")


@pytest.mark.parametrize("flag", ["--guidance_scale", "--eval_guidance_scale"])
def test_guidance_below_1_is_refused(refused, flag):
    message = refused("--config", T2I, flag, "0.5")
    assert f"{flag[2:]} = 0.5 must be >= 1" in message


def test_fewer_rows_than_prompts_in_a_rollout_are_refused(refused):
    # The sampler drops what does not fill a rollout: such a run would end well without a single step.
    message = refused("--config", T2I, "--max_train_rows", "7")
    assert "7 training rows" in message and "8 prompts" in message


def test_a_reward_that_does_not_fit_the_task_lists_those_that_do(refused):
    message = refused("--config", T2I, "--reward_funcs", "multiple_choice")
    assert "'multiple_choice' does not fit task 't2i'" in message and "pickscore" in message


@pytest.mark.parametrize("in_recipe", [True, False])
def test_an_unknown_reward_lists_the_known_ones_and_the_nearest(recipe, refused, in_recipe):
    given = (
        ["--config", recipe(reward_funcs="pickscor")] if in_recipe else ["--config", T2I, "--reward_funcs", "pickscor"]
    )
    message = refused(*given)
    assert "unknown reward 'pickscor'" in message
    assert "did you mean 'pickscore'?" in message and "tiny_world" in message


def test_a_run_without_rewards_is_refused(recipe, refused):
    assert "reward_funcs is not set" in refused("--config", recipe(reward_funcs=None))


def test_weights_given_twice_are_refused(recipe, refused):
    path = recipe(reward_funcs=[{"name": "tiny_world", "weight": 0.5}], reward_weights=[2.0])
    message = refused("--config", path)
    assert "[2.0]" in message and "[0.5]" in message and "Keep one of them" in message


def test_one_weight_for_each_reward(recipe, refused):
    message = refused("--config", recipe(reward_weights=[1.0, 2.0]))
    assert "reward_weights has 2 values for 1 rewards (tiny_world)" in message


def test_an_original_checkpoint_is_refused_with_the_converted_ones(refused, tmp_path):
    folder = checkpoint_folder(tmp_path / "original", model_type="multi_modality")
    message = refused("--config", T2I, "--model_name_or_path", folder)
    assert "original DeepSeek checkpoint" in message and "deepseek-community/Janus-Pro-1B" in message


def test_a_folder_of_another_model_is_refused(refused, tmp_path):
    folder = checkpoint_folder(tmp_path / "llama", model_type="llama")
    assert "has model_type 'llama'; it must be 'janus'" in refused("--config", T2I, "--model_name_or_path", folder)


def test_a_folder_without_config_is_refused(refused, tmp_path):
    message = refused("--config", T2I, "--model_name_or_path", str(tmp_path))
    assert f"model_name_or_path = {tmp_path}: no checkpoint found" in message


def test_a_run_without_model_is_refused(recipe, refused):
    assert "model_name_or_path is not set" in refused("--config", recipe(model_name_or_path=None))


def test_sft_refuses_bad_input_in_the_same_way(recipe, refused):
    assert "Did you mean 'guidance_dropout'?" in refused("--config", SFT, "--guidance_dropot", "0.2", script=sft)
    assert "task = 't2t' must be one of: t2i, i2t, both" in refused("--config", SFT, "--task", "t2t", script=sft)
    assert "is not set" in refused("--config", recipe(SFT, model_name_or_path=None), script=sft)


# ---- dry run --------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_a_step_is_and_loads_no_weights(recipe, no_weights, capsys, tmp_path):
    grpo.main(["--config", recipe(), "--dry_run", "true", "--max_train_rows", "12"])
    output = capsys.readouterr().out
    assert "t2i: 8 prompts x 8 completions = 64" in output
    assert "12 training rows, 16 held-out rows, rewards: tiny_world" in output
    assert str(tmp_path / "out") in output and not (tmp_path / "out").exists()


def test_a_dry_run_of_sft_loads_no_weights(recipe, no_weights, capsys):
    sft.main(["--config", recipe(SFT), "--dry_run", "true"])
    assert "SFT (both): 32 training rows" in capsys.readouterr().out


def test_a_dry_run_checks_the_batch_of_the_processes_to_come(recipe, refused, capsys):
    on_two = recipe(per_device_train_batch_size=4, num_generations=8)
    grpo.main(["--config", on_two, "--dry_run", "true", "--num_processes", "2"])
    assert "1 prompts x 8 completions = 8" in capsys.readouterr().out
    assert "1 processes x per_device_train_batch_size 4" in refused("--config", on_two, "--dry_run", "true")
    # 3 processes x 4 = 12 completions are no groups of 8, while 1 process x 8 would be one.
    message = refused("--config", on_two, "--dry_run", "true", "--num_processes", "3")
    assert "3 processes x per_device_train_batch_size 4 x gradient_accumulation_steps 1 = 12" in message


def test_a_dry_run_takes_the_processes_of_the_accelerate_file(recipe, refused, capsys):
    on_two = recipe(per_device_train_batch_size=4, num_generations=8)
    options = ["--dry_run", "true", "--accelerate_config", "zero3"]
    grpo.main(["--config", on_two, *options])
    out = capsys.readouterr().out
    assert "1 prompts x 8 completions = 8" in out and "(2 GPUs, ZeRO-3" in out
    grpo.main(["--config", on_two, *options, "--num_processes", "4"])
    assert "2 prompts x 8 completions = 16" in capsys.readouterr().out
    assert "no file accelerate_configs/zero9.yaml" in refused("--config", on_two, *options[:-1], "zero9")


@pytest.mark.parametrize(("base", "script"), [(T2I, grpo), (SFT, sft)])
def test_a_dry_run_refuses_a_checkpoint_with_the_shards_of_other_processes(base, script, recipe, refused, tmp_path):
    folder = tmp_path / "out" / "checkpoint-2"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    write_manifest(folder, step=2, processes=2)
    options = ["--config", recipe(base, per_device_train_batch_size=8, resume_from_checkpoint="true")]
    options += ["--dry_run", "true", "--num_processes", "4"]
    message = refused(*options, "--accelerate_config", "zero3", script=script)
    assert "written by 2 processes, one DeepSpeed shard each, but this run has 4" in message
    script.main([*options, "--accelerate_config", "ddp"])


@pytest.mark.parametrize(
    ("name", "argv", "work"),
    [
        ("merge", ["--adapter", "a", "--output_dir", "o"], "write the merged model"),
        ("score", ["--rewards", "jpeg_size", "--images", "x.png"], "score all rows"),
        ("convert", ["--input", "a", "--output", "o"], "write the converted model"),
    ],
)
def test_scripts_that_do_not_share_their_work_refuse_several_processes(name, argv, work, refused, monkeypatch):
    script = importlib.import_module(f"janus_trl.scripts.{name}")
    assert "2 processes were started" not in refused(*argv, script=script)
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refused(*argv, script=script)
    assert f"2 processes were started, and each would {work}. Start {name} without a launcher." in message


def test_a_dry_run_of_started_processes_is_about_as_many(recipe, refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refused("--config", recipe(), "--dry_run", "true", "--num_processes", "8")
    assert "num_processes = 8, but 2 processes were started. Leave it unset" in message


def test_a_dry_run_refuses_a_batch_that_divides_on_one_process_alone(recipe, refused):
    fixed = {"generation_batch_size": 6, "per_device_train_batch_size": 6, "num_generations": 6}
    path = recipe(**fixed)
    grpo.main(["--config", path, "--dry_run", "true"])
    # A generation batch of 6 cannot be split into 2 processes x 6.
    assert "6" in refused("--config", path, "--dry_run", "true", "--num_processes", "2")
