"""Rows of a GRPO step: each picture is decoded once, whatever the group and the number of micro-steps."""

import pytest
from datasets import Dataset
from datasets.features import Image
from torch.utils.data import DataLoader

from janus_trl.trainer_batches import RepeatedRows
from tests.grpo import pictures_dataset, steps


@pytest.fixture
def decoded(monkeypatch) -> list[int]:
    """Sizes of the pictures that were decoded."""
    seen, decode = [], Image.decode_example
    monkeypatch.setattr(
        Image, "decode_example", lambda self, value, **kw: seen.append(len(value["bytes"])) or decode(self, value, **kw)
    )
    return seen


def decodes(decoded: list[int], read) -> int:
    """More than there are pictures: `datasets` decodes the first of a list twice."""
    decoded.clear()
    read()
    return len(decoded)


def test_batches_are_those_of_the_data_set_and_pictures_are_decoded_once(decoded):
    rows, order = pictures_dataset(), [3, 3, 0, 0, 1, 1] * 3 + [2, 1]
    plain = [rows[i] for i in order]
    once = decodes(decoded, lambda: [rows[i] for i in (3, 0, 1, 2, 1)])
    decoded.clear()
    loaded = list(DataLoader(RepeatedRows(rows), batch_size=6, sampler=order, collate_fn=list))
    assert len(decoded) == once  # rows 3, 0 and 1; then 2 and again 1, in another batch
    assert [len(batch) for batch in loaded] == [6, 6, 6, 2]
    for row, expected in zip(sum(loaded, []), plain, strict=True):
        assert row == expected and row is not expected
    assert len(RepeatedRows(rows)) == len(rows) and RepeatedRows(rows)[3] == rows[3]


def test_rows_of_one_prompt_share_pictures_but_not_lists():
    rows = RepeatedRows(Dataset.from_list([{"prompt": [{"role": "user", "content": "a"}]}, {"prompt": []}]))
    first, second = rows.__getitems__([0, 0])
    first["prompt"][0]["content"] = "changed"
    first["more"] = 1
    assert second == {"prompt": [{"role": "user", "content": "a"}]} == rows.__getitems__([0, 0])[0]
    pictures = RepeatedRows(pictures_dataset()).__getitems__([0, 0])
    assert pictures[0]["images"] is not pictures[1]["images"] and pictures[0]["images"][0] is pictures[1]["images"][0]


def test_a_step_decodes_each_picture_once(trainer_of, decoded):
    trainer = trainer_of(task="i2t", gradient_accumulation_steps=4, max_steps=2, shuffle_dataset=False)
    once = decodes(decoded, lambda: [trainer.train_dataset[i] for i in range(4)])
    decoded.clear()
    trainer.train()
    assert len(steps(trainer)) == 2
    assert len(decoded) == once > 0  # four prompts a step; the second step has the same four
