"""The recipe of both tasks: what it refuses and says, and that one run teaches both."""

import json
from pathlib import Path

import pytest
from PIL import Image

from janus_trl.scripts import grpo
from janus_trl.scripts.run import evaluations_by_task
from janus_trl.task_mixture import join_tasks, row_for_task
from janus_trl.tiny import datasets as tiny_datasets

RECIPE = str(Path(__file__).parent.parent / "recipes" / "tiny" / "mixed.yaml")


@pytest.fixture
def small_tiny_data(monkeypatch):
    for split in tiny_datasets.SIZES:
        monkeypatch.setitem(tiny_datasets.SIZES, split, 8)


def refusal(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as stop:
        grpo.main(["--config", RECIPE, *argv])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_a_dry_run_says_what_a_rollout_is(small_tiny_data, capsys):
    grpo.main(["--config", RECIPE, "--dry_run", "true", "--task_proportions", '{"t2i": 0.25, "i2t": 0.75}'])
    said = capsys.readouterr().out
    assert "t2i 25%, i2t 75%: 8 prompts x 8 completions = 64 a rollout, 16 training rows, 16 held-out rows" in said
    assert "data (t2i, train): 8 rows" in said and "data (i2t, test): 8 rows" in said
    assert said.count("first prompt") == 2


@pytest.mark.parametrize(("argv", "message"), [
    (["--task_proportions", '{"t2i": 0.25, "i2t": 0.25}'], "sum to 0.5, not to 1"),
    (["--reward_funcs", "tiny_world"], "reward_funcs has no reward for task 'i2t'"),
    (["--max_train_rows", "4"], "4 training rows of t2i are fewer than the 8 prompts"),
])  # fmt: skip
def test_bad_recipes_are_refused_before_weights_load(small_tiny_data, capsys, argv, message):
    assert message in refusal(capsys, *argv)


def test_a_mixture_of_files_gives_each_task_its_rows_and_finds_their_pictures(tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(f"prompt {i}" for i in range(8)))
    (tmp_path / "questions").mkdir()
    Image.new("RGB", (8, 8), (1, 2, 3)).save(tmp_path / "questions" / "red.png")
    row = {"prompt": "Which?", "image": "red.png", "answer": "A", "choices": ["x", "y"]}
    (tmp_path / "questions" / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 9))
    names = {"t2i": tmp_path / "prompts.txt", "i2t": tmp_path / "questions" / "rows.jsonl"}
    mixture = [json.dumps({"name": str(name), "task": task}) for task, name in names.items()]
    run = grpo.configure([
        "--config", write_without(tmp_path, "dataset_name", "dataset_test_split"), "--dataset_mixture", *mixture,
        "--reward_funcs", "tests.grpo.ascending", "multiple_choice",
    ])  # fmt: skip
    assert {task: len(rows) for task, rows in run.train.items()} == {"t2i": 8, "i2t": 9} and run.test == {}
    joined = join_tasks(run.train)
    assert joined[8]["images"][0].getpixel((0, 0)) == (1, 2, 3) and joined[0]["images"] == []
    assert row_for_task(joined[8])["prompt"] == [{"role": "user", "content": "Which?"}]


def write_without(folder: Path, *keys: str) -> str:
    lines = [line for line in Path(RECIPE).read_text().splitlines() if line.split(":")[0] not in keys]
    (folder / "recipe.yaml").write_text("\n".join(lines))
    return str(folder / "recipe.yaml")


def run(folder: Path, steps: int, *argv: str):
    argv = ["--config", RECIPE, "--max_steps", str(steps), "--eval_steps", str(steps), "--sample_steps", "0", *argv]
    argv += ["--output_dir", str(folder), "--disable_tqdm", "true"]
    return grpo.train(grpo.configure(argv), argv)


def test_a_short_run_leaves_an_evaluation_of_each_task_behind(small_tiny_data, tmp_path, capsys):
    small = ["--per_device_train_batch_size", "8", "--max_reasoning_length", "4", "--max_completion_length", "4"]
    trainer = run(tmp_path, 2, *small, "--num_samples", "2")
    said = capsys.readouterr().out
    assert "t2i: Held-out reward on 8 rows" in said and "i2t: Held-out reward on 8 rows" in said
    assert [step for step, _ in trainer.evaluations] == [0, 2]
    logged = [row for row in trainer.state.log_history if "eval_reward/t2i" in row or "eval_reward/i2t" in row]
    assert len(logged) == 4 and not any("eval_reward" in row for row in logged)
    assert (tmp_path / "samples" / "step-000002.png").is_file()
    card = (tmp_path / "README.md").read_text()
    assert "| eval_reward/t2i |" in card and "| eval_reward/i2t |" in card and "for text-to-image and image-to" in card


@pytest.mark.slow
def test_sixty_steps_raise_the_held_out_reward_of_both_tasks(tmp_path):
    trainer = run(tmp_path, 60)
    for task, evaluations in evaluations_by_task(trainer).items():
        (_, before), (_, after) = evaluations
        gains = [after[row] - before[row] for row in before]
        mean = sum(gains) / len(gains)
        error = (sum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1) / len(gains)) ** 0.5
        assert mean >= 2 * error > 0, (task, mean, error)
