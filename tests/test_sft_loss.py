"""The loss of SFT: which positions carry it, with which weight, and what is logged of it."""

import pytest
import torch
from datasets import Dataset
from trl import SFTTrainer

from janus_trl.configs import JanusSFTConfig
from janus_trl.sft_data import JointCollator, LossWeights
from tests.sft import CODES, FEATURES, mixed_rows, picture, sft_trainer

TEXT, IMAGE, BOI = 2.0, 0.5, 0.25
WEIGHTS = LossWeights(text=TEXT, image=IMAGE, begin_of_image=BOI)
FRAMED = [BOI, *[IMAGE] * 16, TEXT, TEXT]  # <begin_of_image>, codes, <end_of_image>, eos

# Letters are one id each, so a text of n letters carries n weights. Prompts carry none.
KINDS = {
    "a picture": ({"image_codes": CODES}, 0.0, FRAMED),
    "a picture after reasoning": ({"reasoning": "plan", "image_codes": CODES}, 0.0, [TEXT] * 4 + FRAMED),
    "a blanked picture": ({"image_codes": CODES}, 1.0, [0.0, *[IMAGE] * 16, 0.0, 0.0]),
    "a blanked picture after reasoning": (
        {"reasoning": "plan", "image_codes": CODES}, 1.0, [0.0] * 5 + [IMAGE] * 16 + [0.0] * 2,
    ),
    "an answer": ({"completion": "yes"}, 0.0, [TEXT] * 4),
    "an answer after reasoning": ({"reasoning": "so", "completion": "yes"}, 0.0, None),
    "an answer about one picture": ({"images": [picture("red")], "completion": "yes"}, 0.0, [TEXT] * 4),
    "an answer about two pictures": ({"images": [picture("red")] * 2, "completion": "yes"}, 0.0, [TEXT] * 4),
    "an answer, never blanked": ({"images": [picture("red")], "completion": "yes"}, 1.0, [TEXT] * 4),
    "no answer": ({"completion": ""}, 0.0, [TEXT]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_these_positions_carry_loss_with_these_weights(model, processor, kind):
    row, dropout, expected = KINDS[kind]
    if expected is None:  # "so yes": the space may be an id of its own
        expected = [TEXT] * (len(processor.tokenizer("so yes", add_special_tokens=False)["input_ids"]) + 1)
    other = {"prompt": "a much longer prompt than the other one", "completion": "yes, and on and on it goes"}
    batch = JointCollator.of(model, processor, dropout)([{"prompt": "draw", "image_codes": [], **row}, other])
    weights = WEIGHTS.of(batch["labels"], model)
    length = int(batch["attention_mask"][0].sum())
    assert weights[0, length - len(expected) : length].tolist() == expected
    assert weights[0, : length - len(expected)].eq(0).all() and weights[0, length:].eq(0).all()
    assert torch.equal(weights[0] > 0, batch["labels"][0] != -100)


def test_weights_of_one_leave_the_loss_of_trl_bit_for_bit(janus_folder, tmp_path):
    trainer = sft_trainer(janus_folder, tmp_path, Dataset.from_list(mixed_rows(), features=FEATURES))
    batch = next(iter(trainer.get_train_dataloader()))
    gradients = []
    for compute in (SFTTrainer.compute_loss, type(trainer).compute_loss):
        trainer.model.zero_grad()
        loss = compute(trainer, trainer.model, dict(batch), num_items_in_batch=torch.tensor(77))
        loss.backward()
        gradients.append([loss.detach(), *(p.grad.clone() for p in trainer.model.parameters() if p.grad is not None)])
    assert len(gradients[0]) > 50
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_weighted_loss_is_the_weighted_sum_over_the_number_of_labels(janus_folder, tmp_path, model):
    weights = {"text_loss_weight": TEXT, "image_loss_weight": IMAGE, "begin_of_image_loss_weight": BOI}
    dataset = Dataset.from_list(mixed_rows(), features=FEATURES)
    trainer = sft_trainer(
        janus_folder, tmp_path, dataset, max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        train_sampling_strategy="sequential", **weights,
    )  # fmt: skip
    total, labels = 0.0, 0
    for batch in trainer.get_train_dataloader():
        with torch.no_grad():
            out = model(**batch, fused_lm_head=True)
        total -= (out.log_probs * WEIGHTS.of(batch["labels"][:, 1:], model)).sum().item()
        labels += int(out.label_mask.sum())
    trainer.train()
    (loss,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert loss == pytest.approx(total / labels, rel=1e-5)


@pytest.mark.parametrize("image_weight", [1.0, 3.0])
def test_the_losses_of_text_and_image_are_logged_unweighted(janus_folder, tmp_path, model, image_weight):
    dataset = Dataset.from_list(mixed_rows(), features=FEATURES)
    trainer = sft_trainer(
        janus_folder, tmp_path, dataset, eval_dataset=dataset, max_steps=1, per_device_train_batch_size=2,
        gradient_accumulation_steps=4, per_device_eval_batch_size=3, image_loss_weight=image_weight,
    )  # fmt: skip
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(8)])
    with torch.no_grad():
        log_probs = model(**batch, fused_lm_head=True).log_probs
    labels = batch["labels"][:, 1:]
    is_code = labels >= model.vocab_size
    expected = {"text": -log_probs[~is_code & (labels != -100)].mean(), "image": -log_probs[is_code].mean()}
    trainer.train()
    trained = next(entry for entry in trainer.state.log_history if "loss" in entry)
    start = sft_trainer(janus_folder, tmp_path, dataset, eval_dataset=dataset, per_device_eval_batch_size=3)
    evaluated = start.evaluate()
    for name, value in expected.items():
        assert trained[f"loss/{name}"] == pytest.approx(value.item(), rel=1e-4)
        assert evaluated[f"eval_loss/{name}"] == pytest.approx(value.item(), rel=1e-4)


@pytest.mark.parametrize("settings", [
    {}, {"text_loss_weight": TEXT, "image_loss_weight": IMAGE, "begin_of_image_loss_weight": BOI}, {"loss_type": "dft"},
], ids=["plain", "weighted", "dft"])  # fmt: skip
def test_the_held_out_loss_is_that_of_a_training_step_on_the_same_rows(janus_folder, tmp_path, settings):
    dataset = Dataset.from_list(mixed_rows(), features=FEATURES)
    trainer = sft_trainer(janus_folder, tmp_path, dataset, eval_dataset=dataset, max_steps=1, **settings)
    trainer.train()
    (trained,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for size in (1, 3, 8):  # whatever rows are together
        held_out = sft_trainer(janus_folder, tmp_path, dataset, eval_dataset=dataset, per_device_eval_batch_size=size,
                               **settings)  # fmt: skip
        found = held_out.evaluate(metric_key_prefix="test" if size == 3 else "eval")
        assert found["test_loss" if size == 3 else "eval_loss"] == pytest.approx(trained, rel=1e-5)
    assert held_out.state.log_history[-1]["eval_loss"] == found["eval_loss"]


def test_a_run_without_pictures_logs_no_loss_of_images(janus_folder, tmp_path):
    dataset = Dataset.from_list(mixed_rows()[4:], features=FEATURES)
    trainer = sft_trainer(janus_folder, tmp_path, dataset, max_steps=1)
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["loss/text"] == pytest.approx(entry["loss"], rel=1e-4) and "loss/image" not in entry


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_loss_weight": -1.0}, "image_loss_weight = -1.0 must be >= 0"),
        ({"loss_type": "dft", "text_loss_weight": 2.0}, "loss_type = 'dft' is not supported with weights"),
        ({"eval_guidance_scale": 0.5}, "eval_guidance_scale = 0.5 must be >= 1"),
        ({"prompt_template": "plan it"}, r"prompt_template = 'plan it' must contain \{prompt\}"),
    ],
)
def test_bad_settings_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        JanusSFTConfig(output_dir=str(tmp_path), **settings)
