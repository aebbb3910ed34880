"""SFT under ZeRO-3 on two CPU processes, one with pictures to draw and one with questions, against one process."""

import pytest

from tests.distributed_launch import WORKER, Runs, build_janus, launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Runs, Runs]:
    """The run on one process and that on two."""
    folder, worker = str(tmp_path_factory.mktemp("janus")), WORKER.with_name("distributed_sft_worker.py")
    build_janus(folder)
    one = launch(folder, tmp_path_factory.mktemp("one"), ["sft"], worker=worker)
    two = launch(folder, tmp_path_factory.mktemp("two"), ["sft"], config="zero3", worker=worker)
    return one, two


@pytest.mark.parametrize(
    ("name", "tolerance"), [("loss", 1e-5), ("grad_norm", 1e-4), ("loss/text", 1e-5), ("loss/image", 1e-5)]
)
def test_zero3_has_the_curve_of_one_process(runs, name, tolerance):
    one, two = runs
    ours, reference = two.logged("sft", name), one.logged("sft", name)
    print(name, [abs(a / b - 1) for a, b in zip(ours, reference, strict=True)])
    assert len(reference) == 3 and ours == pytest.approx(reference, rel=tolerance)


@pytest.mark.parametrize("name", ["eval_loss", "eval_loss/text", "eval_loss/image"])
def test_held_out_losses_are_those_of_one_process(runs, name):
    one, two = ([rank["eval"][name] for rank in run["sft"]] for run in runs)
    assert two == pytest.approx(one * 2, rel=1e-5)


def test_each_process_encodes_a_share_of_the_pictures_and_all_read_the_same_codes(runs):
    one, two = (run["sft"] for run in runs)
    assert one[0]["shards"] == [4] and two[0]["shards"] == [2, 2]
    assert two[0]["image_codes"] == two[1]["image_codes"] == one[0]["image_codes"]
    assert [len(codes) for codes in one[0]["image_codes"]] == [16] * 4 + [0] * 4


def test_samples_are_those_of_one_process(runs):
    one, two = (run["sft"] for run in runs)
    assert two[0]["samples"] == two[1]["samples"] == one[0]["samples"] and len(one[0]["samples"]) == 2
