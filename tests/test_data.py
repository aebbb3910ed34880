"""Loading data sets, and refusing bad ones."""

import json
from types import SimpleNamespace

import datasets
import pytest
from PIL import Image

from janus_trl.data import check_dataset, check_images, load_dataset_splits, load_training_dataset
from tests.data_files import load, pixel, write


def test_a_text_file_has_one_prompt_per_line(tmp_path):
    (tmp_path / "p.txt").write_bytes("a cat\r\nein Hund, größer\n  two words  \n\n\n".encode())
    dataset = load(tmp_path / "p.txt")
    assert dataset.column_names == ["prompt"]
    assert list(dataset["prompt"]) == ["a cat", "ein Hund, größer", "  two words  "]
    assert list(load(tmp_path / "p.txt", train_split="train[1:2]")["prompt"]) == ["ein Hund, größer"]


def test_every_table_format_gives_the_same_rows(tmp_path):
    rows = [{"text": "a", "demands": "x"}, {"text": "b", "demands": "y"}]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "d.parquet"))
    table.to_csv(str(tmp_path / "d.csv"))
    write(tmp_path / "d.jsonl", rows)
    (tmp_path / "d.json").write_text(json.dumps(rows))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=table).save_to_disk(str(tmp_path / "saved_splits"))
    for name in ("d.parquet", "d.csv", "d.jsonl", "d.json", "saved", "saved_splits"):
        dataset = load(tmp_path / name, text_column="text")
        assert [dict(row) for row in dataset] == [{"prompt": r["text"], "demands": r["demands"]} for r in rows], name


def test_pictures_come_out_as_lists_of_rgb_whatever_the_rows_hold(tmp_path):
    Image.new("RGBA", (20, 10), (255, 0, 0, 255)).save(tmp_path / "red.png")
    Image.new("L", (5, 5), 7).save(tmp_path / "grey.png")
    rows = [{"prompt": "q", "images": cell} for cell in (["red.png"], None, [], ["red.png", "grey.png"])]
    rows.append({"prompt": "no key"})
    dataset = load(write(tmp_path / "d.jsonl", rows), task="i2t")
    assert [len(row["images"]) for row in dataset] == [1, 0, 0, 2, 0]
    assert [(i.mode, i.size, pixel(i)) for i in dataset[3]["images"]] == [
        ("RGB", (20, 10), (255, 0, 0)),
        ("RGB", (5, 5), (7, 7, 7)),
    ]


def test_a_single_image_column_and_none_at_all_become_lists(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    single = write(tmp_path / "single.jsonl", [{"prompt": "q", "image": "a.png"}, {"prompt": "r", "image": None}])
    assert [len(row["images"]) for row in load(single, task="i2t")] == [1, 0]
    assert load(single, task="i2t").column_names == ["prompt", "images"]
    text_only = write(tmp_path / "none.jsonl", [{"prompt": "q"}])
    assert load(text_only, task="i2t")[0]["images"] == []


def test_stored_image_features_are_read_by_our_loader(tmp_path):
    pictures = [Image.new("RGBA", (6, 6), (0, 0, 0, 0)), Image.new("RGB", (6, 6), (1, 2, 3))]
    features = datasets.Features({"q": datasets.Value("string"), "pics": datasets.List(datasets.Image())})
    table = datasets.Dataset.from_dict({"q": ["a", "b"], "pics": [pictures, pictures[1:]]}, features=features)
    table.save_to_disk(str(tmp_path / "d"))
    dataset = load(tmp_path / "d", task="i2t", text_column="q", image_column="pics")
    assert [pixel(image) for image in dataset[0]["images"]] == [(255, 255, 255), (1, 2, 3)]
    assert dataset.shuffle(seed=0).select([0])[0]["images"][0].mode == "RGB"
    assert list(dataset["prompt"]) == ["a", "b"]


def test_none_among_images_is_refused_with_its_row(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    rows = [{"prompt": "q", "images": cell} for cell in (["a.png"], None, [], [None], ["a.png", None])]
    with pytest.raises(ValueError, match="2 rows have None among their images.*: 3, 4"):
        load(write(tmp_path / "d.jsonl", rows), task="i2t")


def test_input_pictures_are_refused_for_image_generation(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    rows = [{"prompt": "p", "images": []}, {"prompt": "p", "images": ["a.png"]}]
    with pytest.raises(ValueError, match="1 rows have input images.*'t2i'.*: 1"):
        load(write(tmp_path / "d.jsonl", rows))
    assert load(write(tmp_path / "e.jsonl", rows[:1]))[0]["images"] == []


def test_columns_are_mapped_and_the_asked_one_wins(tmp_path):
    rows = [{"prompt": "old", "q": "new", "a": "B", "opts": ["x", "y"], "extra": 1}]
    dataset = load(
        write(tmp_path / "d.jsonl", rows), task="i2t", text_column="q", answer_column="a", choices_column="opts"
    )
    assert dataset[0] == {"prompt": "new", "answer": "B", "choices": ["x", "y"], "extra": 1, "images": []}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_column": "promt"}, r"text_column is 'promt'.*columns found: prompt, answers; did you mean 'prompt'\?"),
        ({"answer_column": "gold", "task": "i2t"}, "answer_column is 'gold'.*columns found: prompt, answers"),
        ({"image_column": "picture", "task": "i2t"}, "image_column is 'picture'"),
        ({"choices_column": "options", "task": "i2t"}, "choices_column is 'options'"),
        ({"stage": "sft"}, "image_column is 'image'"),
        ({"stage": "sft", "task": "i2t"}, "completion is 'completion'"),
        ({"train_split": "trian"}, "dataset_train_split: trian.*Unknown split.*train"),
        ({"test_split": "test"}, "dataset_test_split: test.*Unknown split"),
        ({"task": "t2t"}, r"task is 't2t'; valid: t2i, i2t; did you mean 't2i'\?"),
        ({"streaming": True}, "streaming data sets are not supported"),
        ({"dataset_config": "main"}, "dataset_config is 'main'"),
    ],
)
def test_wrong_fields_are_named_with_what_is_there(tmp_path, options, message):
    with pytest.raises(ValueError, match=message) as error:
        load(write(tmp_path / "d.jsonl", [{"prompt": "p", "answers": "A"}]), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", "dataset_name is '.*missing.jsonl'; there is no such file"),
        ("prompts.tx", r"Did you mean '.*prompts.txt'\?"),
        ("empty.txt", "the file is empty"),
        ("notes.md", "files of type .txt, .jsonl"),
        ("broken.jsonl", "cannot be loaded: JSON parse error"),
        ("blank.txt", "no rows"),
    ],
)
def test_unusable_files_are_named(tmp_path, name, message):
    for file, text in {"prompts.txt": "a", "empty.txt": "", "notes.md": "x", "blank.txt": "\n\n"}.items():
        (tmp_path / file).write_text(text)
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path / name)
    assert "\n" not in str(error.value)


def test_no_data_set_name_is_refused():
    with pytest.raises(ValueError, match="dataset_name is missing"):
        load_dataset_splits("", task="t2i")


def test_blank_prompts_are_refused_with_their_rows(tmp_path):
    prompts = ["a", "", "   ", None, "\n", "x" * 10_000, "🦊", "قطة"]
    with pytest.raises(ValueError, match=r"4 rows have empty prompts; rows \(from 0\): 1, 2, 3, 4\."):
        load(write(tmp_path / "d.jsonl", [{"prompt": p} for p in prompts]))
    (tmp_path / "d.txt").write_text("a\n\nb\n")
    with pytest.raises(ValueError, match="1 rows have empty prompts.*: 1"):
        load(tmp_path / "d.txt")
    messages = [[{"role": "user", "content": "hi"}]]
    with pytest.raises(ValueError, match="not text.*: 0"):
        check_dataset(datasets.Dataset.from_dict({"prompt": messages}), "t2i")


def test_streams_are_refused_in_one_sentence():
    stream = datasets.Dataset.from_dict({"prompt": ["a"]}).to_iterable_dataset()
    with pytest.raises(ValueError, match="streaming data sets are not supported, because"):
        check_dataset(stream, "t2i")


def test_a_missing_picture_is_found_before_training(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="'b.png': there is no such file"):
        load(write(tmp_path / "d.jsonl", [{"prompt": "q", "images": ["b.png"]}]), task="i2t")
    (tmp_path / "half.png").write_bytes((tmp_path / "a.png").read_bytes()[:40])
    rows = [{"prompt": "q", "images": [name]} for name in ("a.png", "half.png")]
    dataset = load(write(tmp_path / "e.jsonl", rows), task="i2t")
    with pytest.raises(ValueError, match="row 1: image '.*half.png' cannot be read"):
        check_images(dataset)


def test_supervised_rows_get_their_targets(tmp_path):
    Image.new("RGBA", (4, 4)).save(tmp_path / "a.png")
    t2i = load(write(tmp_path / "d.jsonl", [{"prompt": "p", "pic": "a.png"}]), stage="sft", image_column="pic")
    assert (t2i[0]["image"].mode, t2i[0]["reasoning"]) == ("RGB", "")
    i2t = load(write(tmp_path / "e.jsonl", [{"prompt": "q", "completion": "c"}]), stage="sft", task="i2t")
    assert i2t[0] == {"prompt": "q", "completion": "c", "images": [], "reasoning": ""}
    with pytest.raises(ValueError, match="no picture in 'image'.*: 1"):
        rows = [{"prompt": "p", "image": "a.png"}, {"prompt": "p", "image": None}]
        load(write(tmp_path / "f.jsonl", rows), stage="sft")


def test_script_arguments_name_the_data_set(tmp_path):
    (tmp_path / "p.txt").write_text("a\nb\n")
    fields = dict(dataset_name=str(tmp_path / "p.txt"), dataset_config=None, dataset_streaming=False)
    fields |= dict(dataset_train_split="train", dataset_test_split="train[:1]", text_column="prompt")
    fields |= dict(image_column=None, answer_column="answer", choices_column=None, max_image_pixels=None)
    fields |= dict(dataset_format=None, dataset_mixture=None, dataset_seed=0, bad_rows="error")
    arguments = SimpleNamespace(**fields)
    splits = load_training_dataset(arguments, "t2i")
    assert (len(splits["train"]), len(splits["test"])) == (2, 1)
    assert load_training_dataset(arguments, "t2i", with_test=False)["test"] is None


def test_the_embedded_world_is_a_data_set():
    splits = load_dataset_splits("tiny", task="t2i", test_split="validation")
    assert {"prompt", "demands"} <= set(splits["train"].column_names)
    assert not set(splits["train"]["prompt"]) & set(splits["test"]["prompt"])
    row = load_dataset_splits("tiny", task="i2t", train_split="test")["train"][0]
    assert row["images"][0].mode == "RGB" and row["answer"] in "ABCD"
    with pytest.raises(ValueError, match="dataset_train_split is 'tset'.*did you mean 'test'"):
        load("tiny", train_split="tset")


def test_bad_rows_are_skipped_whole_with_a_count(tmp_path, caplog):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    rows = [{"prompt": p, "images": ["a.png"]} for p in ("one", "", "two", " ")] + [
        {"prompt": "three", "images": [None]}
    ]
    dataset = load(write(tmp_path / "d.jsonl", rows), task="i2t", bad_rows="skip")
    assert list(dataset["prompt"]) == ["one", "two"]
    assert dataset[1]["images"][0].size == (4, 4)
    assert "2 rows have empty prompts; they are skipped" in caplog.text and "1 rows have None among" in caplog.text
    with pytest.raises(ValueError, match="none of the 1 rows can be trained on"):
        load(write(tmp_path / "e.jsonl", [{"prompt": " "}]), bad_rows="skip")
    with pytest.raises(ValueError, match=r"bad_rows is 'skp'.*did you mean 'skip'\?"):
        load(tmp_path / "d.jsonl", bad_rows="skp")
