"""Entropy control under ZeRO-3 on two CPU processes, against one process."""

from pathlib import Path

import pytest

from tests.distributed_entropy_worker import SCENARIOS, STEPS, run
from tests.distributed_launch import Runs, build_janus, launch

WORKER = Path(__file__).with_name("distributed_entropy_worker.py")
METRICS = [f"entropy{part}/{name}" for part in ("", "_coef") for name in ("text", "image")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("entropy_janus"))
    build_janus(path)
    return path


@pytest.fixture(scope="module")
def one(folder, tmp_path_factory) -> Runs:
    output = tmp_path_factory.mktemp("entropy_one")
    return Runs(output, 1, {"above": [run("above", folder, output, processes=1)]})


@pytest.fixture(scope="module")
def zero3(folder, tmp_path_factory) -> Runs:
    return launch(folder, tmp_path_factory.mktemp("entropy_two"), list(SCENARIOS), config="zero3", worker=WORKER)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_hold_equal_coefficients(zero3, scenario):
    first, second = zero3[scenario]
    assert first["state"] == second["state"]
    assert all(rule["updates"] == STEPS for rule in first["state"].values())  # one a step, not one a micro-batch


def test_the_terms_pull_the_entropy_towards_its_target_from_both_sides(zero3):
    for name in ("text", "image"):
        above, below = (zero3.logged(scenario, f"entropy_coef/{name}") for scenario in ("above", "below"))
        assert above[0] == below[0] == 0 and max(above[1:]) < 0 < min(below[1:])
        above, below = (zero3.logged(scenario, f"entropy/{name}") for scenario in ("above", "below"))
        assert above[0] == pytest.approx(below[0], rel=0.01)  # the same rollouts, in micro-batches of another size
        assert below[-1] - above[-1] > 0.05


@pytest.mark.parametrize("runs", ["one", "zero3"])
def test_a_resumed_run_goes_on_with_the_same_coefficients(runs, request):
    for rank in request.getfixturevalue(runs)["above"]:
        assert rank["resumed"]["state"] == rank["state"]
        straight, resumed = rank["logs"], rank["resumed"]["logs"]
        assert [log["step"] for log in resumed] == list(range(1, STEPS + 1))
        for name in METRICS:
            assert [log[name] for log in resumed] == [log[name] for log in straight]


def test_two_processes_do_what_one_does(zero3, one):
    for name in METRICS:
        assert zero3.logged("above", name) == pytest.approx(one.logged("above", name), rel=1e-4, abs=1e-6)
    norms = one.logged("above", "grad_norm")
    assert norms[0] == 0 and norms[1] > 1e-3  # coefficient 0, then the entropy terms
    assert zero3.logged("above", "grad_norm") == pytest.approx(norms, rel=1e-3, abs=1e-7)
