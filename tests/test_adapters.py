"""Published layouts of data sets, on rows in the form in which they are published."""

import base64
import io
import json
import random
from pathlib import Path

import datasets
import pytest
from PIL import Image

from janus_trl.adapters.geometry import distractors, letter_in, value_of
from janus_trl.data import load_dataset_splits
from janus_trl.rewards.multiple_choice import multiple_choice_reward
from janus_trl.scripts import geometry3k


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(name, layout: str, task: str = "t2i", **options) -> datasets.Dataset:
    return load_dataset_splits(str(name), task=task, dataset_format=layout, **options)["train"]


def png(colour=(1, 2, 3)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), colour).save(buffer, "PNG")
    return buffer.getvalue()


# ---- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["prompts", "reasongen_rl"])
def test_prompt_lists_have_one_prompt_a_line(tmp_path, layout):
    (tmp_path / "train.txt").write_text("a cat on a mat, 4k \nein Hund.\n\n")
    dataset = load(tmp_path / "train.txt", layout)
    assert dataset.to_list() == [{"prompt": "a cat on a mat, 4k"}, {"prompt": "ein Hund."}]


def test_prompts_in_a_table_lose_the_other_columns(tmp_path):
    datasets.Dataset.from_dict({"caption": ["a", "b"], "jpg_0": [png(), png()]}).to_parquet(str(tmp_path / "d.parquet"))
    assert load(tmp_path / "d.parquet", "prompts").to_list() == [{"prompt": "a"}, {"prompt": "b"}]


REASONGEN = {
    "brief_caption": "A dog.",
    "detailed_caption": "A brown dog on grass.",
    "augmented_prompts": {
        "short_caption": "Dog on grass.",
        "paraphrases": ["A hound stands.", "A pup outside."],
        "tags": ["dog", "grass"],
        "varied_captions": ["A dog rests.", "One dog."],
        "object_prompts": ["a dog", "a tree", "grass"],
    },
    "augmented_cots": {
        "step_by_step": "First the grass. Then the dog.",
        "object_centric": ["dog: brown", "grass: green"],
        "tags": ["brown dog", "lawn"],
        "region_descriptions": ["left: dog", "right: tree"],
    },
}
REASONGEN_PROMPTS = {"Dog on grass", "A hound stands", "A pup outside", "dog,grass", "A dog rests", "One dog",
                     "a dog, a tree and grass"}  # fmt: skip
REASONGEN_PLANS = {"First the grass. Then the dog.", "dog: brown; grass: green", "brown dog, lawn",
                   "left: dog; right: tree"}  # fmt: skip


def test_reasongen_sft_draws_every_kind_of_prompt_and_plan(tmp_path):
    name = write(tmp_path / "d.jsonl", [{**REASONGEN, "base64": base64.b64encode(png()).decode()}] * 100)
    dataset = load(name, "reasongen_sft", stage="sft")
    assert set(dataset.column_names) == {"prompt", "reasoning", "image"}
    assert set(dataset["prompt"]) == REASONGEN_PROMPTS
    assert set(dataset["reasoning"]) == REASONGEN_PLANS
    assert dataset[0]["image"].getpixel((0, 0)) == (1, 2, 3)
    assert list(dataset["prompt"]) == list(load(name, "reasongen_sft", stage="sft")["prompt"])
    assert list(dataset["prompt"]) != list(load(name, "reasongen_sft", stage="sft", seed=1)["prompt"])
    assert load(name, "reasongen_sft").column_names == ["prompt", "reasoning"]  # no target picture in RL


def test_reasongen_sft_reads_stored_pictures_and_rows_without_augmentations(tmp_path):
    row = {**REASONGEN, "augmented_prompts": None, "augmented_cots": None, "image": {"bytes": png(), "path": None}}
    features = {"brief_caption": datasets.Value("string"), "detailed_caption": datasets.Value("string")}
    texts = {"short_caption": datasets.Value("string"), "tags": datasets.List(datasets.Value("string"))}
    plans = {"step_by_step": datasets.Value("string")}
    features |= {"augmented_prompts": texts, "augmented_cots": plans, "image": datasets.Image()}
    table = datasets.Dataset.from_list([row], features=datasets.Features(features))
    table.to_parquet(str(tmp_path / "d.parquet"))
    row = load(tmp_path / "d.parquet", "reasongen_sft", stage="sft")[0]
    assert (row["prompt"], row["reasoning"]) == ("A dog", "A brown dog on grass.")
    assert row["image"].mode == "RGB"


def test_t2i_r1_rows_keep_what_their_rewards_read(tmp_path):
    rows = [
        {"prompt": "a photo of a car below a zebra", "nouns": ["car", "zebra"],
         "spatial_info": {"obj1": "car", "obj2": "zebra", "locality": "below"}, "task_type": "spatial"},
        {"prompt": "three umbrellas", "nouns": ["umbrella"], "numeracy_info": [{"obj_name": "umbrella", "num": 3}],
         "task_type": "numeracy"},
        {"task_type": "color", "prompt": "a brown chair", "nouns": ["chair"], "attr_nouns": ["brown chair"]},
    ]  # fmt: skip
    spatial, numeracy, color = load(write(tmp_path / "d.jsonl", rows), "t2i_r1").to_list()
    assert json.loads(spatial["spatial_info"]) == rows[0]["spatial_info"] and spatial["attr_nouns"] == []
    assert json.loads(numeracy["numeracy_info"]) == rows[1]["numeracy_info"]
    assert json.loads(numeracy["spatial_info"]) == {} and json.loads(color["numeracy_info"]) == []
    assert color["attr_nouns"] == ["brown chair"] and color["nouns"] == ["chair"] and color["task_type"] == "color"


def test_geneval_rows_keep_their_demands_without_filled_in_keys(tmp_path):
    rows = [
        {"tag": "counting", "include": [{"class": "cup", "count": 3}], "exclude": [{"class": "cup", "count": 4}],
         "prompt": "a photo of three cups"},
        {"tag": "position", "include": [{"class": "tv", "count": 1},
         {"class": "cow", "count": 1, "position": ["left of", 0]}], "prompt": "a photo of a cow left of a tv"},
    ]  # fmt: skip
    dataset = load(write(tmp_path / "d.jsonl", rows), "geneval")
    assert list(dataset["prompt"]) == [row["prompt"] for row in rows]
    assert [json.loads(text) for text in dataset["include"]] == [row["include"] for row in rows]
    assert [json.loads(text) for text in dataset["exclude"]] == [rows[0]["exclude"], []]
    assert list(dataset["tag"]) == ["counting", "position"]


# ---- multiple choice ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("12.5", 12.5), ("1,200", 1200), ("- 4", -4), ("2 \\sqrt { 221 }", 29.732),
        ("\\frac { 36 } { 5 }", 7.2), ("6 \\pi", 18.850), ("60^{\\circ}", 60), ("60^\\circ", 60),
        ("\\frac{5\\sqrt{3}}{2}", 4.330), ("3+2\\sqrt{2}", 5.828),
        ("32°", 32), ("x = 5", None), ("yes", None), ("", None), ("3 cm of", None), ("\\frac{1}{0}", None),
    ],
)  # fmt: skip
def test_numbers_are_read_as_geometry3k_writes_them(text, value):
    assert value_of(text) == (None if value is None else pytest.approx(value, abs=1e-3))


@pytest.mark.parametrize("answer", ["1", "7", "12.5", "2 \\sqrt { 221 }", "\\frac { 36 } { 5 }", "60^{\\circ}", "- 4"])
def test_distractors_are_close_different_and_of_the_same_form(answer):
    for seed in range(20):
        others = distractors(answer, 3, random.Random(seed))
        values = [value_of(text) for text in (answer, *others)]
        assert len({round(value, 6) for value in values}) == 4
        assert all(value * values[0] > 0 and abs(value) <= max(3 * abs(values[0]), 5) for value in values)
        shapes = {"".join(c for c in text if not c.isdigit()) for text in (answer, *others)}
        assert len(shapes) == 1, others  # only digits differ
    assert distractors("x = 5", 3, random.Random(0)) is None


GEOMETRY = [
    {"images": ["a.png"], "problem": "<image>Find x.", "answer": "12"},
    {"images": ["a.png"], "problem": "<image>Find the area.", "answer": "2 \\sqrt { 221 }"},
    {"images": ["a.png"], "problem": "<image>Name it.", "answer": "a rhombus"},
]


def test_geometry3k_becomes_multiple_choice_with_the_letter_kept(tmp_path, caplog):
    (tmp_path / "a.png").write_bytes(png())
    dataset = load(write(tmp_path / "d.jsonl", GEOMETRY * 20), "geometry3k", task="i2t")
    assert len(dataset) == 40 and "20 of 60 rows were dropped" in caplog.text
    letters = set()
    for i, row in enumerate(dataset):
        assert row["choices"]["ABCD".index(row["answer"])] == GEOMETRY[i % 2]["answer"]
        assert len(set(row["choices"])) == 4
        assert row["prompt"].startswith("Look at the geometry diagram. Find ") and "<image>" not in row["prompt"]
        assert f"\n{row['answer']}) {GEOMETRY[i % 2]['answer']}\n" in row["prompt"]
        assert row["prompt"].endswith("\n\nAnswer with the letter only.")
        assert multiple_choice_reward([row["answer"]], [row["answer"]], [row["choices"]]) == [1.0]
        assert row["images"][0].mode == "RGB"
        letters.add(row["answer"])
    assert letters == set("ABCD")
    again = load(tmp_path / "d.jsonl", "geometry3k", task="i2t")
    other = load(tmp_path / "d.jsonl", "geometry3k", task="i2t", seed=1)
    assert list(again["prompt"]) == list(dataset["prompt"]) != list(other["prompt"])


def test_geometry3k_with_options_of_its_own_keeps_them(tmp_path):
    rows = [{"problem": "Find x.", "choices": ["3", "4", "5", "6"], "answer": "C"}] * 8
    dataset = load(write(tmp_path / "d.jsonl", rows), "geometry3k", task="i2t")
    assert all(row["choices"]["ABCD".index(row["answer"])] == "5" for row in dataset)
    assert {tuple(sorted(row["choices"])) for row in dataset} == {("3", "4", "5", "6")}
    assert len(set(dataset["answer"])) > 1  # shuffled


def test_the_geometry3k_script_writes_rows_that_load_as_they_are(tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(png((9, 8, 7)))
    source, output = write(tmp_path / "d.jsonl", GEOMETRY), tmp_path / "out" / "train.jsonl"
    geometry3k.main(["--dataset", source, "--output", str(output), "--seed", "3"])
    assert f"2 questions in {output}" in capsys.readouterr().out
    written = load_dataset_splits(str(output), task="i2t", choices_column="choices")["train"]
    direct = load(source, "geometry3k", task="i2t", seed=3)
    for column in ("prompt", "choices", "answer"):
        assert list(written[column]) == list(direct[column])
    assert written[1]["images"][0].getpixel((0, 0)) == (9, 8, 7)


def test_the_geometry3k_script_refuses_in_one_line(tmp_path, capsys):
    source = write(tmp_path / "d.jsonl", [{"question": "Why?", "answer": "because"}])
    for argv in (["--output", "a.json"], ["--output", str(tmp_path / "a.jsonl")]):
        with pytest.raises(SystemExit) as stop:
            geometry3k.main(["--dataset", source, *argv])
        assert stop.value.code == 2 and capsys.readouterr().err.count("error: ") == 1


@pytest.mark.parametrize(
    ("options", "answer", "letter"),
    [
        (["cat", "dog"], "B", "B"),
        (["cat", "dog"], "dog", "B"),
        (["cat", "dog"], 1, "B"),
        (["cat", "dog"], "2", "B"),
        ({"A": "cat", "B": "dog"}, "b", "B"),
        ('["cat", "dog"]', "dog", "B"),
        (["1", "2", "3"], "3", "C"),
    ],
)
def test_vqa_answers_are_letters_indices_or_texts(tmp_path, options, answer, letter):
    rows = [{"question": "Which?", "options": options, "answer": answer, "image": "a.png", "kind": "x"}]
    (tmp_path / "a.png").write_bytes(png())
    row = load(write(tmp_path / "d.jsonl", rows), "vqa", task="i2t")[0]
    assert row["answer"] == letter and row["kind"] == "x" and len(row["images"]) == 1
    assert row["prompt"].startswith("Which?\n\nA) ") and row["prompt"].count("\nB) ") == 1


def test_vqa_columns_can_be_named_and_rows_without_answer_are_dropped(tmp_path, caplog):
    rows = [{"q": "Which?", "opts": ["x", "y"], "gold": gold} for gold in ("A", "z")]
    named = {"text_column": "q", "choices_column": "opts", "answer_column": "gold"}
    dataset = load(write(tmp_path / "d.jsonl", rows), "vqa", task="i2t", **named)
    assert list(dataset["answer"]) == ["A"] and "1 of 2 rows were dropped" in caplog.text
    sft = load(tmp_path / "d.jsonl", "vqa", task="i2t", stage="sft", **named)
    assert list(sft["completion"]) == ["A"] and dict(sft[0])["images"] == []


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("geneval", {}, r"needs a column 'include' \(the layout\); columns found.*did you mean 'includes'\?"),
        ("prompts", {"text_column": "promt"}, r"needs a column 'promt' \(text_column\).*did you mean 'prompt'\?"),
        ("vqa", {"task": "i2t"}, "needs a column 'options or choices'"),
        ("t2ir1", {}, r"dataset_format is 't2ir1'; valid: prompts,.*did you mean 't2i_r1'\?"),
        ("geometry3k", {}, "dataset_format 'geometry3k' has rows for task 'i2t'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_a_layout_is_named(tmp_path, layout, options, message):
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path / "d.jsonl", [{"prompt": "p", "includes": "x"}]), layout, **options)


def test_a_letter_is_not_taken_for_a_text():
    assert letter_in("B", ["B", "A"], texts_first=True) == "A"
    assert letter_in("B", ["x", "y"]) == "B"
    assert letter_in("z", ["x", "y"]) is None
