"""Group filtering, shared reasonings and both tasks under ZeRO-3 on two processes, against one process."""

from pathlib import Path

import pytest

from tests.distributed_launch import Runs, build_janus, launch
from tests.distributed_sampling_worker import EVAL_ROWS, GROUP, NAMES, SCENARIOS, STEPS, run

FAST = ["filter_t2i", "filter_i2t", "mixed"]
WORKER = Path(__file__).parent / "distributed_sampling_worker.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("sampling_janus"))
    build_janus(path)
    return path


@pytest.fixture(scope="module")
def one(folder, tmp_path_factory) -> dict[str, dict]:
    return {name: run(name, folder, tmp_path_factory.mktemp("one"), 1) for name in FAST}


@pytest.fixture(scope="module")
def one_lora(folder, tmp_path_factory) -> dict[str, dict]:
    return {"mixed_lora": run("mixed_lora", folder, tmp_path_factory.mktemp("one_lora"), 1)}


@pytest.fixture(scope="module")
def zero3(folder, tmp_path_factory) -> Runs:
    return launch(folder, tmp_path_factory.mktemp("zero3"), FAST, "zero3", worker=WORKER, timeout=200)


@pytest.fixture(scope="module")
def zero3_lora(folder, tmp_path_factory) -> Runs:
    return launch(folder, tmp_path_factory.mktemp("zero3_lora"), ["mixed_lora"], "zero3", worker=WORKER, timeout=200)


@pytest.fixture(scope="module")
def ddp(folder, tmp_path_factory) -> Runs:
    return launch(folder, tmp_path_factory.mktemp("ddp"), FAST, "ddp", worker=WORKER, timeout=200)


def calls_of(runs: Runs, name: str) -> list[dict]:
    """The calls of the reward with the rows of all ranks, in the order of the global batch."""
    calls = zip(*(rank["calls"] for rank in runs[name]), strict=True)  # as many rounds on every rank
    return [{key: [row for part in call for row in part[key]] for key in call[0]} for call in calls]


def losses_of(ranks: list[dict]) -> list[list[dict]]:
    """Rows of every loss, sorted: TRL shuffles them on each rank."""
    steps = zip(*(rank["losses"] for rank in ranks), strict=True)
    return [
        sorted((row for part in step for row in part), key=lambda row: (row["prompt"], row["completion"]))
        for step in steps
    ]


def assert_equals_one_process(runs: Runs, one: dict, name: str) -> None:
    assert calls_of(runs, name) == one[name]["calls"]  # the same prompts, rounds and samples
    assert len(one[name]["logs"]) == SCENARIOS[name].get("max_steps", STEPS)
    for ours, theirs in zip(losses_of(runs[name]), losses_of([one[name]]), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a["prompt"] == b["prompt"] and a["completion"] == b["completion"]
            assert a["advantage"] == pytest.approx(b["advantage"], abs=1e-4)
            assert a["pictures"] == pytest.approx(b["pictures"], abs=1e-6)
    for a, b in zip(runs[name][0]["logs"], one[name]["logs"], strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3, abs=1e-6)
        for key in b:
            if key.startswith(("dynamic_sampling/", "reward", "kl")):
                assert a[key] == pytest.approx(b[key], abs=1e-5), key


@pytest.mark.parametrize("name", FAST)
def test_zero3_on_two_processes_equals_one(zero3, one, name):
    assert_equals_one_process(zero3, one, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_ddp_on_two_processes_equals_one(ddp, one, name):
    assert_equals_one_process(ddp, one, name)


@pytest.mark.slow
def test_adapters_learn_both_tasks_under_zero3(zero3_lora, one_lora):
    assert_equals_one_process(zero3_lora, one_lora, "mixed_lora")


def test_every_held_out_row_of_both_tasks_counts_once_on_two_processes(zero3, one):
    ours, theirs = zero3["mixed"][0], one["mixed"]
    ((_, rewards),) = theirs["held_out"]
    assert len(rewards) == 2 * EVAL_ROWS and ours["evaluated"].keys() == theirs["evaluated"].keys()
    for task, rows in (("t2i", range(EVAL_ROWS)), ("i2t", range(EVAL_ROWS, 2 * EVAL_ROWS))):
        mean = sum(rewards[row] for row in rows) / EVAL_ROWS
        assert ours["evaluated"][f"eval_reward/{task}"] == pytest.approx(mean, abs=1e-6)


def test_an_image_without_reward_leaves_the_advantage_of_its_reasoning_to_the_other(zero3, one):
    """Rows of the second group lie on both processes; that they are those of one is in `assert_equals_one_process`."""
    seen = calls_of(zero3, "filter_t2i")
    gone = {tuple(i) for call in seen for i, m in zip(call["completion_ids"], call["missing"], strict=True) if m}
    rows = [row for step in losses_of(zero3["filter_t2i"]) for row in step]
    texts = [row["advantage"][0] for row in rows if tuple(row["completion"]) in gone]
    codes = [row["advantage"][1] for row in rows if tuple(row["completion"]) in gone]
    assert codes and set(codes) == {0.0} and any(abs(text) > 0.1 for text in texts)


@pytest.mark.parametrize("name", ["filter_t2i", "filter_i2t"])
def test_only_groups_with_spread_reach_the_loss_with_an_advantage(one, name):
    calls, logs = one[name]["calls"], one[name]["logs"]
    rounds = [int(log["dynamic_sampling/rounds"]) for log in logs]
    assert len(calls) == len(rounds) + sum(rounds) and sum(rounds) > 1
    flat = [name for name in calls[0]["names"][::GROUP] if name not in NAMES[::2]]
    assert flat and logs[0]["dynamic_sampling/flat_groups_0"] == pytest.approx(len(flat) / 3)
    assert len(calls[1]["names"]) == len(flat) * GROUP  # no more rows than are needed
    for step, log in zip(one[name]["losses"], logs, strict=True):
        zero = sum(row["advantage"] == [0, 0] for row in step)
        assert zero >= round(log["dynamic_sampling/flat_groups_left"] * 12)
    left = [log["dynamic_sampling/flat_groups_left"] for log in logs]
    assert any(left) == (name == "filter_i2t")  # its one round does not suffice


def test_a_mixed_run_gives_every_step_to_one_task(zero3):
    for call in calls_of(zero3, "mixed"):
        assert len(set(call["task"])) == 1
    tasks = [next(name[-3:] for name in log if name.startswith("reward/")) for log in zero3["mixed"][0]["logs"]]
    assert tasks == ["t2i", "i2t", "t2i", "i2t"]
