"""SFT on mixed rows: what carries loss, blanking for guidance, and that it learns."""

import pytest
import torch
from datasets import Dataset
from PIL import Image as PILImage
from transformers import JanusForConditionalGeneration

from janus_trl.configs import JanusSFTConfig
from janus_trl.image_codes import encode_pictures, with_image_codes
from janus_trl.modeling import JanusForInterleavedGeneration
from janus_trl.sft_data import JointCollator, refuse_edits
from janus_trl.sft_trainer import JanusSFTTrainer
from tests.sft import CODES, FEATURES, labels_of, mixed_rows, picture, row
from tests.sft import sft_trainer as trainer_of


@pytest.fixture
def collate(model, processor):
    def build(rows, guidance_dropout=0.0):
        return JointCollator.of(model, processor, guidance_dropout)(rows)

    return build


# ---- labels ---------------------------------------------------------------------------------------------------------


def test_labels_of_a_picture_are_its_frame_and_codes(collate, model):
    special, v = model.special_ids, model.vocab_size
    batch = collate([{"prompt": "a red square", "image_codes": CODES}])
    expected = [special.begin_of_image, *(v + c for c in CODES), special.end_of_image, special.eos[0]]
    assert labels_of(batch) == expected and batch["input_ids"][0, -len(expected) :].tolist() == expected
    assert batch["labels"][0, : -len(expected)].eq(-100).all()


def test_labels_of_reasoning_and_picture(collate, model, processor):
    batch = collate([{"prompt": "q", "reasoning": "plan", "image_codes": CODES}])
    text = processor.tokenizer("plan", add_special_tokens=False)["input_ids"]
    assert len(text) == 4
    assert labels_of(batch)[:5] == [*text, model.special_ids.begin_of_image]
    assert len(labels_of(batch)) == 4 + 1 + 16 + 2


def test_labels_of_an_answer_are_its_text_and_eos_and_no_placeholder(collate, model, processor):
    special = model.special_ids
    rows = [{"prompt": "q", "images": [picture("red")] * count, "completion": "yes"} for count in (0, 1, 2)]
    batch = collate(rows)
    text = processor.tokenizer("yes", add_special_tokens=False)["input_ids"]
    for index, count in enumerate((0, 1, 2)):
        assert labels_of(batch, index) == [*text, special.eos[0]]
        assert (batch["input_ids"][index] == special.image_placeholder).sum() == 16 * count
    assert batch["pixel_values"].shape == (3, 3, 16, 16)


def test_an_empty_answer_teaches_to_stop(collate, model):
    assert labels_of(collate([{"prompt": "q", "completion": ""}])) == [model.special_ids.eos[0]]


def test_a_mixed_batch_is_padded_right_without_labels_or_attention_on_padding(collate, model):
    rows = [
        {"prompt": "q", "image_codes": CODES},
        {"prompt": "a longer prompt", "image_codes": [], "completion": "a"},
        {"prompt": "r", "images": [picture("red")], "image_codes": [], "completion": "bb"},
    ]
    batch = collate(rows)
    lengths = batch["attention_mask"].sum(1)
    for index, length in enumerate(lengths.tolist()):
        assert batch["attention_mask"][index, :length].all() and not batch["attention_mask"][index, length:].any()
        assert (batch["input_ids"][index, length:] == model.special_ids.pad).all()
        assert (batch["labels"][index, length:] == -100).all() and batch["labels"][index, length - 1] != -100
        assert batch["input_ids"][index, 0] == model.special_ids.bos
    assert [len(labels_of(batch, i)) for i in range(3)] == [19, 2, 3]
    assert batch["all_modalities"] is True


def test_a_prompt_is_what_the_rollout_sees(collate, model, processor):
    from janus_trl.sampling import SamplingSettings, rollout

    result = rollout(model, processor, ["a red square"], SamplingSettings(), [1])
    codes = [i - model.vocab_size for i in result.completion_ids[0] if i >= model.vocab_size]
    batch = collate([{"prompt": "a red square", "image_codes": codes}])
    assert batch["input_ids"][0].tolist() == result.prompt_ids[0] + result.completion_ids[0]


# ---- blanking -------------------------------------------------------------------------------------------------------


def test_a_blanked_row_is_the_unconditional_stream_of_the_sampler(collate, model):
    rows = [{"prompt": "a red square", "reasoning": "plan", "image_codes": CODES}]
    plain, blank = collate(rows), collate(rows, 1.0)
    assert torch.equal(blank["input_ids"], model.unconditional_ids(plain["input_ids"]))
    assert torch.equal(blank["attention_mask"], plain["attention_mask"])
    assert labels_of(blank) == [model.vocab_size + c for c in CODES]
    at = blank["labels"][0] != -100
    assert torch.equal(blank["input_ids"][0][at], blank["labels"][0][at])


def test_answers_are_never_blanked(collate):
    rows = [{"prompt": "q", "images": [picture("red")], "completion": "yes", "image_codes": []}]
    plain, blank = collate(rows), collate(rows, 1.0)
    assert torch.equal(plain["input_ids"], blank["input_ids"]) and torch.equal(plain["labels"], blank["labels"])


def test_the_share_of_blanked_rows_is_guidance_dropout(collate):
    torch.manual_seed(0)
    batch = collate([{"prompt": "q", "image_codes": CODES}] * 400, 0.25)
    blanked = sum(len(labels_of(batch, i)) == 16 for i in range(400))
    assert 70 <= blanked <= 130  # 100 expected, standard deviation 8.7


# ---- codes ----------------------------------------------------------------------------------------------------------


def test_codes_are_those_of_the_image_tokenizer(model, processor):
    torch.manual_seed(0)
    noise = PILImage.fromarray(torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8).numpy())
    pictures = [noise, picture("red"), picture("blue")]
    pixels = torch.stack([
        torch.frombuffer(bytearray(p.tobytes()), dtype=torch.uint8).view(16, 16, 3).permute(2, 0, 1) / 127.5 - 1
        for p in pictures
    ])  # fmt: skip
    with torch.no_grad():
        expected = model.model.vqmodel.encode(pixels).image_tokens.view(3, -1).tolist()
    assert encode_pictures(model, pictures) == expected
    assert all(len(row) == 16 and 0 <= min(row) and max(row) < 16 for row in expected)
    assert encode_pictures(model, []) == []


def test_blanked_rows_depend_on_seed_epoch_and_row_alone(model, processor):
    rows = [{"prompt": f"draw {i}", "image_codes": CODES} for i in range(300)]
    collator = JointCollator.of(model, processor, 0.3)

    def blanked(epoch: int, order: list[int]) -> list[int]:
        collator.set_epoch(0, epoch)
        boi = model.special_ids.begin_of_image
        labels = collator([rows[i] for i in order])["labels"]
        return sorted(i for i, row in zip(order, labels, strict=True) if boi not in row)

    first, second = blanked(0, list(range(300))), blanked(1, list(range(300)))
    assert first == blanked(0, list(range(300))[::-1]) != second
    assert 60 < len(first) < 120 and 60 < len(second) < 120  # 90 +- 8


def test_pictures_are_cropped_to_their_middle(model, processor):
    wide = picture("white", (48, 16))
    wide.paste(picture("red"), (16, 0))
    assert encode_pictures(model, [wide]) == encode_pictures(model, [picture("red")])
    with_alpha = picture("red").convert("RGBA")
    assert encode_pictures(model, [with_alpha]) == encode_pictures(model, [picture("red")])


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_codes_stay_with_their_rows(model, processor, batch_size, tmp_path):
    rows = [row(image=picture("red")), row(completion="a"), row(image=picture("blue")), row(image=picture("red"))]
    dataset = with_image_codes(Dataset.from_list(rows, features=FEATURES), model, str(tmp_path), batch_size)
    (red,), (blue,) = (encode_pictures(model, [picture(c)]) for c in ("red", "blue"))
    assert list(dataset["image_codes"]) == [red, [], blue, red]
    assert "image" not in dataset.column_names
    assert with_image_codes(None, model) is None


# ---- training -------------------------------------------------------------------------------------------------------


def test_loss_goes_down_on_mixed_rows_and_the_right_parts_learn(janus_folder, tmp_path):
    dataset = Dataset.from_list(mixed_rows(), features=FEATURES)
    trainer = trainer_of(janus_folder, tmp_path, dataset, eval_dataset=dataset)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    start = trainer.evaluate()["eval_loss"]
    without_gradient = []
    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: without_gradient.extend(
            p for group in optimizer.param_groups for p in group["params"] if p.grad is None
        )
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(start, rel=1e-4)
    assert trainer.evaluate()["eval_loss"] < 0.5 * start
    assert without_gradient == []
    changed = {n.split(".")[1] for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {
        "language_model", "generation_embeddings", "generation_aligner", "generation_head", "vision_model", "aligner",
        "weight",
    }  # fmt: skip


def test_the_logged_loss_is_the_mean_negative_log_prob_of_the_labels(janus_folder, tmp_path, collate, model):
    dataset = Dataset.from_list(mixed_rows()[:4], features=FEATURES)
    trainer = trainer_of(janus_folder, tmp_path, dataset, max_steps=1, per_device_train_batch_size=2,
                         gradient_accumulation_steps=2)  # fmt: skip
    rows = [trainer.train_dataset[i] for i in range(4)]
    with torch.no_grad():
        out = model(**collate(rows), fused_lm_head=True)
    trainer.train()
    (loss,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert loss == pytest.approx(-out.log_probs.sum().item() / out.label_mask.sum().item(), rel=1e-4)


def test_a_loaded_model_and_processor_are_taken_as_they_are(model, processor, tmp_path):
    dataset = Dataset.from_list(mixed_rows(), features=FEATURES)
    trainer = trainer_of(None, tmp_path, dataset, model=model, processor=processor, max_steps=1)
    assert trainer.model is model and "forward" not in vars(model)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    stock = JanusForConditionalGeneration.from_pretrained(str(tmp_path / "saved"), dtype=torch.float32)
    assert all(torch.equal(value, stock.state_dict()[name]) for name, value in model.state_dict().items())


def test_adapters_are_the_only_thing_trained_with_lora(janus_folder, tmp_path):
    from trl import ModelConfig

    from janus_trl.script_arguments import lora_config

    args = JanusSFTConfig(
        output_dir=str(tmp_path), report_to="none", per_device_train_batch_size=8, max_steps=1, learning_rate=1e-2,
        gradient_checkpointing=True, save_strategy="no", disable_tqdm=True, codes_cache_dir=str(tmp_path / "codes"),
    )  # fmt: skip
    dataset = Dataset.from_list(mixed_rows(), features=FEATURES)
    trainer = JanusSFTTrainer(
        janus_folder, args, dataset, peft_config=lora_config(ModelConfig(use_peft=True, lora_r=2))
    )
    assert all("lora_" in n and "language_model" in n for n, p in trainer.model.named_parameters() if p.requires_grad)
    trainer.train()
    assert all(p.abs().max() > 0 for n, p in trainer.model.named_parameters() if "lora_B" in n)


def test_what_was_taught_is_what_is_sampled(janus_folder, tmp_path):
    """Overfit on two pictures, then draw them: training rows and rollouts follow one protocol."""
    from janus_trl.sampling import SamplingSettings, rollout

    torch.manual_seed(0)
    codes = torch.randint(0, 16, (2, 16)).tolist()
    rows = [
        {"prompt": p, "reasoning": r, "image_codes": c} for p, r, c in zip("xy", ("one", "two"), codes, strict=True)
    ]
    trainer = trainer_of(janus_folder, tmp_path, Dataset.from_list(rows), max_steps=60, per_device_train_batch_size=2)
    trainer.train()
    model: JanusForInterleavedGeneration = trainer.model
    settings = SamplingSettings(max_text_length=8, greedy=True)
    result = rollout(model, trainer.processing_class, ["x", "y"], settings, [0, 0])
    for ids, mask, row_codes in zip(result.completion_ids, result.env_mask, codes, strict=True):
        assert [i - model.vocab_size for i in ids if i >= model.vocab_size] == row_codes
        assert mask[3] == 1 and ids[3] == model.special_ids.begin_of_image  # opened by itself, after three letters


# ---- rows that are refused, evaluation, arguments -------------------------------------------------------------------


@pytest.mark.parametrize("where", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize("encoded", [False, True])
def test_a_row_with_input_pictures_and_a_target_picture_is_refused(janus_folder, tmp_path, where, encoded):
    rows = mixed_rows() * 150  # more than one block of the check
    rows[1100] = row("make it blue", images=[picture("red")], image=picture("blue"))
    good, bad = (Dataset.from_list(r, features=FEATURES) for r in (mixed_rows(), rows))
    if encoded:
        bad = bad.remove_columns("image").add_column("image_codes", [[]] * 1100 + [CODES] + [[]] * 99)
    first, second = (bad, None) if where == "train_dataset" else (good, bad)
    with pytest.raises(ValueError, match=rf"{where}, row 1100: .*images.*leave images empty"):
        trainer_of(janus_folder, tmp_path, first, second)


def test_the_row_in_the_message_is_that_of_a_shuffled_data_set():
    rows = [row(images=[picture("red")], completion="a"), row(image=picture("red")), row(completion="b")]
    rows.append(row(images=[picture("red")], image=picture("red")))
    dataset = Dataset.from_list(rows, features=FEATURES)
    refuse_edits(dataset.select([0, 1, 2]), "train_dataset")
    with pytest.raises(ValueError, match="train_dataset, row 1:"):
        refuse_edits(dataset.select([2, 3, 0]), "train_dataset")
    refuse_edits(Dataset.from_dict({"prompt": ["q"], "images": [[]], "image_codes": [CODES]}), "train_dataset")
    refuse_edits(Dataset.from_dict({"prompt": ["q"], "images": [None], "image_codes": [CODES]}), "train_dataset")
    refuse_edits(None, "eval_dataset")


def test_nothing_is_blanked_in_evaluation(janus_folder, tmp_path):
    dataset = Dataset.from_list(mixed_rows()[:4], features=FEATURES)
    trainer = trainer_of(janus_folder, tmp_path, dataset, eval_dataset=dataset, guidance_dropout=1.0)
    plain = trainer_of(janus_folder, tmp_path, dataset, eval_dataset=dataset)
    (batch,) = trainer.get_eval_dataloader()
    assert {len(labels_of(batch, i)) for i in range(4)} == {19, 24}  # frame and codes, with and without reasoning
    (batch,) = trainer.get_train_dataloader()
    assert {len(labels_of(batch, i)) for i in range(4)} == {16}
    losses = [trainer.evaluate()["eval_loss"] for _ in range(2)]
    assert losses == [plain.evaluate()["eval_loss"]] * 2
    assert trainer.data_collator.guidance_dropout == 1.0


def test_model_arguments_are_left_as_they_were(janus_folder, tmp_path):
    dataset = Dataset.from_list(mixed_rows(), features=FEATURES)
    given = {"attn_implementation": "eager"}
    trainer = trainer_of(janus_folder, tmp_path, dataset, model_init_kwargs=given)
    assert trainer.args.model_init_kwargs is given and trainer.model.config._attn_implementation == "eager"
    assert isinstance(trainer.args.to_json_string(), str)
