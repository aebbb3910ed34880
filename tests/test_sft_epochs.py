"""What every epoch of an SFT run draws, order and blanked rows, is that of its number: with workers and on resume."""

from pathlib import Path

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from datasets import Dataset
from torch.utils.data import DataLoader
from trl import SFTTrainer

from tests.sft import sft_trainer

ROWS, PER_EPOCH, EPOCHS = 12, 3, 3
WORKERS = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}


def rows() -> Dataset:
    """Pictures to draw that are told apart by their codes, behind plans of different lengths."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (ROWS, 16)).tolist()
    return Dataset.from_list([
        {"prompt": f"draw {i}", "reasoning": "a" * (i * 5 % 7), "image_codes": row} for i, row in enumerate(codes)
    ])  # fmt: skip


def batches(folder: str, output: Path, resume: str | None = None, **settings) -> list[list[tuple[int, bool]]]:
    """Of each step the number of each row, and whether it was blanked."""
    data, seen = rows(), []
    trainer = sft_trainer(folder, output, data, **{
        "per_device_train_batch_size": ROWS // PER_EPOCH, "max_steps": EPOCHS * PER_EPOCH, "guidance_dropout": 0.5,
        "save_strategy": "steps", "save_steps": 4, **settings,
    })  # fmt: skip
    number = {
        tuple(code + trainer.model.vocab_size for code in codes): i for i, codes in enumerate(data["image_codes"])
    }
    opens, compute = trainer.model.special_ids.begin_of_image, trainer.compute_loss

    def recorded(model, inputs, *args, **kwargs):
        labels = inputs["labels"].tolist()
        codes = [tuple(i for i in row if i >= trainer.model.vocab_size) for row in labels]
        seen.append([(number[row], opens not in ids) for row, ids in zip(codes, labels, strict=True)])
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = recorded
    trainer.train(resume_from_checkpoint=resume)
    if settings.get("dataloader_persistent_workers"):  # the garbage collector would wait 5 s for each
        trainer.callback_handler.train_dataloader._iterator._shutdown_workers()
    return seen


def epochs_of(seen: list) -> list[dict[int, bool]]:
    """Which rows of each epoch were blanked."""
    return [dict(sum(seen[i : i + PER_EPOCH], [])) for i in range(0, len(seen), PER_EPOCH)]


@pytest.fixture(scope="module")
def alone(janus_folder, tmp_path_factory) -> list:
    """The batches of a run without workers."""
    return batches(janus_folder, tmp_path_factory.mktemp("alone"))


def test_every_epoch_blanks_other_rows(alone):
    first, second, third = epochs_of(alone)
    assert first.keys() == second.keys() == third.keys() == set(range(ROWS))
    assert first != second != third != first and all(0 < sum(e.values()) < ROWS for e in (first, second, third))


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_that_stay_draw_as_the_process_itself(alone, janus_folder, tmp_path, context):
    settings = {**WORKERS, "dataloader_multiprocessing_context": context}
    assert batches(janus_folder, tmp_path, **settings) == alone
    checkpoint = str(tmp_path / "checkpoint-4")  # in the middle of the second epoch
    resumed = batches(janus_folder, tmp_path / "resumed", checkpoint, **settings)
    assert resumed == alone[4:]


@pytest.mark.parametrize("strategy", ["random", "batch_rebalance"])
def test_a_resumed_run_has_the_batches_of_a_straight_one_in_every_order(janus_folder, tmp_path, strategy):
    straight = batches(janus_folder, tmp_path, train_sampling_strategy=strategy)
    first, second, third = epochs_of(straight)
    assert list(first) != list(second) != list(third)  # another order in each epoch
    resumed = batches(janus_folder, tmp_path / "r", str(tmp_path / "checkpoint-4"), train_sampling_strategy=strategy)
    assert resumed == straight[4:]


def test_balanced_batches_of_several_processes_follow_the_epoch_of_a_resumed_run(janus_folder, tmp_path, monkeypatch):
    trainer = sft_trainer(janus_folder, tmp_path, rows(), train_sampling_strategy="batch_rebalance", data_seed=7)
    trainer.state.max_steps = 1
    monkeypatch.setattr(SFTTrainer, "_run_epoch", lambda self, model, epoch, loader: [b.tolist() for b in loader])

    def batches_of(epoch: int, skipped: int) -> list:
        loader = DataLoader(range(ROWS), batch_sampler=trainer._get_train_sampler())
        loader = prepare_data_loader(loader, num_processes=2, process_index=0, put_on_device=False)
        loader.batch_sampler.num_processes = 1  # as transformers does: this sampler knows the ranks itself
        return trainer._run_epoch(trainer.model, epoch, skip_first_batches(loader, skipped))

    first, second = batches_of(0, 0), batches_of(1, 0)
    assert len(first) > 1 and first != second and batches_of(1, 1) == second[1:]
    trainer.args.data_seed = 8
    assert batches_of(0, 0) != first


def test_held_out_rows_are_in_the_same_batches_at_every_evaluation_with_workers_that_stay(janus_folder, tmp_path):
    settings = {"per_device_eval_batch_size": 2, **WORKERS}
    held_out = rows().add_column("images", [[]] * ROWS)
    trainer = sft_trainer(janus_folder, tmp_path, rows(), eval_dataset=held_out, **settings)
    found = [trainer.evaluate() for _ in range(3)]
    trainer._eval_dataloaders["eval"]._iterator._shutdown_workers()
    for name in ("eval_loss", "eval_loss/text", "eval_loss/image"):
        assert len({log[name] for log in found}) == 1, name
