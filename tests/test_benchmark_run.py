"""Evaluation beyond a mean: accuracy with an interval, two models side by side, benchmarks, rewards as in training."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model
from PIL import Image
from trl import ModelConfig

from janus_trl.evaluation import (
    RewardFailure,
    accuracy,
    append_scores,
    call_rewards,
    comparison_table,
    difference,
    mean_and_error,
    short_names,
    wilson_interval,
)
from janus_trl.modeling import JanusForInterleavedGeneration
from janus_trl.rewards import Scores, get_reward_funcs
from janus_trl.script_arguments import lora_config
from janus_trl.scripts import evaluate
from janus_trl.tiny import grade, read_picture, tiny_dataset
from tests.generation_files import GENEVAL, check_geneval, files, geneval_file
from tests.grpo import pictures_dataset

T2I = ["--model_name_or_path", "tiny", "--task", "t2i", "--dataset_name", "tiny", "--reward_funcs", "tiny_world"]
PROMPTS_OF_TINY = ["--benchmark", "prompts", "--prompts", "tiny", "--output_dir", "x"]
I2T = ["--model_name_or_path", "tiny", "--task", "i2t", "--dataset_name", "tiny", "--reward_funcs", "multiple_choice"]


@pytest.fixture
def evaluated(capsys):
    """Runs the script; returns its one JSON line and what went to stderr."""

    def call(*argv: str) -> tuple[dict, str]:
        capsys.readouterr()
        evaluate.main(list(argv))
        captured = capsys.readouterr()
        (line,) = captured.out.splitlines()
        return json.loads(line), captured.err

    return call


@pytest.fixture
def rewards_module(tmp_path, monkeypatch):
    """Rewards of a user's own: mean brightness from 0 to 1, whose calls are kept."""
    (tmp_path / "own_rewards.py").write_text(
        "calls = []\n"
        "def brightness(prompts, completions, generated_images, completion_ids, tag=None, **columns):\n"
        "    calls.append((prompts, completions, tag, columns))\n"
        "    return [sum(p.convert('L').tobytes()) / p.width / p.height / 255 for p in generated_images]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import sys

    sys.modules.pop("own_rewards", None)
    return "own_rewards:brightness"


def brightness(path) -> float:
    picture = Image.open(path).convert("L")
    return sum(picture.tobytes()) / picture.width / picture.height / 255


@pytest.mark.parametrize(
    "right, rows, low, high",
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962), (0, 0, 0, 1)],
)
def test_wilson_interval_has_the_published_values(right, rows, low, high):
    assert wilson_interval(right, rows) == pytest.approx((low, high), abs=5e-5)


def test_accuracy_counts_ones_among_scorable_rows():
    figure = accuracy([1.0, 0.5, None, 0.0, 1.0])
    assert (figure["accuracy"], figure["right"], figure["rows"]) == (0.5, 2, 4)
    assert figure["interval"] == list(wilson_interval(2, 4))
    assert accuracy([None])["accuracy"] is None


def test_tiny_world_accuracy_by_category(evaluated):
    line, _ = evaluated(*T2I, "--max_test_rows", "8")
    figure = line["accuracy"]["tiny_world"]
    assert figure["rows"] == 8 and 0 <= figure["interval"][0] <= figure["accuracy"] <= figure["interval"][1] <= 1
    groups = line["category_accuracy"]["tiny_world"]
    assert set(groups) == set(line["category"])
    assert sum(group["right"] for group in groups.values()) == figure["right"]
    assert figure["accuracy"] <= line["rewards"]["tiny_world"]["mean"]  # partly met demands are not right


def test_multiple_choice_accuracy_has_an_interval(evaluated):
    line, _ = evaluated(*I2T, "--max_test_rows", "8", "--greedy", "true")
    figure = line["accuracy"]["multiple_choice"]
    assert figure["accuracy"] == pytest.approx(line["rewards"]["multiple_choice"]["mean"])
    assert figure["interval"] == pytest.approx(wilson_interval(figure["right"], 8))


@pytest.mark.parametrize("task", ["t2i", "i2t"])
def test_rewards_get_what_training_passes(trainer_of, processor, task):
    """Prompts, completions and columns of the same rows: the form in an evaluation is that of training."""
    seen = []

    def reward(**given):
        seen.append(given)
        return [0.5 * i for i in range(len(given["prompts"]))]

    dataset = pictures_dataset(counts=(1, 2, 0, 1)) if task == "i2t" else None
    trainer = trainer_of(reward, dataset=dataset, task=task, num_generations=2, max_steps=2)
    trainer.train()
    rows = [dict(row) for row in dataset] if dataset else [{"prompt": p} for p in ("q", "two cats")]
    texts = ["text"] * len(rows)
    images = [Image.new("RGB", (16, 16))] * len(rows) if task == "t2i" else []
    call_rewards(get_reward_funcs([reward]), rows, texts, [[1]] * len(rows), images)
    *training, ours = seen
    assert ours.keys() == training[0].keys()

    def form(prompt):
        if isinstance(prompt, str):
            return str
        return [(m["role"], [p["type"] for p in m["content"]], m["content"][-1]["text"]) for m in prompt]

    forms = {repr(form(p)) for call in training for p in call["prompts"]}
    assert {repr(form(p)) for p in ours["prompts"]} >= forms and len(forms) > (task == "i2t")
    for call in (*training, ours):
        for completion in call["completions"]:
            if task == "t2i":
                assert isinstance(completion, str)
            else:
                assert [(m["role"], type(m["content"])) for m in completion] == [("assistant", str)]


def test_two_equal_models_differ_by_nothing(evaluated, tmp_path):
    line, table = evaluated(
        *T2I, "--max_test_rows", "6", "--compare", "tiny", "--samples_png", str(tmp_path / "pairs.png")
    )
    assert line["compare"]["difference"] == {"mean": 0.0, "standard_error": 0.0, "rows": 6}
    assert line["compare"]["reward"] == line["reward"]
    assert "difference" in table and "accuracy tiny_world" in table
    picture = Image.open(tmp_path / "pairs.png").convert("RGB")
    assert picture.width == 4 * (192 + 8) + 8  # two pairs in a row
    left, right = (picture.crop((x, 8, x + 192, 8 + 192)) for x in (8, 8 + 200))
    assert left.tobytes() == right.tobytes()


def test_a_worse_model_is_behind_by_the_difference(evaluated, tmp_path):
    base = evaluate.base_checkpoint("tiny")
    model = JanusForInterleavedGeneration.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(model, lora_config(ModelConfig(use_peft=True, lora_r=4)))
    model.peft_config["default"].base_model_name_or_path = base
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.5)
    model.save_pretrained(str(tmp_path / "loud"))
    line, table = evaluated(*T2I, "--max_test_rows", "8", "--compare", str(tmp_path / "loud"))
    gain = line["compare"]["difference"]
    assert (
        gain["mean"] == pytest.approx(line["reward"]["mean"] - line["compare"]["reward"]["mean"]) and gain["mean"] > 0
    )
    assert any(line.split() == ["tiny", "loud"] for line in table.splitlines())
    assert f"{gain['mean']:.3f} +- {gain['standard_error']:.3f}" in table


def test_a_table_holds_both_models():
    first = {"reward": mean_and_error([1.0, 0.0]), "rewards": {"r": mean_and_error([1.0, 0.0])}}
    first |= {"accuracy": {"r": accuracy([1.0, 0.0])}, "category": {"x": mean_and_error([1.0])}}
    second = {"reward": mean_and_error([0.5, 0.5]), "rewards": {"r": mean_and_error([0.5, 0.5])}}
    second |= {"accuracy": {"r": accuracy([0.5, 0.5])}, "category": {}}
    lines = comparison_table(("a", "b"), first, second, difference([1.0, 0.0], [0.5, 0.5])).splitlines()
    assert lines[0].split() == ["a", "b"]
    assert lines[1].split() == ["reward", "0.500", "+-", "0.500", "0.500", "+-", "0.000"]
    assert lines[3].split()[:3] == ["accuracy", "r", "0.500"]
    assert lines[4].split() == ["category", "x", "1.000", "-"]
    assert short_names("runs/a/final", "runs/b/final") == ("a/final", "b/final")


def test_geneval_pictures_are_scored_from_the_folder(evaluated, rewards_module, janus_folder, tmp_path):
    argv = ["--model_name_or_path", janus_folder, "--benchmark", "geneval", "--output_dir", str(tmp_path / "out")]
    argv += ["--prompts", geneval_file(tmp_path, GENEVAL), "--reward_funcs", rewards_module]
    line, _ = evaluated(*argv)
    check_geneval(tmp_path / "out", GENEVAL, 16)
    values = [
        brightness(tmp_path / "out" / f"{i:05d}" / "samples" / f"{s:04d}.png") for i in range(3) for s in range(4)
    ]
    assert line["benchmark"] == "geneval" and line["prompts"] == 3 and line["num_images"] == 4
    assert line["guidance_scale"] == 5.0 and line["reward"]["rows"] == 12
    assert line["rewards"]["brightness"]["mean"] == pytest.approx(sum(values) / 12)
    assert line["category"]["counting"]["mean"] == pytest.approx(sum(values[4:8]) / 4)
    import own_rewards

    ((prompts, completions, tags, columns),) = own_rewards.calls
    assert prompts[4] == "a photo of two cows" and tags[4] == "counting" and completions[4] == ""
    assert columns["exclude"][4] == [{"class": "cow", "count": 3}] and columns["exclude"][0] is None
    before = files(tmp_path / "out")
    again, _ = evaluated(*argv)
    assert again["reward"] == line["reward"] and files(tmp_path / "out") == before


def test_pictures_that_a_judge_failed_to_score_are_left_out_of_the_total(evaluated, tmp_path, monkeypatch):
    (tmp_path / "judging.py").write_text(
        "from janus_trl.rewards import Scores\n"
        "def judge(generated_images):\n"
        "    n = len(generated_images)\n"
        "    return Scores([1.0] * (n - 1) + [None], failed=[n - 1])\n"
        "def style(generated_images):\n"
        "    return [float('nan')] + [1.0] * (len(generated_images) - 1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("janus_trl.benchmark_run.SCORED_AT_ONCE", 3)
    (tmp_path / "prompts.txt").write_text("".join(f"cat {i}\n" for i in range(6)))
    line, _ = evaluated(
        "--model_name_or_path", "tiny", "--benchmark", "prompts", "--prompts", str(tmp_path / "prompts.txt"),
        "--output_dir", str(tmp_path / "out"), "--reward_funcs", "judging:judge", "judging:style", "--num_images", "1",
    )  # fmt: skip
    # Of each three pictures the first has no style and the third no judgement.
    assert line["rewards"]["judge"]["rows"] == line["rewards"]["style"]["rows"] == 4
    assert line["reward"] == {"mean": 2.0, "standard_error": 0.0, "rows": 2}


def test_scores_of_further_rows_are_counted_on():
    scores = Scores([1.0, None], {1: float("inf")}, failed=[0])
    append_scores(scores, Scores([None, 2.0], {0: float("inf")}, failed=[1]))
    assert scores == [1.0, None, None, 2.0]
    assert scores.faults == {1: float("inf"), 2: float("inf")} and scores.failed == (0, 3)


def test_a_reward_that_raises_is_named_with_its_row():
    async def picky(prompts):
        return [1.0 / (prompt != "b") for prompt in prompts]

    def wrong(prompts):
        raise ValueError("reward 'wrong': no server.")

    rows, arguments = [{"prompt": text} for text in "abc"], (["t"] * 3, [[1]] * 3, [Image.new("RGB", (8, 8))] * 3)
    with pytest.raises(RewardFailure, match=r"^reward 'picky' failed on row 1 \(prompt 'b'\): ZeroDivisionError: "):
        call_rewards(get_reward_funcs([picky]), rows, *arguments)
    with pytest.raises(RewardFailure, match=r"^reward 'wrong': no server. \(p0\)$"):
        call_rewards(get_reward_funcs([wrong]), rows, *arguments, row_name="p{}".format)


@pytest.mark.parametrize("how", ["dataset", "benchmark"])
def test_a_reward_that_raises_ends_an_evaluation_with_one_message(capsys, monkeypatch, tmp_path, how):
    (tmp_path / "raising.py").write_text("def broken(generated_images, prompts):\n    return prompts[0].nothing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    argv = ["--model_name_or_path", "tiny", "--max_test_rows", "2", "--reward_funcs", "raising:broken"]
    if how == "dataset":
        argv += ["--dataset_name", "tiny", "--max_text_length", "0"]
    else:
        out = tmp_path / "out"
        argv += ["--benchmark", "prompts", "--prompts", "tiny", "--output_dir", str(out), "--num_images", "1"]
    with pytest.raises(SystemExit) as stop:
        evaluate.main(argv)
    where = "row 0 (prompt '" if how == "dataset" else str(tmp_path / "out" / "images" / "00000-0000.png")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and f"error: reward 'broken' failed on {where}" in error
    assert "AttributeError" in error and "Traceback" not in error


def test_a_benchmark_of_two_models(evaluated, rewards_module, janus_folder, tmp_path):
    argv = ["--model_name_or_path", janus_folder, "--compare", janus_folder, "--benchmark", "prompts"]
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    argv += ["--prompts", str(tmp_path / "prompts.txt"), "--output_dir", str(tmp_path / "out")]
    line, table = evaluated(*argv, "--reward_funcs", rewards_module)
    assert line["compare"]["difference"]["mean"] == 0.0 and "brightness" in table
    assert os.listdir(tmp_path / "out" / "images") == os.listdir(tmp_path / "out" / "compare" / "images")
    assert (tmp_path / "out" / "comparison.png").is_file()
    bare, _ = evaluated(*argv)  # without rewards: pictures alone
    assert "reward" not in bare and bare["prompts"] == 2


def test_the_embedded_world_as_a_benchmark(evaluated, tmp_path):
    line, _ = evaluated(
        "--model_name_or_path", "tiny", "--benchmark", "prompts", "--prompts", "tiny", "--max_test_rows", "8",
        "--output_dir", str(tmp_path / "out"), "--reward_funcs", "tiny_world", "--num_images", "2",
    )  # fmt: skip
    rows = tiny_dataset("t2i", "test").select(range(8))
    pictures = [Image.open(tmp_path / "out" / f"images/{i:05d}-{s:04d}.png") for i in range(8) for s in range(2)]
    demands = [row["demands"] for row in rows for _ in range(2)]
    expected = [grade(*pair) for pair in zip(demands, read_picture(pictures))]
    assert line["reward"]["mean"] == pytest.approx(sum(expected) / 16) and line["reward"]["mean"] > 0.3
    assert line["guidance_scale"] == 1.0 and line["accuracy"]["tiny_world"]["right"] == sum(v == 1 for v in expected)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--benchmark", "genevall"], "benchmark = 'genevall' must be one of: prompts, geneval"),
        (["--benchmark", "dpg", "--output_dir", "x"], "prompts is not set, which benchmark = 'dpg' needs"),
        (["--benchmark", "dpg", "--prompts", "tiny"], "output_dir is not set"),
        (["--benchmark", "dpg", "--task", "i2t"], "set task: t2i"),
        (["--benchmark", "dpg", "--dataset_name", "tiny"], "dataset_name and benchmark are both set"),
        (["--prompts", "tiny"], "prompts is for a benchmark"),
        (["--benchmark", "geneval", "--prompts", "tiny", "--output_dir", "x"], "lacks tag, include"),
        ([*PROMPTS_OF_TINY, "--reward_funcs", "tiny_word"], "tiny_world"),
        ([*PROMPTS_OF_TINY, "--compare", "no/such/model"], "no/such"),
    ],
)
def test_bad_input_is_one_message_before_weights_load(capsys, monkeypatch, tmp_path, argv, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(JanusForInterleavedGeneration, "from_pretrained", None)
    with pytest.raises(SystemExit) as stop:
        evaluate.main(["--model_name_or_path", "tiny", *argv])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_made(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(JanusForInterleavedGeneration, "from_pretrained", None)
    argv = ["--benchmark", "dpg", "--prompts", "tiny", "--output_dir", str(tmp_path / "x"), "--dry_run", "true"]
    evaluate.main(["--model_name_or_path", "tiny", *argv])
    assert capsys.readouterr().out == "dpg: 512 prompts, 2048 pictures a model, rewards: none\n"


def test_rewards_of_questions_read_both_forms():
    """The registered rewards take messages as they take texts."""
    rewards = SimpleNamespace(funcs=get_reward_funcs(["multiple_choice"], task="i2t").funcs, weights=[1.0])
    rows = [{"prompt": "q", "images": [], "answer": "B", "choices": ["x", "y"]}]
    assert call_rewards(rewards, rows, ["The answer is B."], [[1]], []) == [[1.0]]
