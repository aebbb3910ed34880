"""Starts `tests.distributed_worker` on one or two processes and reads what it wrote."""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import JanusForConditionalGeneration, JanusProcessor

from tests.tiny import build_random_janus

ROOT = Path(__file__).resolve().parent.parent
WORKER = ROOT / "tests" / "distributed_worker.py"


def build_janus(folder: str) -> None:
    """A random Janus in `folder` that ends its texts early, at lengths that differ from row to row."""
    build_random_janus(folder)
    model, processor = JanusForConditionalGeneration.from_pretrained(folder), JanusProcessor.from_pretrained(folder)
    ids = [processor.tokenizer.eos_token_id, processor.tokenizer.convert_tokens_to_ids(processor.image_start_token)]
    with torch.no_grad():
        model.lm_head.weight[ids] *= 8  # their logits spread over ±9, those of other ids over ±1
    model.save_pretrained(folder)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment(**extra: str) -> dict[str, str]:
    """The environment of a run on CPU processes with one thread each, free of an outer launcher's variables."""
    outer = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {k: v for k, v in os.environ.items() if k not in outer and not k.startswith("ACCELERATE_")}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = {
        "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    return {**inherited, **fixed, **extra}


def wait_all(processes: list[subprocess.Popen], timeout: float) -> bool:
    """Wait for all; after `timeout` seconds in all, kill their process groups. Whether they ended by themselves."""
    try:
        for process in processes:
            process.wait(timeout)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def launch_of(item: pytest.Item) -> tuple[str | None, str | None]:
    """The launch (`zero3`, `ddp`) and the scenario that a test looks at."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    fixtures = [name for name in ("zero3", "ddp") if name in item.fixturenames]
    return params.get("launcher", fixtures[0] if fixtures else None), params.get("scenario")


def scenarios_of(request: pytest.FixtureRequest, launcher: str, names: list[str]) -> list[str]:
    """Those of `names` that the selected tests of this file look at; a test that names none looks at the first."""
    selected = [item for item in request.session.items if item.path == request.path]
    asked = {scenario or names[0] for found, scenario in map(launch_of, selected) if found == launcher}
    return [name for name in names if name in asked]


@dataclass
class Runs:
    """Results of one launch: `runs["t2i_full"]` is a list with what each rank saw."""

    output: Path
    processes: int
    results: dict[str, list[dict]] = field(default_factory=dict)

    def __getitem__(self, scenario: str) -> list[dict]:
        if scenario not in self.results:
            raise AssertionError(f"{scenario} did not finish. End of {self.output / 'log'}:\n{self.log()[-6000:]}")
        return self.results[scenario]

    def log(self) -> str:
        """What the launch printed."""
        return (self.output / "log").read_text(errors="replace")

    def rollouts(self, scenario: str, key: str = "completion_ids") -> list[list]:
        """What the reward saw at each step: the rows of all ranks, in the order of the global batch."""
        steps = zip(*(rank["calls"] for rank in self[scenario]), strict=True)
        return [[row for call in step for row in call[key]] for step in steps]

    def logged(self, scenario: str, name: str) -> list[float]:
        """A metric of rank 0 at each step."""
        return [entry[name] for entry in self[scenario][0]["logs"]]


def launch(
    model: str,
    output: Path,
    scenarios: list[str],
    config: str | None = None,
    worker: Path = WORKER,
    timeout: float = 300,
) -> Runs:
    """Run the scenarios with `accelerate_configs/<config>.yaml` on two processes, or without accelerate on one."""
    output.mkdir(parents=True, exist_ok=True)
    processes, command = 1, [sys.executable]
    if config:
        processes, yaml = 2, str(ROOT / "accelerate_configs" / f"{config}.yaml")
        command += ["-m", "accelerate.commands.launch", "--config_file", yaml, "--num_processes", "2"]
        command += ["--main_process_port", str(free_port())]
    command += [str(worker), "--model", model, "--output", str(output), "--processes", str(processes), *scenarios]
    with open(output / "log", "w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        if not wait_all([process], timeout):
            log.write(f"\nkilled after {timeout} s\n")
    runs = Runs(output, processes)
    for name in scenarios:
        files = [output / f"{name}.rank{rank}.json" for rank in range(processes)]
        if all(file.exists() for file in files):
            runs.results[name] = [json.loads(file.read_text()) for file in files]
    return runs


def launch_separately(model: str, output: Path, scenario: str, timeout: float) -> list[tuple[int | None, str]]:
    """Two processes of plain DDP with a stderr each; exit status (None: killed after `timeout`) and stderr of both.

    A launcher would end the second process as soon as the first has failed.
    """
    output.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(WORKER), "--model", model, "--output", str(output), "--processes", "2", scenario]
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    logs = [output / f"stderr{rank}" for rank in range(2)]
    processes = []
    for rank, path in enumerate(logs):
        env = environment(RANK=str(rank), LOCAL_RANK=str(rank), **address)
        with open(path, "w") as log:
            processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
                )
            )
    ended = wait_all(processes, timeout)
    return [
        (process.returncode if ended else None, path.read_text(errors="replace"))
        for process, path in zip(processes, logs, strict=True)
    ]
