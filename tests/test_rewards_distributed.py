"""Rewards that hold a model, and the script's checks, under ZeRO-3 on two processes: one launch runs all scenarios."""

from pathlib import Path

import pytest

from tests.clip import save_clip
from tests.distributed_launch import Runs, build_janus, launch
from tests.distributed_rewards_worker import FAULTY_ROW
from tests.distributed_worker import STEPS

WORKER = Path(__file__).parent / "distributed_rewards_worker.py"


@pytest.fixture(scope="module")
def zero3(tmp_path_factory) -> Runs:
    output = tmp_path_factory.mktemp("rewards")
    save_clip(str(output / "clip"))
    build_janus(str(output / "janus"))
    return launch(str(output / "janus"), output, ["clip", "async_raises", "script"], "zero3", WORKER, timeout=150)


def test_clip_on_auto_and_on_cpu_trains_and_keeps_its_weights(zero3):
    for rank in zero3["clip"]:
        assert rank["intact"] == [True, True]
    logs = zero3["clip"][0]["logs"]
    assert [entry["step"] for entry in logs] == list(range(1, STEPS + 1))
    for entry in logs:
        assert entry["rewards/pickscore/mean"] == pytest.approx(entry["rewards/on_cpu/mean"], abs=1e-6)
        assert entry["rewards/pickscore/std"] > 0 and entry["grad_norm"] > 0
        assert entry["time/reward_s/pickscore"] > 0 and entry["time/reward_s"] >= entry["time/reward_s/pickscore"]
        assert entry["rewards/pickscore/truncated"] >= 0


def test_a_fault_on_one_rank_is_counted_and_left_out_on_all(zero3):
    counts = [entry["rewards/sometimes_nan/nan"] for entry in zero3["clip"][0]["logs"]]
    assert counts == [0.0, 0.0, 1.0]
    row = 4 + FAULTY_ROW  # four rows a rank
    for rank in zero3["clip"]:
        assert [i for i, advantage in enumerate(rank["advantages"]) if advantage == 0.0] == [row]


def test_an_async_reward_that_raises_on_one_rank_ends_both_within_seconds(zero3):
    for rank in zero3["async_raises"]:
        assert "reward 'judge' failed on rank 1, row 0 (prompt '" in rank["message"]
        assert rank["message"].endswith("ConnectionError: the judge is gone")
        assert rank["took"] < 15 and rank["step"] == 0


def test_what_the_first_process_refuses_ends_all_with_one_message(zero3):
    first, second = zero3["script"]
    for rank in (first, second):
        assert rank["status"] == 2
        assert [line for line in rank["refused"].splitlines() if line.startswith("error: ")] == [
            f"error: output_dir = {zero3.output}/file.rank0 cannot be written: File exists. Choose another folder, or "
            "make room."
        ]
    assert second["took"] > first["took"] + 2  # a launcher would have ended it before it repeats the message


def test_a_dry_run_among_started_processes_counts_them_once(zero3):
    first, second = (rank["spoken"] for rank in zero3["script"])
    assert "4 prompts x 4 completions = 16 a rollout" in first
    assert "(2 GPUs, ZeRO-3; full fine-tuning" in first and "fits into 80 GiB" in first
    assert second == ""
