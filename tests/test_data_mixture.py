"""Data sets that are mixed: shares, order, held-out rows, tasks, and what is refused."""

from pathlib import Path

import pytest
from PIL import Image

from janus_trl.data import load_dataset_splits
from tests.data_files import pixel, write


def text_file(path: Path, word: str, count: int) -> str:
    path.write_text("".join(f"{word} {i}\n" for i in range(count)))
    return str(path)


def mixture(*entries, task="t2i", key="train", **options):
    return load_dataset_splits(task=task, mixture=list(entries), **options)[key]


def test_a_mixture_has_the_shares_of_its_weights_and_every_row(tmp_path):
    a, b = text_file(tmp_path / "a.txt", "a", 600), text_file(tmp_path / "b.txt", "b", 100)
    prompts = list(mixture({"name": a, "weight": 3}, {"name": b, "weight": 1})["prompt"])
    assert 0.21 < sum(p.startswith("b") for p in prompts) / len(prompts) < 0.29
    assert len(set(prompts)) == 700  # no row is lost, and b starts again when it is used up
    assert 750 < len(prompts) < 900
    scaled = mixture({"name": a, "weight": 0.75}, {"name": b, "weight": "0.25"})
    assert list(scaled["prompt"]) == prompts  # weights are relative, and may be text in YAML


def test_the_order_of_a_mixture_depends_on_the_seed_alone(tmp_path):
    entries = [{"name": text_file(tmp_path / f"{word}.txt", word, 40)} for word in "ab"]
    once, again, other = (list(mixture(*entries, seed=seed)["prompt"]) for seed in (0, 0, 1))
    assert once == again != other
    assert [p for p in once[:20] if p.startswith("a")] == [f"a {i}" for i in range(len(once))][: sum(
        p.startswith("a") for p in once[:20])]  # each source in its own order  # fmt: skip


def test_rows_of_a_mixture_stay_whole_with_their_own_layout_and_pictures(tmp_path):
    for name, colour in (("one", (1, 1, 1)), ("two", (2, 2, 2))):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4), colour).save(tmp_path / name / "a.png")
    one = write(tmp_path / "one" / "d.jsonl", [{"q": f"one {i}", "images": ["a.png"], "answer": "A"} for i in range(5)])
    rows = [{"question": "two", "image": "a.png", "options": ["x", "y"], "answer": "y"}] * 5
    two = write(tmp_path / "two" / "d.jsonl", rows)
    text = write(tmp_path / "text.jsonl", [{"prompt": "none", "answer": "C"}] * 3)
    entries = [{"name": one, "text_column": "q"}, {"name": two, "format": "vqa"}, {"name": text}]
    seen = set()
    for row in mixture(*entries, task="i2t"):
        kind = row["prompt"].split()[0]
        seen.add((kind, row["answer"], *(pixel(image) for image in row["images"])))
        assert (row["choices"] is not None) == (kind == "two")
    assert seen == {("one", "A", (1, 1, 1)), ("two", "B", (2, 2, 2)), ("none", "C")}


def test_held_out_rows_of_a_mixture_follow_one_another(tmp_path):
    entries = [{"name": text_file(tmp_path / f"{word}.txt", word, 9), "weight": 5} for word in "abc"]
    entries[1]["test_split"] = None  # not part of the held-out rows
    held_out = mixture(*entries, key="test", test_split="train[:2]")
    assert list(held_out["prompt"]) == ["a 0", "a 1", "c 0", "c 1"]
    assert mixture(*entries, key="test") is None


def test_an_entry_may_be_for_one_task_of_a_supervised_run(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    drawn = write(tmp_path / "t2i.jsonl", [{"prompt": "p", "image": "a.png"}] * 2)
    asked = write(tmp_path / "i2t.jsonl", [{"question": "q", "options": ["x", "y"], "answer": "y"}] * 3)
    entries = [{"name": drawn, "task": "t2i"}, {"name": asked, "task": "i2t", "format": "vqa"}]
    assert len(mixture(*entries, stage="sft")) == 2
    assert list(mixture(*entries, task="i2t", stage="sft")["completion"]) == ["B"] * 3
    with pytest.raises(ValueError, match="dataset_mixture has no entry for task 't2i'"):
        mixture(entries[1])
    with pytest.raises(ValueError, match=r"dataset_mixture\[0\]: task is 't2j'; valid: t2i, i2t; did you mean 't2i'"):
        mixture({"name": drawn, "task": "t2j"})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "x.txt", "wieght": 1}, r"dataset_mixture\[1\] has the unknown key 'wieght'.*did you mean 'weight'\?"),
        ({"weight": 1}, r"dataset_mixture\[1\] has no name"),
        ({"name": "x.txt", "weight": 0}, r"dataset_mixture\[1\] has weight 0; it must be a number above 0"),
        ({"name": "x.txt", "weight": "much"}, "has weight 'much'"),
        ("x.txt", r"dataset_mixture\[1\] is 'x.txt'; write a mapping"),
        ("{name: x}", r"dataset_mixture\[1\] is '\{name: x\}', which is not valid JSON"),
        ({"name": "missing.txt"}, "dataset_name is 'missing.txt'; there is no such file"),
        ({"name": "tiny", "format": "genevall"}, r"dataset_format is 'genevall'; valid: .*did you mean 'geneval'\?"),
        ({"name": "tiny", "format": "vqa"}, "dataset_format 'vqa' has rows for task 'i2t'; for 't2i': prompts,"),
    ],
)
def test_wrong_entries_of_a_mixture_are_named(tmp_path, entry, message):
    good = {"name": text_file(tmp_path / "a.txt", "a", 2)}
    with pytest.raises(ValueError, match=message):
        mixture(good, entry)


def test_a_mixture_beside_a_name_and_columns_of_two_types_are_refused(tmp_path):
    a = write(tmp_path / "a.jsonl", [{"prompt": "a", "tag": 1}])
    b = write(tmp_path / "b.jsonl", [{"prompt": "b", "tag": "x"}])
    with pytest.raises(ValueError, match="dataset_name is 'tiny' and dataset_mixture is set too"):
        load_dataset_splits("tiny", task="t2i", mixture=[{"name": a}])
    with pytest.raises(ValueError, match=r"column 'tag' is Value\('string'\) in '.*b.jsonl', but another type"):
        mixture({"name": a}, {"name": b})
