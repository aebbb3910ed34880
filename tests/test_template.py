"""One prompt template for SFT, rollouts and evaluation; rewards see the user's own text."""

import json
import logging

import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import JanusProcessor

from janus_trl.configs import JanusGRPOConfig, JanusSFTConfig
from janus_trl.prompts import (
    bind_prompt_template,
    encode_prompts,
    prompt_lengths,
    prompt_template,
    prompt_with_pictures,
    user_text,
)
from janus_trl.sampling import SamplingSettings, rollout
from janus_trl.scripts import evaluate
from janus_trl.sft_data import JointCollator
from tests.sft import CODES, FEATURES, mixed_rows, picture, sft_trainer

PLAN = "First plan. {prompt}!"


def text_of(processor, ids) -> str:
    """Decoded without spaces: the tokenizer of letters puts one between all of them."""
    return processor.tokenizer.decode(ids).replace(" ", "")


def test_a_template_goes_around_the_users_text(processor):
    plain = encode_prompts(processor, ["First plan. a {prompt} cat!"])["input_ids"]
    bind_prompt_template(processor, PLAN)
    assert torch.equal(encode_prompts(processor, ["a {prompt} cat"])["input_ids"], plain)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_pictures_stay_before_a_templated_question(processor, count):
    pictures = [picture("red")] * count
    message = {
        "role": "user",
        "content": [*({"type": "image", "image": p} for p in pictures), {"type": "text", "text": "what?"}],
    }
    plain = encode_prompts(processor, ["First plan. what?!"], [pictures])["input_ids"]
    bind_prompt_template(processor, PLAN)
    assert torch.equal(encode_prompts(processor, ["what?"], [pictures])["input_ids"], plain)
    assert torch.equal(encode_prompts(processor, [[message]])["input_ids"], plain)
    assert prompt_lengths(processor, ["what?"], [count]) == [plain.shape[1]]


def test_pictures_beside_a_conversation_stand_before_its_first_user_text(processor):
    picture = Image.new("RGB", (20, 10), "red")
    conversation = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a cat"}]
    conversation += [{"role": "user", "content": "sure?"}]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in conversation]
    parts[0]["content"].insert(0, {"type": "image", "image": picture})
    written, beside = encode_prompts(processor, [parts]), encode_prompts(processor, [conversation], [[picture]])
    assert torch.equal(written["input_ids"], beside["input_ids"])
    assert torch.equal(written["pixel_values"], beside["pixel_values"])
    assert prompt_lengths(processor, [conversation], [1]) == [written["input_ids"].shape[1]]
    assert len(encode_prompts(processor, [parts], [[picture]])["pixel_values"]) == 1  # not twice


def test_a_held_out_conversation_is_whole_and_shown_as_its_question():
    picture = Image.new("RGB", (20, 10), "red")
    system, typed = {"role": "system", "content": "Be brief."}, [{"type": "image"}, {"type": "text", "text": "what?"}]
    text = {"type": "text", "text": "what?"}
    asked = [{"role": "user", "content": [{"type": "image", "image": picture}, text]}]
    before = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
    question = {"role": "user", "content": "what?"}
    rows = [("what?", []), ([question], []), ([system, question], before), ([{**question, "content": typed}], [])]
    for prompt, first in rows:
        assert prompt_with_pictures({"prompt": prompt, "images": [picture]}) == [*first, *asked]
        assert prompt_with_pictures({"prompt": prompt, "images": []}) == prompt
        assert user_text(prompt) == "what?"


def test_sft_rows_and_rollouts_have_the_same_prompt(model, processor):
    bind_prompt_template(processor, PLAN)
    result = rollout(model, processor, ["a cat"], SamplingSettings(), [1])
    batch = JointCollator.of(model, processor, 0.0)([{"prompt": "a cat", "image_codes": CODES}])
    prompt = result.prompt_ids[0]
    assert batch["input_ids"][0, : len(prompt)].tolist() == prompt
    assert "Firstplan.acat!" in text_of(processor, prompt)


def test_a_checkpoint_remembers_its_template(janus_folder, tmp_path, processor, caplog):
    dataset = Dataset.from_list(mixed_rows(), features=FEATURES)
    trainer = sft_trainer(janus_folder, tmp_path, dataset, max_steps=1, prompt_template=PLAN)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert prompt_template(processor) == "{prompt}"
    again = sft_trainer(str(tmp_path / "saved"), tmp_path, dataset)
    assert prompt_template(again.processing_class) == PLAN and caplog.records == []
    with caplog.at_level(logging.WARNING):
        other = sft_trainer(str(tmp_path / "saved"), tmp_path, dataset, prompt_template="{prompt}")
    assert prompt_template(other.processing_class) == "{prompt}"
    (record,) = [r for r in caplog.records if "prompt_template" in r.message]
    assert "trained with 'First plan. {prompt}!'" in record.message


def test_a_checkpoint_remembers_that_it_had_no_template(janus_folder, tmp_path, caplog):
    dataset = Dataset.from_list(mixed_rows(), features=FEATURES)
    sft_trainer(janus_folder, tmp_path, dataset).save_model(str(tmp_path / "plain"))
    with caplog.at_level(logging.WARNING):
        bind_prompt_template(JanusProcessor.from_pretrained(janus_folder), PLAN)  # never trained by us: no warning
        assert caplog.records == []
        bind_prompt_template(JanusProcessor.from_pretrained(tmp_path / "plain"), PLAN)
    assert "trained with '{prompt}'" in caplog.records[-1].message


@pytest.mark.parametrize("task", ["t2i", "i2t"])
def test_rewards_see_the_users_text_and_the_model_the_template(trainer_of, task):
    seen = []

    def reward(prompts, completion_ids, **columns):
        seen.extend(p if isinstance(p, str) else p[-1]["content"] for p in prompts)
        return [float(i) for i in range(len(prompts))]

    trainer = trainer_of(reward, task=task, prompt_template=PLAN)
    sampled, sample = [], trainer.sample
    trainer.sample = lambda *args: sampled.append(sample(*args)) or sampled[-1]
    trainer.train()
    assert seen and not any("First plan" in str(text) for text in seen)
    prompts = [text_of(trainer.processing_class, ids) for ids in sampled[0].prompt_ids]
    assert all("Firstplan." in prompt for prompt in prompts)


@pytest.mark.parametrize("config", [JanusSFTConfig, JanusGRPOConfig])
def test_a_template_without_the_users_text_is_refused(config, tmp_path):
    settings = {"num_generations": 2, "per_device_train_batch_size": 2} if config is JanusGRPOConfig else {}
    with pytest.raises(ValueError, match=r"prompt_template = 'Plan.' must contain \{prompt\}"):
        config(output_dir=str(tmp_path), prompt_template="Plan.", **settings)


def test_evaluation_takes_the_template_of_the_checkpoint_or_the_one_given(janus_folder, tmp_path, capsys, monkeypatch):
    from janus_trl.modeling import JanusForInterleavedGeneration

    model, processor = (
        JanusForInterleavedGeneration.from_pretrained(janus_folder),
        JanusProcessor.from_pretrained(janus_folder),
    )
    bind_prompt_template(processor, PLAN)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    seen, original = [], evaluate.rollout
    monkeypatch.setattr(evaluate, "rollout", lambda *a, **k: seen.append(original(*a, **k)) or seen[-1])
    (tmp_path / "prompts.txt").write_text("a cat\n")
    argv = ["--model_name_or_path", str(tmp_path), "--dataset_name", str(tmp_path / "prompts.txt")]
    argv += ["--dataset_test_split", "train", "--reward_funcs", "tests.test_template.brightness"]
    for extra, text in ((["--prompt_template", "Draw {prompt}"], "Drawacat"), ([], "Firstplan.acat!")):
        evaluate.main([*argv, *extra])
        assert text in text_of(processor, seen[-1].prompt_ids[0])
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["prompt_template"] == (extra or [0, PLAN])[1]
    with pytest.raises(SystemExit):
        evaluate.main([*argv, "--prompt_template", "Draw"])
    assert "must contain {prompt}" in capsys.readouterr().err


def brightness(prompts, generated_images, **columns) -> list[float]:
    """A reward that refuses templated prompts."""
    assert prompts == ["a cat"]
    return [1.0 for _ in generated_images]


JANUS_SYSTEM = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language.\n\n"
)


@pytest.mark.parametrize("system", [False, True])
def test_prompts_are_those_of_janus_pro_byte_by_byte(processor, system):
    """Converted checkpoints set `use_default_system_prompt`: it is about understanding, so drawing goes without."""
    processor.use_default_system_prompt = system
    picture = Image.new("RGB", (16, 16))
    encoded = encode_prompts(processor, ["a cat", "what?"], [[], [picture]], draws=[True, False])
    rows = [ids[mask.bool()] for ids, mask in zip(encoded["input_ids"], encoded["attention_mask"], strict=True)]
    codes = "<begin_of_image>" + "<image_placeholder>" * processor.num_image_tokens + "<end_of_image>"
    first = JANUS_SYSTEM if system else ""
    expected = ["<|User|>: a cat\n\n<|Assistant|>:", f"{first}<|User|>: {codes}\nwhat?\n\n<|Assistant|>:"]
    for row, text in zip(rows, expected, strict=True):
        assert row.tolist() == processor.tokenizer(text)["input_ids"]
    assert prompt_lengths(processor, ["a cat", "what?"], [0, 1], [True, False]) == [len(row) for row in rows]
