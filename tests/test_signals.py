"""SIGTERM: what the run tells, and that the command it prints goes on with it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from janus_trl.grpo_trainer import JanusGRPOTrainer
from janus_trl.scripts import grpo
from janus_trl.scripts.run import ended_early
from janus_trl.signals import resume_command, stop_on_sigterm
from janus_trl.tiny import datasets as tiny_datasets

ROOT = Path(__file__).parent.parent
MODULE = "janus_trl.scripts.grpo"


@pytest.mark.parametrize("launcher", ["/env/bin/python /env/bin/accelerate launch", "torchrun", "timeout 9h python"])
def test_the_command_keeps_the_launcher_and_its_options(launcher):
    parent = shlex.split(f"{launcher} --config_file zero3.yaml --num_processes 8 -m")
    command = resume_command(MODULE, ["--config", "a b.yaml"], 8, [*parent, MODULE, "--config", "a b.yaml"])
    assert shlex.split(command) == [*parent, MODULE, "--config", "a b.yaml", "--resume_from_checkpoint", "true"]


@pytest.mark.parametrize("given", [
    ["--resume_from_checkpoint", "out/checkpoint-2"], ["--resume_from_checkpoint=auto"], [],
])  # fmt: skip
def test_an_older_choice_is_replaced(given):
    words = shlex.split(resume_command(MODULE, ["--config", "x", *given, "--seed", "1"], 1, ["bash", "-m"]))
    choice = ["--resume_from_checkpoint", "true"]
    assert words == [sys.executable, "-m", MODULE, "--config", "x", "--seed", "1", *choice]


def test_an_unknown_launcher_of_several_processes_is_named_after_accelerate():
    assert resume_command(MODULE, [], 4, ["slurmstepd"]).startswith("accelerate launch --num_processes 4 -m janus_trl")


def test_the_signal_is_noted_and_the_handler_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_sigterm() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) == before


def test_another_thread_trains_without_it():
    seen = []

    def work():
        with stop_on_sigterm() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_weights_alone_are_not_called_resumable(tmp_path, capsys):
    args = SimpleNamespace(output_dir=str(tmp_path), save_only_model=True, world_size=1)
    state, accelerator = SimpleNamespace(global_step=3), SimpleNamespace(is_main_process=True)
    assert ended_early(SimpleNamespace(args=args, state=state, accelerator=accelerator, interrupted=True), MODULE, [])
    out = capsys.readouterr().out
    assert f"weights alone at step 3, in {tmp_path / 'checkpoint-3'}" in out and "cannot be resumed" in out
    assert "--resume_from_checkpoint" not in out


def test_the_printed_command_goes_on_with_the_run(tmp_path, monkeypatch, capsys):
    for split in tiny_datasets.SIZES:
        monkeypatch.setitem(tiny_datasets.SIZES, split, 16)
    step = JanusGRPOTrainer.training_step

    def step_and_signal(self, *args, **kwargs):
        if self.state.global_step == 1 and self.args.resume_from_checkpoint is None:
            signal.raise_signal(signal.SIGTERM)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(JanusGRPOTrainer, "training_step", step_and_signal)
    settings = {
        "max_steps": 3, "per_device_train_batch_size": 4, "num_generations": 4, "num_samples": 0,
        "output_dir": tmp_path,
        "eval_strategy": "no", "eval_on_start": False, "max_reasoning_length": 0, "disable_tqdm": True,
    }  # fmt: skip
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    grpo.main(["--config", str(ROOT / "recipes" / "tiny" / "t2i.yaml"), *words])
    out = capsys.readouterr().out
    assert "SIGTERM: saved at step 2. Go on with:" in out and "Held-out" not in out
    command = shlex.split(out.split("Go on with:\n")[1].splitlines()[0])
    assert command[:3] == [sys.executable, "-m", MODULE] and not (tmp_path / "model.safetensors").exists()
    grpo.main(command[3:])
    assert f"Resuming from {tmp_path / 'checkpoint-2'}, step 2." in capsys.readouterr().out
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "grad_norm" in entry] == [1, 2, 3]
    assert (tmp_path / "model.safetensors").is_file() and (tmp_path / "recipe.yaml").is_file()


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_run_whose_launcher_dies_is_asked_to_end(tmp_path):
    child = tmp_path / "child.py"
    child.write_text(
        "import sys, time; from pathlib import Path; from janus_trl.signals import stop_on_sigterm\n"
        "with stop_on_sigterm() as stop:\n"
        "    Path(sys.argv[1]).touch()\n"
        "    for _ in range(300):\n"
        "        time.sleep(0.1 * (not stop.requested))\n"
        "    Path(sys.argv[2]).write_text(str(stop.requested))\n"
    )
    started, ended = tmp_path / "started", tmp_path / "ended"
    launch = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[2:]])"
    words = [sys.executable, "-c", launch, "accelerate", str(child), str(started), str(ended)]
    launcher = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    wait_for(started)
    launcher.kill()
    launcher.wait()
    wait_for(ended)
    assert ended.read_text() == "True"


def wait_for(path: Path, seconds: float = 25) -> None:
    end = time.monotonic() + seconds
    while not (path.exists() and (path.name == "started" or path.read_text())) and time.monotonic() < end:
        time.sleep(0.05)
