"""Generation that is killed, restarted or split over processes: the same files, and only what is missing is made."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from janus_trl import generation
from janus_trl.engine import DecodeEngine
from janus_trl.modeling import JanusForInterleavedGeneration
from janus_trl.scripts import generate
from tests.distributed_launch import free_port
from tests.generation_files import OFFICIAL, PROMPTS, check_geneval, files, geneval_file, start


@pytest.fixture
def run(janus_folder, tmp_path):
    """Runs the script on the random Janus; returns the output folder."""

    def call(*argv: str, name: str = "out", model: str = janus_folder) -> Path:
        generate.main(["--model", model, "--output_dir", str(tmp_path / name), *argv])
        return tmp_path / name

    return call


@pytest.mark.skipif(not OFFICIAL.is_file(), reason="the official prompts are not here")
def test_official_geneval_prompts_killed_half_way(run, tmp_path):
    """Forty of them: killed in the middle and started again, the folder is that of a straight run, byte by byte."""
    rows = [json.loads(line) for line in OFFICIAL.read_text().splitlines()][::14]
    argv = ["--prompts", geneval_file(tmp_path, rows), "--layout", "geneval", "--batch_size", "16"]
    straight = run(*argv, name="straight")
    check_geneval(straight, rows, 16)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 210)
        with pytest.raises(KeyboardInterrupt):
            run(*argv, name="killed")
    there = files(tmp_path / "killed")
    pictures = [name for name in there if "/samples/" in name]
    assert 0 < len(pictures) < len(rows) * 4
    changed = {name: (tmp_path / "killed" / name).stat().st_mtime_ns for name in there if not name.startswith(".part")}
    run(*argv, name="killed")
    for name, when in changed.items():
        assert (tmp_path / "killed" / name).stat().st_mtime_ns == when, name
    assert files(tmp_path / "killed") == files(straight)


def stop_after(patch: pytest.MonkeyPatch, count: int) -> None:
    """The process ends when it is about to rename its `count`-th file."""
    replace, calls = os.replace, []

    def counted(*args):
        calls.append(args)
        if len(calls) == count:
            raise KeyboardInterrupt
        replace(*args)

    patch.setattr(generation.os, "replace", counted)


def test_only_what_is_missing_is_made(run, monkeypatch):
    argv = ["--prompt", *PROMPTS, "--num_images", "3", "--batch_size", "2"]
    out = run(*argv)
    before = files(out)
    for name in ("images/00001-0001.png", "records/00003-0002.json"):
        (out / name).unlink()
    sampled, original = [], generation.rollout
    monkeypatch.setattr(generation, "rollout", lambda *a, **k: sampled.append(a[2]) or original(*a, **k))
    run(*argv)
    assert sampled == [["two red dogs", "two red dogs"], ["x", "x"]]  # the batches of the two rows, whole
    assert files(out) == before


def test_a_short_batch_is_sampled_beside_as_many_rows_as_a_whole_one(run, monkeypatch):
    engines = []

    def decode_engine(model, use_cuda_graphs):
        engines.append(DecodeEngine(torch.float32, use_cuda_graphs))
        engines[-1].load_weights(model)
        return engines[-1]

    monkeypatch.setattr(generate, "decode_engine", decode_engine)
    argv = ["--prompt", "a cat", "--num_images", "3", "--batch_size", "2"]
    (run(*argv) / "images/00000-0002.png").unlink()
    run(*argv)
    assert [len(engine.state.alive) for engine in engines] == [2, 2]
    run("--prompt", "a cat", name="one")
    assert len(engines[-1].state.alive) == 1  # not the whole default of batch_size


def test_a_whole_folder_loads_no_weights(run, monkeypatch, capsys):
    argv = ["--prompt", "a cat"]
    run(*argv)
    monkeypatch.setattr(JanusForInterleavedGeneration, "from_pretrained", None)
    run(*argv)
    assert "all 1 are there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, message",
    [
        (["--seed", "1"], "seed is 0 there and 1 here"),
        (["--guidance_scale", "2"], "guidance_scale is 5.0 there and 2.0 here"),
        (["--batch_size", "4"], "batch_size is 32 there and 4 here"),
        (["--prompt", "a dog"], "prompts_digest is"),
    ],
)
def test_a_folder_of_another_run_is_refused(run, capsys, change, message):
    run("--prompt", "a cat")
    with pytest.raises(SystemExit):
        run(*(change if "--prompt" in change else ["--prompt", "a cat", *change]))
    assert message in capsys.readouterr().err


def test_a_model_that_was_trained_further_is_another_one(run, janus_folder, tmp_path, capsys):
    shutil.copytree(janus_folder, tmp_path / "model")
    run("--prompt", "a cat", model=str(tmp_path / "model"))
    weights = load_file(tmp_path / "model" / "model.safetensors")
    save_file({k: v + 1e-3 for k, v in weights.items()}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit):
        run("--prompt", "a cat", model=str(tmp_path / "model"))
    assert "weights is" in capsys.readouterr().err


def test_two_processes_make_the_pictures_of_one(run, janus_folder, tmp_path):
    """Each makes its share, neither waits for the other, and the first alone reports: here on a benchmark."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    shared = ["--prompts", str(tmp_path / "prompts.txt"), "--num_images", "3", "--batch_size", "2"]
    straight, out = run(*shared, name="one"), tmp_path / "two"
    argv = ["--model_name_or_path", janus_folder, "--output_dir", str(out), *shared, "--benchmark", "prompts"]
    argv += ["--reward_funcs", "tests.test_generate_restarts.whiteness"]
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    logs = [tmp_path / f"log{rank}" for rank in range(2)]
    processes = [
        start("evaluate", argv, log, RANK=str(rank), LOCAL_RANK=str(rank), **address) for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    errors = [Path(f"{log}.err").read_text() for log in logs]
    assert codes == [0, 0], errors
    for rank in range(2):
        assert f"made 6 of 12 (process {rank} of 2)" in errors[rank]
    there = {name: content for name, content in files(out).items() if not name.startswith(".partial")}
    assert there == files(straight)
    line = json.loads(logs[0].read_text())
    assert line["reward"]["rows"] == 12 and logs[1].read_text() == ""


def whiteness(generated_images, **columns) -> list[float]:
    """A reward of the test's own: the largest value of each picture."""
    return [max(picture.convert("L").getextrema()) / 255 for picture in generated_images]


@pytest.mark.slow
@pytest.mark.skipif(not OFFICIAL.is_file(), reason="the official prompts are not here")
def test_all_geneval_prompts_after_sigkill(tmp_path):
    """The 553 prompts with the embedded model: killed at a random moment, started again, equal to a straight run."""
    rows = [json.loads(line) for line in OFFICIAL.read_text().splitlines()]
    assert len(rows) == 553
    argv = ["--model", "tiny", "--prompts", str(OFFICIAL), "--layout", "geneval", "--max_text_length", "0"]
    argv += ["--batch_size", "64"]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    generate.main([*argv, "--output_dir", str(straight)])
    check_geneval(straight, rows, 32)
    process = start("generate", [*argv, "--output_dir", str(killed)], tmp_path / "log")
    while len(list(killed.glob("*/samples/*.png"))) < 553 * 2:
        assert process.poll() is None, (tmp_path / "log.err").read_text()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (killed / "samples.jsonl").exists()
    generate.main([*argv, "--output_dir", str(killed)])
    assert files(killed) == files(straight)
