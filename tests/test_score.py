"""The scoring script: the right prompt for each picture, the figures of its table, and what it refuses."""

import csv
import io
import json
import statistics

import numpy as np
import pytest
from PIL import Image

from janus_trl.scripts import score

MODULE = """
import asyncio
def brightness(generated_images, prompts, **columns):
    return [None if p == "skip" else float(image.getpixel((0, 0))[0]) for image, p in zip(generated_images, prompts)]

def wants(generated_images, target: list):
    return [float(image.getpixel((0, 0))[0] == value) for image, value in zip(generated_images, target)]

def broken(generated_images):
    return [1.0]

def broken_once(generated_images):
    return [float("nan")] + [1.0] * (len(generated_images) - 1)

def picky(generated_images):
    return [1 / (image.getpixel((0, 0))[0] - 60) for image in generated_images]

CLIENT = []

async def client(generated_images):
    loop = asyncio.get_running_loop()
    CLIENT.append(loop)
    return [float(CLIENT[0] is loop and not loop.is_closed()) for _ in generated_images]

async def later(prompts, generated_images, log_metric):
    log_metric("later/calls", float(len(prompts)))
    return [float(len(prompt)) for prompt in prompts]
"""


JUDGE = "{name: vlm_judge, args: {base_url: 'http://127.0.0.1:9', model: m, max_retries: 0}}"


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """Pictures 0.png to 11.png of shades 0, 20, ... in `out`, and a module of rewards, in the working folder."""
    import sys

    (tmp_path / "out").mkdir()
    for i in range(12):
        Image.new("RGB", (16, 16), (20 * i, 0, 0)).save(tmp_path / "out" / f"{i}.png")
    (tmp_path / "out" / "notes.md").write_text("no picture")
    (tmp_path / "my_scores.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("my_scores", "picture_detector"):
        sys.modules.pop(name, None)


def read_csv(path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_picture_gets_its_own_line_numbers_sorted_as_numbers(pictures, capsys):
    (pictures / "prompts.txt").write_text("".join(f"number {i}\n" for i in range(12)))
    rewards = ["my_scores:brightness", "jpeg_size", "my_scores:later"]
    score.main(["--rewards", *rewards, "--images", "out", "--prompts", "prompts.txt", "--batch_size", "5"])
    rows = read_csv("scores.csv")
    assert list(rows[0]) == ["image", "prompt", "brightness", "jpeg_size", "later"]
    assert [(row["image"], row["prompt"], row["brightness"], row["later"]) for row in rows] == [
        (f"out/{i}.png", f"number {i}", str(20.0 * i), str(float(len(f"number {i}")))) for i in range(12)
    ]
    buffer = io.BytesIO()
    Image.open("out/3.png").save(buffer, "JPEG", quality=95)
    assert float(rows[3]["jpeg_size"]) == buffer.tell() / 1000
    lines = capsys.readouterr().out.splitlines()
    shades = [20.0 * i for i in range(12)]
    assert lines[0].split() == ["reward", "scored", "mean", "sd", "min", "max", "lowest", "highest"]
    figures = ["110.0000", f"{statistics.stdev(shades):.4f}", "0.0000", "220.0000"]
    assert lines[1].split() == ["brightness", "12/12", *figures, "0.png", "11.png"]
    assert lines[4] == "later/calls: 12" and "12 pictures" in lines[5] and "scores.csv" in lines[5]


def test_one_prompt_a_pattern_and_unscorable_rows(pictures, capsys):
    args = ["--images", "out/1?.png", "--prompt", "skip", "--output", "other.csv"]
    score.main(["--rewards", "my_scores:brightness", "{name: jpeg_size, args: {smaller: true}}", *args])
    rows = read_csv("other.csv")
    assert [(row["image"], row["brightness"]) for row in rows] == [("out/10.png", ""), ("out/11.png", "")]
    assert all(float(row["jpeg_size"]) < 0 for row in rows)
    assert capsys.readouterr().out.splitlines()[1].split() == ["brightness", "0/2", *["-"] * 6]


def test_rows_of_a_jsonl_file_carry_columns(pictures):
    rows = [{"image": f"{i}.png", "prompt": f"p{i}", "target": [60, 80][i % 2]} for i in (3, 2, 4)]
    (pictures / "out" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    score.main(["--rewards", "my_scores:wants", "--prompts", "out/rows.jsonl"])
    assert [(row["prompt"], row["wants"]) for row in read_csv("scores.csv")] == [
        ("p3", "0.0"),
        ("p2", "0.0"),
        ("p4", "0.0"),
    ]
    rows = [{**row, "target": 20 * int(row["image"].partition(".")[0])} for row in rows]
    (pictures / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    score.main(
        ["--rewards", "my_scores:wants", "--prompts", "rows.jsonl", "--images", *(f"out/{i}.png" for i in (2, 3, 4))]
    )
    assert [row["wants"] for row in read_csv("scores.csv")] == ["1.0"] * 3


def test_geneval_rows_reach_the_reward_as_in_training(pictures):
    (pictures / "picture_detector.py").write_text(
        "def detect(image, labels):\n"
        "    return [{'label': 'dog', 'box': [0, 0, 9, 9], 'score': image.getpixel((0, 0))[0] / 255}]\n"
    )
    row = {"prompt": "a dog", "tag": "single_object", "include": [{"class": "dog", "count": 1}]}
    left = {**row, "include": [*row["include"], {"class": "cat", "count": 1, "position": ["left of", 0]}]}
    rows = [{**row, "image": "out/11.png"}, {**row, "image": "out/1.png"}, {**left, "image": "out/10.png"}]
    (pictures / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    score.main(["--rewards", "{name: geneval, args: {detector: picture_detector:detect}}", "--prompts", "rows.jsonl"])
    assert [row["geneval"] for row in read_csv("scores.csv")] == ["1.0", "0.0", "0.0"]


def test_the_rewards_of_a_recipe_are_taken(pictures):
    recipe = (
        "learning_rate: 1.0e-5\nreward_funcs:\n  - {name: jpeg_size, args: {quality: 50}}\n  - my_scores.brightness\n"
    )
    (pictures / "recipe.yaml").write_text(recipe)
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(noise).save(pictures / "noise.png")
    score.main(["--config", "recipe.yaml", "--images", "noise.png", "--prompt", "noise"])
    rows = read_csv("scores.csv")
    assert float(rows[0]["brightness"]) == noise[0, 0, 0] and float(rows[0]["jpeg_size"]) > 0.3


def test_of_a_recipe_of_both_tasks_the_rewards_of_pictures_are_taken(pictures, capsys):
    rewards = "[jpeg_size, multiple_choice, {name: format, alias: layout, task: i2t}, my_scores.brightness]"
    (pictures / "recipe.yaml").write_text(f"task: both\nreward_funcs: {rewards}\n")
    score.main(["--config", "recipe.yaml", "--images", "out", "--prompt", "x"])
    assert list(read_csv("scores.csv")[0]) == ["image", "prompt", "jpeg_size", "brightness"]
    assert capsys.readouterr().err == "skipped, as they do not score pictures: multiple_choice, layout\n"
    (pictures / "recipe.yaml").write_text("task: both\nreward_funcs: [multiple_choice]\n")
    with pytest.raises(SystemExit):
        score.main(["--config", "recipe.yaml", "--images", "out"])
    assert "does not fit task 't2i'" in capsys.readouterr().err


def test_all_batches_of_an_async_reward_have_one_open_event_loop(pictures):
    score.main(["--rewards", "my_scores:client", "--images", "out", "--batch_size", "5"])
    assert [row["client"] for row in read_csv("scores.csv")] == ["1.0"] * 12


def test_values_that_are_not_finite_are_counted(pictures, capsys):
    score.main(["--rewards", "my_scores:broken_once", "--images", "out"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[1] == "11/12" and lines[2] == "broken_once/nan: 1"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--images", "out"], "either --rewards"),
        (["--rewards", "my_scores:later", "--images", "out"], "reward 'later' needs prompts; give --prompts FILE"),
        (["--rewards", "jpeg_size"], "--images is not set"),
        (["--rewards", "jpeg_siz", "--images", "out"], "did you mean 'jpeg_size'"),
        (["--rewards", "jpeg_size", "--images", "nowhere"], "--images nowhere: there is no picture"),
        (
            ["--rewards", "jpeg_size", "--images", "out", "--prompts", "no.txt"],
            "--prompts no.txt: there is no such file",
        ),
        (["--rewards", "jpeg_size", "--images", "out", "--prompts", "two.txt"], "has 2 lines for 12 pictures"),
        (["--rewards", "jpeg_size", "--prompts", "two.txt"], "--images is not set, and two.txt names no pictures"),
        (
            ["--rewards", "jpeg_size", "--images", "out", "--prompts", "two.txt", "--prompt", "x"],
            "either --prompts FILE",
        ),
        (["--rewards", "jpeg_size", "--images", "out", "--prompts", "bad.jsonl"], "line 1 is not valid JSON"),
        (["--rewards", "jpeg_size", "--prompts", "away.jsonl"], "line 1: image 'away.png' is not a file"),
        (["--rewards", "jpeg_size", "--images", "out", "--prompts", "one.jsonl"], "no row for 11 of the pictures"),
        (["--rewards", "multiple_choice", "--images", "out"], "does not fit task 't2i'"),
        (["--rewards", "geneval", "--images", "out"], "needs the column 'include'"),
        (["--rewards", "{name: jpeg_size", "--images", "out"], "is no valid mapping"),
        (["--rewards", "jpeg_size", "--images", "out", "--batchsize", "3"], "Did you mean 'batch_size'"),
        (["--rewards", "my_scores:broken", "--images", "out"], "reward 'broken' returned 1 values"),
        (["--rewards", "my_scores:picky", "--images", "out"], "reward 'picky' failed on out/3.png: ZeroDivisionError"),
        (["--config", "no.yaml", "--images", "out"], "there is no such file"),
        (
            ["--images", "out", "--prompt", "x", "--rewards", JUDGE],
            "all 1 calls to http://127.0.0.1:9/chat/completions failed",
        ),
    ],
)
def test_what_cannot_be_scored_is_one_message_and_exit_code_two(pictures, capsys, argv, message):
    (pictures / "two.txt").write_text("a\nb\n")
    (pictures / "bad.jsonl").write_text("{")
    (pictures / "away.jsonl").write_text('{"image": "away.png"}')
    (pictures / "one.jsonl").write_text('{"image": "1.png"}')
    with pytest.raises(SystemExit) as stop:
        score.main(argv)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("error:") == 1 and "Traceback" not in error
    assert not (pictures / "scores.csv").exists()
