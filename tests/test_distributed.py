"""Real ZeRO-3 and DDP runs on two CPU processes against the same run on one: one launch each runs all scenarios."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import JanusForConditionalGeneration, JanusProcessor

from janus_trl.modeling import JanusForInterleavedGeneration, bind_special_ids
from janus_trl.sampling import encode_prompts
from tests.distributed_launch import Runs, build_janus, launch, launch_separately, scenarios_of
from tests.distributed_worker import EVAL_ROWS, GLOBAL_BATCH, STEPS

LONG = ["t2i_full", "t2i_lora", "i2t_full", "i2t_lora", "t2i_engine"]  # three steps
NO_GATHER = ["t2i_no_gather", "i2t_no_gather"]
DDP = ["t2i_full", "t2i_lora", "i2t_full"]
# What the other scenarios cover between them, run with `make test-slow`.
SLOW = [("zero3", "i2t_lora"), ("zero3", "i2t_no_gather"), ("ddp", "t2i_lora")]
CASES = [("zero3", name) for name in LONG + NO_GATHER] + [("ddp", name) for name in DDP]
LONG_CASES = [case for case in CASES if case[1] in LONG]
TRAINED = {
    "t2i": ("language_model", "generation_embeddings", "generation_aligner", "generation_head", "lm_head"),
    "i2t": ("language_model", "vision_model", "aligner", "lm_head"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("distributed_janus"))
    build_janus(path)
    return path


@pytest.fixture(scope="module")
def one(folder, tmp_path_factory) -> Runs:
    return launch(folder, tmp_path_factory.mktemp("one"), LONG + NO_GATHER)


@pytest.fixture(scope="module")
def zero3(request, folder, tmp_path_factory) -> Runs:
    names = [*scenarios_of(request, "zero3", LONG + NO_GATHER), "no_signal"]
    return launch(folder, tmp_path_factory.mktemp("zero3"), names, config="zero3")


@pytest.fixture(scope="module")
def ddp(request, folder, tmp_path_factory) -> Runs:
    names = [*scenarios_of(request, "ddp", DDP), "no_signal"]
    return launch(folder, tmp_path_factory.mktemp("ddp"), names, config="ddp")


@pytest.fixture
def two(request, launcher) -> Runs:
    """The runs of `launcher` on two processes."""
    return request.getfixturevalue(launcher)


def final(runs: Runs, scenario: str) -> Path:
    """The folder that the trainer saved after the last step."""
    runs[scenario]  # fails with the log if the scenario did not finish
    return runs.output / scenario / "final"


def saved_weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(next(path.glob("*model.safetensors")))


@torch.no_grad()
def log_probs(saved: Path, base: str, scenario: str) -> torch.Tensor:
    """Log-probs of a fixed batch under the saved model, or under `base` with the saved adapter.

    In float64: in float32 the rounding of this forward alone is 1e-5.
    """
    processor = JanusProcessor.from_pretrained(base)
    lora = scenario.endswith("lora")
    janus = JanusForInterleavedGeneration.from_pretrained(base if lora else str(saved), dtype=torch.float64)
    bind_special_ids(janus, processor)
    model = PeftModel.from_pretrained(janus, str(saved)).double() if lora else janus
    prompt = encode_prompts(processor, ["a blue dog", "the second, longer prompt"])
    generator = torch.Generator().manual_seed(0)
    if scenario.startswith("t2i"):
        first = torch.full((2, 1), janus.special_ids.begin_of_image)
        codes = torch.randint(16, (2, janus.num_image_codes), generator=generator) + janus.vocab_size
        completion = torch.cat([first, codes], 1)
    else:
        completion = torch.randint(10, janus.vocab_size, (2, 12), generator=generator)
    ids = torch.cat([prompt["input_ids"], completion], 1)
    labels = ids.clone()
    labels[:, : -completion.shape[1]] = -100
    mask = torch.cat([prompt["attention_mask"], torch.ones_like(completion)], 1)
    return model.eval()(ids, attention_mask=mask, labels=labels, fused_lm_head=True, guidance_scale=2.0).log_probs


@pytest.mark.parametrize(("launcher", "scenario"), CASES)
def test_rollouts_are_those_of_one_process_at_every_step(two, one, scenario):
    ours, reference = two.rollouts(scenario), one.rollouts(scenario)
    assert len(reference) >= 2 and all(len(step) == GLOBAL_BATCH for step in reference[:STEPS])
    assert ours[:STEPS] == reference[:STEPS]
    assert len({json.dumps(step) for step in reference[:STEPS]}) == len(reference[:STEPS])


@pytest.mark.parametrize(("launcher", "scenario"), [case for case in CASES if case[1].startswith("t2i")])
def test_decoded_pictures_are_those_of_one_process(two, one, scenario):
    ours, reference = two.rollouts(scenario, "brightness"), one.rollouts(scenario, "brightness")
    assert len(set(reference[0])) > 1
    for step, expected in zip(ours[:STEPS], reference[:STEPS], strict=True):
        assert step == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(("launcher", "scenario"), CASES)
def test_gradient_norms_are_those_of_one_process(two, one, scenario):
    norms = one.logged(scenario, "grad_norm")
    assert min(norms) > 0.5  # above max_grad_norm: clipping is tested too
    assert two.logged(scenario, "grad_norm") == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize(("launcher", "scenario"), LONG_CASES)
def test_three_steps_lead_to_the_log_probs_of_one_process(two, one, folder, scenario):
    reference = log_probs(final(one, scenario), folder, scenario)
    assert (log_probs(final(two, scenario), folder, scenario) - reference).abs().max() < 1e-5
    if not scenario.endswith("lora"):
        assert (log_probs(Path(folder), folder, scenario) - reference).abs().max() > 0.1  # training moved them


@pytest.mark.parametrize(("launcher", "scenario"), [case for case in CASES if case[1] in ("t2i_full", "t2i_lora")])
def test_reference_model_gives_a_kl_of_zero_before_the_first_update_only(two, scenario):
    first, *later = two.logged(scenario, "kl")
    assert first == 0.0
    assert min(later) > 1e-3


@pytest.mark.parametrize(("launcher", "scenario"), CASES)
def test_every_rollout_is_sampled_from_the_current_weights(two, scenario):
    assert max(two.logged(scenario, "logps/drift_max")) < 1e-4


@pytest.mark.parametrize("scenario", ["t2i_lora", "i2t_full", "t2i_engine"])
def test_the_engine_sampled_from_sharded_weights(zero3, one, scenario):
    assert all(rank["engine"] for rank in zero3[scenario])  # the tests above compare it with the plain path
    assert not one[scenario][0]["engine"]


@pytest.mark.parametrize(("launcher", "scenario"), CASES)
def test_the_spread_of_rewards_is_that_of_one_process(two, one, scenario):
    names = [name for name in one[scenario][0]["logs"][0] if name.startswith("signal/") or "within_group" in name]
    assert {"signal/within_group_std", "signal/flat_groups", "signal/duplicates"} < {*names}
    for name in names:
        expected = one.logged(scenario, name)
        assert all([log[name] for log in rank["logs"]] == pytest.approx(expected, abs=1e-5) for rank in two[scenario])
    assert min(two.logged(scenario, "signal/within_group_std")) > 0


@pytest.mark.parametrize("launcher", ["zero3", "ddp"])
def test_ranks_stop_together_without_a_signal_and_one_of_them_says_why(two):
    for rank in two["no_signal"]:
        assert [log["step"] for log in rank["logs"]] == [1, 2]
        assert [found[:2] for found in rank["monitor"]] == [[2, "no_signal"]]
    assert two.log().count("No group of the last 2 steps had any spread of rewards") == 1


@pytest.mark.parametrize("scenario", ["i2t_full", "i2t_lora", "i2t_no_gather"])
def test_a_rank_without_pictures_does_not_hang(zero3, scenario):
    with_pictures, without = ([call["pictures"] for call in rank["calls"]] for rank in zero3[scenario])
    assert all(min(step) > 0 for step in with_pictures)
    assert not any(max(step) for step in without)


@pytest.mark.parametrize("scenario", NO_GATHER)
def test_ranks_that_stop_their_text_at_different_lengths_do_not_hang(zero3, folder, scenario):
    processor = JanusProcessor.from_pretrained(folder)
    boi = processor.tokenizer.convert_tokens_to_ids(processor.image_start_token)
    stops = {boi, processor.tokenizer.eos_token_id}

    def longest(rows: list[list[int]]) -> int:
        return max(next((i for i, token in enumerate(row) if token in stops), len(row)) for row in rows)

    first, second = ([longest(call["completion_ids"]) for call in rank["calls"]] for rank in zero3[scenario])
    assert first != second


@pytest.mark.parametrize("scenario", ["t2i_full", "i2t_full"])
def test_saved_folder_is_a_whole_stock_checkpoint(zero3, folder, scenario):
    path = str(final(zero3, scenario))
    assert set(saved_weights(Path(path))) == set(saved_weights(Path(folder)))  # the names in the file
    assert json.loads((Path(path) / "config.json").read_text())["architectures"] == ["JanusForConditionalGeneration"]
    model, info = JanusForConditionalGeneration.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    base = JanusForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).state_dict()
    state = model.state_dict()
    assert {name: w.shape for name, w in state.items()} == {name: w.shape for name, w in base.items()}
    trained = TRAINED[scenario[:3]]
    parts = {}
    for name, weight in state.items():
        part = name.removeprefix("model.").split(".")[0]
        parts.setdefault(part, []).append(torch.equal(weight, base[name]))
    for part, equal in parts.items():
        assert (not all(equal)) if part in trained else all(equal), part


@pytest.mark.parametrize("scenario", ["t2i_lora", "i2t_lora"])
def test_saved_adapter_is_whole_and_trained(zero3, one, scenario):
    ours, reference = (saved_weights(final(runs, scenario)) for runs in (zero3, one))
    assert {name: w.shape for name, w in ours.items()} == {name: w.shape for name, w in reference.items()}
    assert all(w.numel() > 0 for w in ours.values())
    assert all(w.abs().max() > 0 for name, w in ours.items() if "lora_B" in name)


@pytest.mark.parametrize(("launcher", "scenario"), [case for case in CASES if case[1] in ("t2i_full", "t2i_lora")])
def test_two_steps_and_a_resumed_one_equal_three_straight_ones(two, scenario):
    straight, resumed = two[scenario][0]["logs"], two[scenario][0]["resumed"]["logs"]
    assert [entry["step"] for entry in resumed] == [1, 2, 3]
    assert resumed[2]["reward"] == straight[2]["reward"]
    assert resumed[2]["grad_norm"] == pytest.approx(straight[2]["grad_norm"], rel=1e-6)
    for rank in two[scenario]:
        assert [call["completion_ids"] for call in rank["resumed"]["calls"]] == [rank["calls"][2]["completion_ids"]]


@pytest.mark.parametrize("launcher", ["zero3", "ddp"])
def test_evaluation_counts_every_row_once_and_gives_the_mean_of_one_process(two, one):
    ours, reference = two["t2i_full"][0]["eval"], one["t2i_full"][0]["eval"]
    assert len(reference["rewards"]) == EVAL_ROWS
    assert ours["rewards"] == pytest.approx(reference["rewards"], abs=1e-6)
    mean = sum(reference["rewards"]) / EVAL_ROWS
    assert ours["log"]["eval_reward"] == pytest.approx(mean, abs=1e-6)
    assert len(set(reference["rewards"])) > 1


@pytest.mark.parametrize("launcher", ["zero3", "ddp"])
def test_no_two_rows_of_a_group_that_spans_the_ranks_are_equal(two):
    for step in two.rollouts("t2i_full"):
        codes = {tuple(row[-18:]) for row in step}
        assert len(codes) == GLOBAL_BATCH


@pytest.mark.parametrize("scenario", DDP)
def test_ddp_ranks_hold_equal_weights_after_three_steps(ddp, scenario):
    first, second = ddp[scenario]
    assert first["digest"] == second["digest"]


@pytest.mark.parametrize("scenario", DDP)
def test_ddp_weights_are_those_of_one_process(ddp, one, scenario):
    ours, reference = (saved_weights(final(runs, scenario)) for runs in (ddp, one))
    assert max((ours[name] - weight).abs().max() for name, weight in reference.items()) < 1e-4


def test_a_reward_that_raises_on_one_rank_ends_both_with_its_name(folder, tmp_path):
    for status, stderr in launch_separately(folder, tmp_path, "reward_raises", timeout=60):
        assert status not in (None, 0), stderr[-3000:]
        assert "odd_ids" in stderr and "rank 1" in stderr and "no score for this picture" in stderr
