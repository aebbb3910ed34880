"""Batches of like lengths, their order, and the sample grid of an SFT run."""

import json

import pytest
import torch
from datasets import Dataset, concatenate_datasets

from janus_trl.checkpoints import read_manifest
from janus_trl.data import load_dataset_splits
from janus_trl.data_report import report_on
from janus_trl.image_codes import encode_pictures
from janus_trl.inference import trained_length
from janus_trl.sft_data import JointCollator, reasoning_tokens
from janus_trl.tiny.datasets import tiny_sft_dataset
from tests.sft import CODES, FEATURES, mixed_rows, picture, row, sft_trainer


def varied_rows(count: int = 160) -> Dataset:
    """Plans of 0 to 39 letters before pictures, and answers of as many letters, some about one or two pictures."""
    rows = []
    for i in range(count):
        text = "a" * (i * 7 % 40)
        draws = row(f"draw {i}", image=picture("red"), reasoning=text)
        rows.append(draws if i % 2 else row(f"say {i}", images=[picture("red")] * (i % 3), completion=text))
    return Dataset.from_list(rows, features=FEATURES)


def padding(trainer) -> float:
    """The share of slots of an epoch that hold padding."""
    masks = [batch["attention_mask"] for batch in trainer.get_train_dataloader()]
    return 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


def order(trainer, epoch: int) -> list[list[int]]:
    """The lengths of the rows of each batch."""
    loader = trainer.get_train_dataloader()
    trainer._length_sampler.generator.manual_seed(trainer.args.seed + epoch)
    return [batch["attention_mask"].sum(1).tolist() for batch in loader]


def test_lengths_are_those_of_the_collator(model, processor):
    rows = [*mixed_rows(), row("<image_placeholder>", completion="a user text that looks like a picture")]
    rows = [{**r, "image_codes": CODES if r["image"] else []} for r in rows]
    collator = JointCollator.of(model, processor, 0.0)
    columns = {name: [r[name] for r in rows] for name in ("prompt", "reasoning", "completion", "image_codes", "images")}
    dataset = Dataset.from_dict(columns, features=None).cast_column("images", FEATURES["images"])
    lengths = collator.lengths(dataset)
    assert lengths[:-1] == [int(collator([r])["attention_mask"].sum()) for r in rows[:-1]]
    assert len(lengths) == len(rows)


def test_the_report_on_data_counts_the_ids_of_the_collator(model, processor, tmp_path):
    collator = JointCollator.of(model, processor, 0.0)
    rows = [{"prompt": "q", "reasoning": r, "completion": c} for r, c in (("why so", "yes"), ("", "no"), ("so", ""))]
    picture("red").save(tmp_path / "p.png")
    for task, extra, frame in (("i2t", {}, 1), ("t2i", {"image": "p.png"}, len(CODES) + 3)):
        (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps({**row, **extra}) + "\n" for row in rows))
        data = load_dataset_splits(str(tmp_path / f"{task}.jsonl"), task=task, stage="sft")["train"]
        given = [{**row, "image_codes": CODES if extra else []} for row in rows]
        expected = [int(collator([row])["attention_mask"].sum()) for row in given]
        report = report_on(data, task, processor, stage="sft")
        assert [length + frame for length in report.lengths] == expected  # `prompt_room` leaves room for the frame
        assert report.reasoning_lengths == [6, 0, 2]


@pytest.mark.parametrize(("given", "kept"), [
    (["short"] * 8, False), ([None] * 8, False), ([3, None] * 4, False), ([[3]] * 8, False),
    ([{"hint": "a"}] * 8, False), (list(range(8)), True),
])  # fmt: skip
def test_a_column_of_that_name_gives_the_lengths_only_if_it_can(janus_folder, tmp_path, given, kept):
    rows = Dataset.from_list(mixed_rows(), features=FEATURES).add_column("length", given)
    trainer = sft_trainer(janus_folder, tmp_path, rows, eval_dataset=rows)
    expected = given if kept else trainer.data_collator.lengths(trainer.train_dataset)
    assert list(trainer.train_dataset["length"]) == list(trainer.eval_dataset["length"]) == expected
    assert trainer._get_train_sampler().lengths == expected and all(isinstance(length, int) for length in expected)


def test_padding_is_below_a_tenth_on_mixed_rows(janus_folder, tmp_path):
    share = {}
    for strategy in ("group_by_length", "random"):
        trainer = sft_trainer(janus_folder, tmp_path, varied_rows(), train_sampling_strategy=strategy)
        share[strategy] = padding(trainer)
    assert share["group_by_length"] < 0.1 < 0.2 < share["random"], share


def test_padding_is_below_a_tenth_on_the_embedded_world(tmp_path):
    from janus_trl.recipe import resolve_model

    rows = concatenate_datasets([tiny_sft_dataset(task, "train", size=128) for task in ("t2i", "i2t")])
    trainer = sft_trainer(resolve_model("tiny"), tmp_path, rows)
    assert padding(trainer) < 0.1


def test_epochs_differ_in_order_and_repeat_whatever_else_draws_numbers(janus_folder, tmp_path):
    trainer = sft_trainer(janus_folder, tmp_path, varied_rows(64))
    first, second = order(trainer, 0), order(trainer, 1)
    torch.rand(5)
    assert order(trainer, 0) == first != second
    assert sorted(sum(first, [])) == sorted(sum(second, []))


def test_a_resumed_run_sees_the_rows_of_a_straight_one(janus_folder, tmp_path):
    settings = {"max_steps": 6, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 3}
    rows = varied_rows(8)  # two steps an epoch: the checkpoint is in the middle of the second
    straight = sft_trainer(janus_folder, tmp_path / "straight", rows, **settings)
    straight.train()
    resumed = sft_trainer(janus_folder, tmp_path / "resumed", rows, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
    losses = [
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry and entry["step"] > 3]
        for trainer in (straight, resumed)
    ]
    assert len(losses[0]) == 3 and losses[0] == losses[1]


def test_a_grid_shows_held_out_pictures_after_their_reasoning(janus_folder, tmp_path):
    rows = mixed_rows()
    dataset = Dataset.from_list([rows[i] for i in (4, 5, 1, 6, 0, 3)], features=FEATURES)
    trainer = sft_trainer(janus_folder, tmp_path, dataset, eval_dataset=dataset, eval_guidance_scale=2.0)
    trainer.model.train()
    items = trainer.sample_rows(2)
    assert [item["prompt"] for item in items] == [rows[1]["prompt"], rows[0]["prompt"]]
    assert all(item["image"].size == (16, 16) for item in items) and trainer.model.training
    again = trainer.sample_rows(5)
    assert len(again) == 3 and [item["image"].tobytes() for item in again[:2]] == [i["image"].tobytes() for i in items]
    assert encode_pictures(trainer.model, [items[0]["image"]])  # a picture, not None
    answers = sft_trainer(janus_folder, tmp_path, dataset, eval_dataset=dataset.select([0, 1]))
    assert answers.sample_rows(2) == [] and trainer.sample_rows(0) == []


def test_a_grid_of_a_model_in_bfloat16_is_decoded_in_float32(janus_folder, tmp_path, monkeypatch):
    from janus_trl.picture_decoder import PictureDecoder

    used, call = [], PictureDecoder.__call__
    monkeypatch.setattr(
        PictureDecoder,
        "__call__",
        lambda decoder, codes: used.append(next(decoder.vq.parameters()).dtype) or call(decoder, codes),
    )
    dataset = Dataset.from_list(mixed_rows()[:4], features=FEATURES)
    weights = {"model_init_kwargs": {"dtype": "bfloat16"}}
    trainer = sft_trainer(janus_folder, tmp_path, dataset, eval_dataset=dataset, **weights)
    assert trainer.sample_rows(1) and used == [torch.float32]
    assert trainer.model.dtype == torch.bfloat16


def test_the_longest_reasoning_of_the_rows_bounds_that_of_the_samples(janus_folder, tmp_path, monkeypatch):
    from janus_trl import sft_trainer as module

    lengths = []
    original = module.rollout
    monkeypatch.setattr(
        module,
        "rollout",
        lambda *args, **options: (
            lengths.append((args[3].max_text_length, args[3].guidance_scale)) or original(*args, **options)
        ),
    )
    dataset = Dataset.from_list(mixed_rows()[:4], features=FEATURES)
    sft_trainer(janus_folder, tmp_path, dataset, eval_dataset=dataset).sample_rows(4)
    sft_trainer(janus_folder, tmp_path, dataset, eval_dataset=dataset.select([0])).sample_rows(1)
    settings = {"max_reasoning_length": 3, "eval_guidance_scale": 1.0}
    sft_trainer(janus_folder, tmp_path, dataset, eval_dataset=dataset, **settings).sample_rows(1)
    assert lengths == [(6, 5.0), (0, 5.0), (4, 1.0)]  # "plan " and <begin_of_image>


def drawn_rows(lengths: list[int]) -> Dataset:
    """Pictures behind plans of so many letters, with an answer before and after them."""
    answer = {"prompt": "q", "reasoning": "a" * 90, "image_codes": []}
    rows = [{"prompt": "q", "reasoning": "a" * length or None, "image_codes": CODES} for length in lengths]
    return Dataset.from_list([answer, *rows, answer])


def test_reasoning_lengths_are_those_before_pictures(processor):
    found = reasoning_tokens(drawn_rows([*range(100), 100]), processor.tokenizer)
    assert found == {"rows": 101, "min": 0, "mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100}
    spaced = reasoning_tokens(drawn_rows([3, 9, 5, 9]), processor.tokenizer, rows=2)
    assert spaced == pytest.approx({"rows": 2, "min": 3, "mean": 4.0, "p50": 4.0, "p90": 4.8, "p99": 4.98, "max": 5})
    many = drawn_rows([1] * 2300 + [7])  # more than one batch of the tokenizer
    assert reasoning_tokens(many, processor.tokenizer)["max"] == 7
    assert reasoning_tokens(drawn_rows([]), processor.tokenizer) == {"rows": 0}
    without = drawn_rows([4, 4]).remove_columns("reasoning")
    assert reasoning_tokens(without, processor.tokenizer)["max"] == 0


def test_a_checkpoint_knows_the_length_of_the_reasonings_it_was_taught(janus_folder, tmp_path):
    settings = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    for given, expected in ((None, 6), (4, 4)):
        folder = tmp_path / str(given)
        trainer = sft_trainer(janus_folder, folder, drawn_rows([2, 6, 3]), **settings, max_reasoning_length=given)
        trainer.train()
        trainer.save_model()
        for saved in (folder, folder / "checkpoint-1"):
            assert trained_length(str(saved), "t2i") == expected
            wanted = {"rows": 3, "min": 2, "mean": 11 / 3, "p50": 3.0, "p90": 5.4, "p99": 5.94, "max": 6}
            assert read_manifest(saved)["reasoning_tokens"] == pytest.approx(wanted)
        trainer.create_model_card()
        assert f"max_new_tokens={expected}," in (folder / "README.md").read_text()
