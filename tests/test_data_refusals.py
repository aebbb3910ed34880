"""Rows that no run can use are refused before weights load, by the trainers and the scripts."""

import json

import pytest
from datasets import Dataset, IterableDataset
from PIL import Image

from janus_trl.data import load_dataset_splits
from janus_trl.scripts import grpo, sft
from janus_trl.task_mixture import row_for_task
from tests.grpo import pictures_dataset, prompts_dataset, steps
from tests.sft import FEATURES, mixed_rows, picture, sft_trainer


def drawn(column: str, cells: list) -> Dataset:
    """Rows to draw, with a column for pictures."""
    return prompts_dataset(["q", "r"]).add_column(column, cells)


@pytest.mark.parametrize(("column", "cells", "row"), [
    ("image", [None, {"bytes": b"x", "path": None}], 1), ("images", [[], [{"bytes": b"x", "path": None}]], 1),
    ("image", ["a.png", "b.png"], 0),
])  # fmt: skip
@pytest.mark.parametrize("where", ["train_dataset", "eval_dataset", "both"])
def test_pictures_in_rows_to_draw_are_refused_with_their_row(trainer_of, column, cells, row, where):
    bad, good = drawn(column, cells), prompts_dataset()
    name = "eval_dataset" if where == "eval_dataset" else "train_dataset"
    with pytest.raises(ValueError, match=rf"{name}, row {row}: .* column '{column}', but task 't2i' draws"):
        if where == "both":
            trainer_of(dataset={"t2i": bad, "i2t": pictures_dataset()}, task="both", max_completion_length=4)
        else:
            trainer_of(dataset=bad if where == "train_dataset" else good, eval_dataset=bad)


@pytest.mark.parametrize(("column", "cells"), [("images", [[], None]), ("images", [None, None]), ("image", [None] * 2)])
def test_columns_without_pictures_do_not_keep_rows_from_being_drawn(trainer_of, column, cells):
    trainer = trainer_of(dataset=drawn(column, cells), eval_dataset=drawn(column, cells))
    trainer.train()
    trainer.evaluate()
    assert steps(trainer)[0]["grad_norm"] > 0 and len(trainer.eval_rewards()) == 2


def test_rows_without_pictures_are_asked_about_as_text(trainer_of):
    given = [[picture("red")], None, [], [picture("red"), picture("blue")]]
    rows = Dataset.from_dict({"prompt": list("abcd"), "images": given, "answer": ["A"] * 4})
    seen = {}

    def reward(prompts, images, **_):
        parts = [prompt[0]["content"] for prompt in prompts]
        texts = [part if isinstance(part, str) else part[-1]["text"] for part in parts]
        seen.update({text: len(own) for text, own in zip(texts, images, strict=True)})
        return [float(i % 2) for i in range(len(prompts))]

    settings = {"per_device_train_batch_size": 8, "num_generations": 2, "per_device_eval_batch_size": 4}
    trainer = trainer_of(reward, rows, eval_dataset=rows, task="i2t", **settings)
    trainer.train()
    assert seen == {"a": 1, "b": 0, "c": 0, "d": 2} and steps(trainer)[0]["grad_norm"] > 0
    trainer.evaluate()
    assert len(trainer.eval_rewards()) == 4 and len(trainer.sample_rows(4)) == 4


def test_targets_of_supervised_rows_are_left_out_of_grpo(tmp_path):
    Image.new("RGB", (16, 16)).save(tmp_path / "p.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "draw", "image": "p.png", "reasoning": "r"}) + "\n")
    rows = load_dataset_splits(str(tmp_path / "rows.jsonl"), task="t2i")["train"]
    assert rows.column_names == ["prompt", "reasoning"]
    assert load_dataset_splits(str(tmp_path / "rows.jsonl"), task="t2i", stage="sft")["train"][0]["image"].size == (
        16,
        16,
    )
    asked = {"task": "i2t", "prompt": "q", "images": [1], "image": 1}
    assert row_for_task(asked)["images"] == [1] and row_for_task({**asked, "task": "t2i"}).keys() == {"task", "prompt"}


@pytest.mark.parametrize(("dataset", "message"), [
    (IterableDataset.from_generator(lambda: iter([{"prompt": "q", "completion": "a"}])), "is of type IterableDataset"),
    (Dataset.from_list(mixed_rows(), features=FEATURES).to_iterable_dataset(), "is of type IterableDataset"),
    ({"a": Dataset.from_dict({"prompt": ["q"], "completion": ["a"]})}, "is of type dict"),
    (Dataset.from_list(mixed_rows(), features=FEATURES).select([]), "is empty"),
])  # fmt: skip
@pytest.mark.parametrize("where", ["train_dataset", "eval_dataset"])
def test_supervised_rows_have_to_be_known_before_training(janus_folder, tmp_path, where, dataset, message):
    good = Dataset.from_list(mixed_rows()[4:], features=FEATURES)
    first, second = (dataset, None) if where == "train_dataset" else (good, dataset)
    with pytest.raises(ValueError, match=f"{where} {message}, but must be a datasets.Dataset with rows"):
        sft_trainer(janus_folder, tmp_path, first, second)


@pytest.mark.parametrize("script", [grpo, sft])
def test_a_run_without_training_split_is_refused(tmp_path, janus_folder, script):
    picture("red").save(tmp_path / "p.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "draw", "image": "p.png"}) + "\n")
    lines = {"model_name_or_path": janus_folder, "output_dir": tmp_path / "out", "report_to": "none", "task": "t2i"}
    lines |= {"dataset_name": tmp_path / "rows.jsonl", "dataset_train_split": "null", "dataset_test_split": "train"}
    (tmp_path / "recipe.yaml").write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))
    with pytest.raises(ValueError, match="dataset_train_split is unset, so there are no rows of t2i to train on"):
        script.configure(["--config", str(tmp_path / "recipe.yaml")])
