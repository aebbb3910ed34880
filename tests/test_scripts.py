"""The scripts as a user meets them: what is understood, what a run leaves behind, how a process ends."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from transformers import JanusForConditionalGeneration, JanusProcessor

from janus_trl.scripts import grpo, sft
from janus_trl.tiny import tiny_sft_dataset
from tests.tiny_recipes import I2T, ROOT, SFT, T2I, small_data, write_recipe


@pytest.fixture(autouse=True)
def small_tiny_data(monkeypatch):
    small_data(monkeypatch)


@pytest.fixture
def recipe(tmp_path):
    """Writes a variation of a tiny recipe; None removes a key."""
    return partial(write_recipe, tmp_path)


def in_a_process(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "janus_trl.scripts.grpo", *argv],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv, part",
    [
        (["--config", T2I, "--cfg_wieght", "5"], "error: command line: there is no option 'cfg_wieght'"),
        (["--config", T2I, "--per_device_train_batch_size", "9"], "error: 1 processes x per_device_train_batch_size 9"),
    ],
)
def test_a_real_process_ends_with_code_2_and_one_message(argv, part):
    result = in_a_process(*argv)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(part)
    assert "Traceback" not in result.stderr and result.stdout == ""


# ---- what is understood ---------------------------------------------------------------------------------------------


def test_numbers_written_as_text_become_floats_also_nested(recipe):
    path = recipe(learning_rate="1e-5", beta="4e-2", reward_funcs=[{"name": "tiny_world", "weight": "1e-1"}])
    run = grpo.configure(["--config", path])
    assert run.args.learning_rate == 1e-5 and run.args.beta == 4e-2
    assert run.args.reward_weights == [0.1]


def test_a_bare_1e_5_in_yaml_becomes_a_float(recipe):
    path = Path(recipe(learning_rate=None))
    path.write_text(path.read_text() + "learning_rate: 1e-5\n")  # YAML 1.1 reads it as text
    assert grpo.configure(["--config", str(path)]).args.learning_rate == 1e-5


def test_config_with_an_equals_sign_and_overrides(recipe):
    run = grpo.configure([f"--config={recipe()}", "--learning_rate=3e-4", "--guidance_scale", "2"])
    assert run.args.learning_rate == 3e-4 and run.args.guidance_scale == 2.0
    assert run.args.task == "t2i" and run.rewards.names == ["tiny_world"]


def test_one_reward_may_be_given_without_a_list(recipe):
    assert grpo.configure(["--config", recipe(reward_funcs="tiny_world")]).rewards.names == ["tiny_world"]


# ---- runs -----------------------------------------------------------------------------------------------------------


SMALL_RUN = ["--max_steps", "1", "--max_test_rows", "4", "--num_samples", "2"]


def assert_stock_checkpoint(folder: Path) -> None:
    """Plain transformers loads it, and finds every weight."""
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["JanusForConditionalGeneration"]
    model, report = JanusForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert JanusProcessor.from_pretrained(folder).tokenizer.vocab_size > 0
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize("base", [T2I, I2T], ids=["t2i", "i2t"])
def test_a_run_writes_samples_curve_recipe_and_a_stock_checkpoint(base, tmp_path, capsys):
    out = tmp_path / "out"
    grpo.main(["--config", base, *SMALL_RUN, "--per_device_train_batch_size", "8", "--output_dir", str(out)])
    assert [path.name for path in sorted((out / "samples").glob("*.png"))] == ["step-000000.png", "step-000001.png"]
    assert Image.open(out / "curve.png").width > 100
    written = yaml.safe_load((out / "recipe.yaml").read_text())
    assert written == yaml.safe_load(Path(base).read_text())
    assert "--max_steps 1" in (out / "recipe.yaml").read_text()
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 1
    assert_stock_checkpoint(out)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Held-out reward on 4 rows: ") and last.endswith(f"Output: {out}")
    assert "at step 0, " in last and "at step 1 (" in last


def test_a_run_of_sft_writes_a_stock_checkpoint(tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["--max_steps", "1", "--per_device_train_batch_size", "4", "--output_dir", str(out)]
    sft.main(["--config", SFT, *argv, "--codes_cache_dir", str(tmp_path / "codes")])
    assert_stock_checkpoint(out)
    assert (out / "recipe.yaml").is_file()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Done. eval_loss ") and last.endswith(f"The checkpoint is in {out}.")
    assert all(name in last for name in ("eval_loss/text", "eval_loss/image", "(step 0) to ", "(step 1)"))
    assert sorted(path.name for path in (out / "samples").glob("*.png")) == ["step-000000.png", "step-000001.png"]


def test_sft_trains_on_a_data_set_on_disk(tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    tiny_sft_dataset("t2i", "train", size=8).save_to_disk(str(data))
    argv = ["--task", "t2i", "--dataset_name", str(data), "--max_steps", "1", "--per_device_train_batch_size", "4"]
    sft.main(["--config", SFT, *argv, "--output_dir", str(out), "--codes_cache_dir", str(tmp_path / "codes")])
    assert_stock_checkpoint(out)


def test_sample_grids_show_the_model_alone(tmp_path):
    # The same prompts and seeds at every step: without an update the pictures are equal, with one they are not.
    small = ["--config", T2I, *SMALL_RUN, "--per_device_train_batch_size", "8", "--eval_on_start", "false"]
    grids = {}
    for rate in ("0", "0.01"):
        folder = tmp_path / rate
        grpo.main([*small, "--learning_rate", rate, "--output_dir", str(folder)])
        grids[rate] = [(folder / "samples" / f"step-00000{step}.png").read_bytes() for step in (0, 1)]
    assert grids["0"][0] == grids["0"][1] == grids["0.01"][0]
    assert grids["0.01"][0] != grids["0.01"][1]


def test_resume_from_checkpoint_true_finds_the_newest_one(tmp_path):
    out = tmp_path / "out"
    argv = ["--config", T2I, "--per_device_train_batch_size", "8", "--output_dir", str(out), "--num_samples", "0"]
    argv += ["--save_strategy", "steps", "--save_steps", "1", "--eval_strategy", "no", "--eval_on_start", "false"]
    grpo.main([*argv, "--max_steps", "1", "--max_test_rows", "2"])
    first = (out / "checkpoint-1" / "trainer_state.json").stat().st_mtime_ns
    grpo.main([*argv, "--max_steps", "2", "--max_test_rows", "2", "--resume_from_checkpoint", "true"])
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    assert [row["step"] for row in history if "loss" in row] == [1, 2]
    assert (out / "checkpoint-1" / "trainer_state.json").stat().st_mtime_ns == first  # step 1 was not run again
