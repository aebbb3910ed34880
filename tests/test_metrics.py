"""Numbers that the trainers log."""

from collections import defaultdict

import torch

from janus_trl.metrics import PhaseMemory


def test_each_phase_logs_its_own_peak_and_the_run_the_highest(monkeypatch):
    peaks = iter([40, 30, 75, 20])
    resets = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks) * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    memory, metrics = PhaseMemory(torch.device("cuda", 0)), defaultdict(list)
    for phase in ("rollout", "reward", "loss", "update"):
        memory.end(phase, metrics)
    assert {name: values for name, values in metrics.items() if name != "memory/peak_gib"} == {
        "memory/rollout_gib": [40], "memory/reward_gib": [30], "memory/loss_gib": [75], "memory/update_gib": [20],
    }  # fmt: skip
    assert metrics["memory/peak_gib"] == [75]
    assert len(resets) == 4


def test_a_phase_of_many_micro_batches_logs_the_largest(monkeypatch):
    """TRL logs the mean of the list."""
    peaks = iter([10, 12, 30, 11])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks) * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    memory, metrics = PhaseMemory(torch.device("cuda", 0)), defaultdict(list)
    for _ in range(4):
        memory.end("loss", metrics)
    assert metrics == {"memory/loss_gib": [30], "memory/peak_gib": [30]}


def test_a_cpu_run_logs_no_memory():
    metrics = defaultdict(list)
    PhaseMemory(torch.device("cpu")).end("rollout", metrics)
    assert not metrics
