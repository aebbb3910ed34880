"""ZeRO-3 on two processes: killed at any moment, terminated, resumed, pushed, and loaded in plain transformers."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import JanusForConditionalGeneration, JanusProcessor

from janus_trl.checkpoints import why_not_whole
from tests.distributed_launch import ROOT, build_janus, environment
from tests.hub_server import HubServer, hub
from tests.test_hub import greedy_codes

STEPS = 4
WORKER = ROOT / "tests" / "distributed_checkpoints_worker.py"


class Results:
    """What the runs in `output` did."""

    def __init__(self, output: Path, base: str, server: HubServer | None = None):
        self.output, self.base, self.server = output, base, server
        self.lives: dict[str, list[dict]] = json.loads((output / "results.json").read_text())

    def steps(self, run: Path) -> list[dict]:
        return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]

    def check(self, run: Path, straight: Path) -> None:
        """Every step of every life of a run has the reward and the gradient norm of the straight run."""
        reference = {entry["step"]: entry for entry in self.steps(straight)}
        entries = self.steps(run)
        assert {entry["step"] for entry in entries} == set(range(1, STEPS + 1))
        for entry in entries:
            expected = reference[entry["step"]]
            assert entry["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5), entry
            # Logged by the step that sampled: absent inside a rollout.
            assert entry["reward"] == expected["reward"], entry


def run_worker(folder: Path, *argv: str, server: HubServer | None = None, timeout: float = 300) -> Results:
    base, output = folder / "base", folder / "runs"
    build_janus(str(base))
    output.mkdir()
    command = [sys.executable, str(WORKER), "--model", str(base), "--output", str(output), *argv]
    extra = server.environment() if server else {}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(**extra), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if not (output / "results.json").is_file():
        logs = [*output.glob("*/rank0.log"), folder / "log"]
        raise AssertionError("\n".join(path.read_text(errors="replace")[-3000:] for path in logs))
    return Results(output, str(base), server)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Results:
    """One launch of all scenarios, with three kills, pushing to a Hub on the loopback interface."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with hub(folder / "hub") as server:
        return run_worker(folder, server=server)


def check_kills(results: Results, kills: int) -> None:
    lives = results.lives["killed"]
    assert len(lives) == kills + 1 and lives[-1]["statuses"] == [0, 0]
    for run in {Path(life["output"]) for life in lives}:
        if [life for life in lives if life["output"] == str(run)][-1]["statuses"] == [0, 0]:
            results.check(run, results.output / "straight")
        for checkpoint in run.glob("checkpoint-*"):
            assert why_not_whole(checkpoint) is None
        for life in lives:
            assert not any(status not in (0, None, -signal.SIGKILL) for status in life["statuses"]), life


def test_a_run_that_is_killed_at_any_moment_goes_on_as_if_it_had_not_been(runs):
    check_kills(runs, 3)
    in_weights, before_publishing, *_ = runs.lives["killed"]
    assert in_weights["unfinished"] == ["checkpoint-2"]  # killed between writing and checking its weights
    assert in_weights["told"][0].startswith("No checkpoint in")
    assert before_publishing["unfinished"] == ["checkpoint-2"]  # complete, but not yet published
    assert before_publishing["told"][0].endswith("checkpoint-1, step 1.")
    assert runs.lives["killed"][-1]["told"][0].startswith("Resuming from")


@pytest.mark.slow
@pytest.mark.parametrize("iterations", ["1", "2"])
def test_twenty_kills_at_random_moments_and_a_full_disk(tmp_path, iterations):
    results = run_worker(tmp_path, "--only_kills", "--kills", "20", "--iterations", iterations, timeout=900)
    check_kills(results, 20)
    (disk,) = results.lives["disk"]
    assert disk["statuses"] == [1, 1] and disk["unfinished"] == []  # both ended by themselves
    first, second = ((results.output / "disk" / f"rank{rank}.log").read_text() for rank in range(2))
    assert "Saving step 2 failed (" in first and "another rank could not write" in second
    assert "checkpoint-1 is kept" in first
    assert [path.name for path in (results.output / "disk").glob("checkpoint-*")] == ["checkpoint-1"]


def test_sigterm_to_one_rank_ends_both_with_status_0_and_the_adapter_trains_on(runs):
    stopped, resumed = runs.lives["terminated"]
    assert runs.lives["lora"][0]["statuses"] == stopped["statuses"] == resumed["statuses"] == [0, 0]
    assert f"checkpoint-{STEPS}" not in stopped["saved"]
    assert resumed["told"][0].endswith(f"step {max(name[-1] for name in stopped['saved'])}.")
    runs.check(runs.output / "terminated", runs.output / "lora")


@pytest.mark.parametrize(("name", "run"), [("full", "straight"), ("lora", "lora")])
def test_what_two_processes_pushed_loads_elsewhere_and_draws_the_same(runs, tmp_path, name, run):
    pushed = tmp_path / name
    shutil.copytree(runs.server.folder_of(f"user/{name}"), pushed)
    processor = JanusProcessor.from_pretrained(pushed)

    def load(folder: Path):
        source = runs.base if name == "lora" else folder
        model = JanusForConditionalGeneration.from_pretrained(source, dtype=torch.float32)
        return (PeftModel.from_pretrained(model, folder) if name == "lora" else model).eval()

    model = load(pushed)
    codes = greedy_codes(model, processor)
    assert codes == greedy_codes(load(runs.output / run / f"checkpoint-{STEPS}"), processor)
    base = JanusForConditionalGeneration.from_pretrained(runs.base, dtype=torch.float32).state_dict()
    if name == "lora":
        assert all(p.any() for n, p in model.named_parameters() if "lora_B" in n)
    else:
        moved = [n for n, w in model.state_dict().items() if not torch.equal(w, base[n])]
        assert len(moved) > 20 and not any("vqmodel" in n for n in moved)
    assert (pushed / "README.md").read_text().startswith("---")


def test_the_network_is_used_to_push_and_for_nothing_else(runs):
    asked = {request.split("?")[0] for request in runs.server.seen}
    allowed = ("/api/whoami-v2", "/api/repos/create", "/api/validate-yaml", "/lfs/", ".git/info/lfs", "/preupload/")
    allowed += ("/commit/", "/auth-check/write")
    assert not [request for request in asked if not any(part in request for part in allowed)]
