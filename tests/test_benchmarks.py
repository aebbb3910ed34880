"""The benchmarks run, on the tiny model, and print what they promise: one JSON line per measurement."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from janus_trl.engine import DecodeEngine

ROOT = Path(__file__).parent.parent


def lines(script: str, *arguments: str) -> list[dict]:
    """What `benchmarks/<script>` prints."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_rollout_benchmark():
    arguments = ["--size", "tiny", "--batch", "2", "--text", "4", "--drift", "--repeats", "1"]
    measured = lines("rollout.py", *arguments, "--baselines", "plain", "generate", "loop")
    by_name = {line["what"]: line for line in measured if not line["what"].startswith("drift")}
    assert list(by_name) == ["plain", "generate", "loop", "engine", "engine text"]
    engine = by_name["engine"]
    assert engine["images_per_s"] == pytest.approx(2 / engine["seconds"], rel=0.02)
    assert engine["times_generate"] == pytest.approx(by_name["generate"]["seconds"] / engine["seconds"], rel=0.02)
    assert engine["ratio_to_roofline"] > 1 and engine["warmup_s"] == 0.0 and engine["batch"] == 2
    assert by_name["engine text"]["sampled"] == 4
    drifts = [(line["what"], line["guidance"]) for line in measured if line["what"].startswith("drift")]
    assert sorted(drifts) == [(f"drift {path}", w) for path in ("engine", "plain") for w in (1.0, 5.0)]
    assert all(line["max"] < 1e-5 for line in measured if line["what"].startswith("drift"))


def test_each_batch_of_the_rollout_benchmark_has_its_own_warm_up(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("rollout_benchmark", ROOT / "benchmarks" / "rollout.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class Warming(DecodeEngine):
        def reserve(self, *args):
            self.warmup_seconds += self.keys is None  # buffers are made anew, and graphs with them
            super().reserve(*args)

    monkeypatch.setattr(module, "DecodeEngine", Warming)
    monkeypatch.setattr(sys, "argv", "rollout.py --size tiny --batch 1 2 --repeats 1".split())
    module.main()
    measured = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [(line["batch"], line["warmup_s"]) for line in measured] == [(1, 1.0), (2, 1.0)]
