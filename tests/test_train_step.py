"""The benchmark of the training step: whole steps of the tiny model, and what its line says."""

import importlib.util
import json
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent / "benchmarks" / "train_step.py"


@pytest.fixture(scope="module")
def train_step():
    spec = importlib.util.spec_from_file_location("train_step", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("weights") / "tiny")


def test_a_line_says_seconds_by_phase_and_speed_of_whole_steps(train_step, folder, capsys):
    options = "--size tiny --images 4 --micro_batch 2 --group 4 --steps 2 --prompt 16 --folder".split()
    line = train_step.main([*options, folder])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == line
    assert line["finite"] and line["steps"] == 2 and all(norm > 0 for norm in line["grad_norm"])
    assert line["drift_mean"] < 1e-5  # replay equals rollout
    seconds = line["seconds"]
    assert set(seconds) == {"rollout", "reward", "loss", "update"} and min(seconds["rollout"], seconds["loss"]) > 0
    assert line["step_s"] == pytest.approx(sum(seconds.values()), abs=0.01)
    assert line["images_per_s_gpu"] == pytest.approx(4 / line["step_s"], rel=0.01)


def test_one_image_is_what_the_peak_has_above_weights_adapter_gradients_and_adam(train_step, folder):
    line = train_step.main(["--size", "tiny", "--one_image", "--steps", "1", "--prompt", "16", "--folder", folder])
    assert line["lora"] and line["micro_batch"] == 1 and line["finite"]
    assert line["one_image_gib"] == pytest.approx(-line["weights_gib"] - line["adapter_gradients_and_adam_gib"], 0.5)
    assert line["one_image_peak_gib"] == 0  # nothing is measured on a CPU


def test_images_must_fill_micro_batches(train_step, capsys):
    with pytest.raises(SystemExit):
        train_step.parse(["--images", "12", "--micro_batch", "8"])
    assert "--images 12 must be a multiple of --micro_batch x processes = 8" in capsys.readouterr().err


def test_zero3_starts_itself_with_the_optimizer_where_it_is_asked_for(train_step):
    argv = ["--size", "tiny", "--zero3", "--processes", "2", "--offload"]
    command = train_step.launch_command(train_step.parse(argv), argv)
    assert command[command.index("--num_processes") + 1] == "2"
    assert command[command.index("--offload_optimizer_device") + 1] == "cpu"
    assert Path(command[command.index("--config_file") + 1]).exists()
