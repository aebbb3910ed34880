"""PickScore on a small random CLIP: the formula, micro-batches, and loading whole weights under ZeRO-3."""

import json
import logging

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPModel, CLIPProcessor
from transformers.integrations import is_deepspeed_zero3_enabled

from benchmarks.rewards import build_clip, clip_processor
from benchmarks.rewards import main as rewards_benchmark
from janus_trl.rewards import check_reward_rows, get_reward_funcs
from janus_trl.rewards.calling import wrapped_reward
from janus_trl.rewards.clip_models import TransformersClip
from janus_trl.rewards.pickscore import PickScore
from janus_trl.rewards.placement import check_weights_present, outside_zero_init
from tests.clip import CAPTIONS, pictures, save_clip


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    return save_clip(str(tmp_path_factory.mktemp("clip")))


def build(folder: str, **args):
    return get_reward_funcs({"name": "pickscore", "args": {"model": folder, "processor": folder, **args}}, "t2i", [])


def score(rewards) -> list[float]:
    return rewards.funcs[0](prompts=CAPTIONS, completions=CAPTIONS, generated_images=pictures(), demands=CAPTIONS)


def direct_score(folder: str, caption: str, picture: Image.Image) -> float:
    """The formula written out: towers, projections, normalisation, exp(logit_scale) * cosine / 26."""
    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)
    ids = processor.tokenizer(caption)["input_ids"]
    ids = torch.tensor([ids if len(ids) <= 16 else [*ids[:15], ids[-1]]])
    pixels = processor.image_processor(images=picture, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        text = model.text_projection(model.text_model(input_ids=ids).last_hidden_state[0, -1])
        image = model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output[0])
        cosine = torch.dot(text, image) / (text.norm() * image.norm())
        return float(model.logit_scale.exp() * cosine / 26)


def test_scores_equal_the_formula(clip_folder):
    expected = [direct_score(clip_folder, c, p) for c, p in zip(CAPTIONS, pictures(), strict=True)]
    assert score(build(clip_folder)) == pytest.approx(expected, abs=1e-5)
    assert np.std(expected) > 0.01  # the comparison can tell rows apart
    assert score(build(clip_folder, raw=True)) == pytest.approx([26 * value for value in expected], abs=1e-4)


def test_micro_batches_equal_one_batch(clip_folder, monkeypatch):
    whole = score(build(clip_folder, batch_size=8))
    sizes: list[int] = []
    original = TransformersClip.image_features
    monkeypatch.setattr(TransformersClip, "image_features", lambda self, i: sizes.append(len(i)) or original(self, i))
    assert score(build(clip_folder, batch_size="3")) == pytest.approx(whole, abs=1e-5)
    assert sizes == [3, 3, 2]


def test_long_captions_keep_their_end_token(clip_folder):
    rewards = build(clip_folder)
    picture = pictures()[:2]
    longer = rewards.funcs[0](prompts=["ab" * 60, "ab" * 90], completions=["", ""], generated_images=[picture[0]] * 2)
    assert longer[0] == pytest.approx(longer[1], abs=1e-6)
    assert longer[0] == pytest.approx(direct_score(clip_folder, "ab" * 90, picture[0]), abs=1e-5)
    assert longer.counts == {"truncated": 2}
    assert score(rewards).counts == {"truncated": 1}  # one of CAPTIONS


def test_the_model_is_loaded_late_frozen_and_in_eval_mode(clip_folder):
    reward = PickScore(model=clip_folder, processor=clip_folder)
    assert not reward.clip.loaded
    reward.load()
    with reward.clip.ready() as clip:
        model = clip.module
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    reward.load()
    with reward.clip.ready() as clip:
        assert clip.module is model


def test_the_set_of_rewards_loads_its_models_on_demand(clip_folder, tmp_path):
    build(clip_folder).load()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="reward 'pickscore': model '.*empty'.*cannot be read") as error:
        build(str(tmp_path / "empty")).load()
    assert "\n" not in str(error.value)


def test_autocast_and_grad_mode_around_it_change_nothing(clip_folder):
    rewards = build(clip_folder)
    plain = score(rewards)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert score(rewards) == plain


def test_half_precision_is_close(clip_folder):
    half = score(build(clip_folder, dtype="bfloat16"))
    assert half == pytest.approx(score(build(clip_folder)), abs=0.03)
    assert any(value != torch.tensor(value).bfloat16().item() for value in half)  # compared in float32


def test_whole_weights_are_loaded_under_zero3(clip_folder, within_zero3):
    with outside_zero_init():
        assert not is_deepspeed_zero3_enabled()
    reward = PickScore(model=clip_folder, processor=clip_folder)
    reward.load()
    assert is_deepspeed_zero3_enabled()  # as before, for the policy
    with reward.clip.ready() as clip:
        assert all(parameter.numel() for parameter in clip.module.parameters())
    with pytest.raises(KeyError), outside_zero_init():
        raise KeyError
    assert is_deepspeed_zero3_enabled()


def test_rewards_of_the_users_own_are_built_and_loaded_outside_of_zero3(within_zero3):
    class Mine:
        def __init__(self):
            self.sharded = [is_deepspeed_zero3_enabled()]

        def load(self):
            self.sharded.append(is_deepspeed_zero3_enabled())

        def __call__(self, completions, **columns):
            return [0.0] * len(completions)

    rewards = get_reward_funcs(Mine)
    rewards.load()
    assert wrapped_reward(rewards.funcs[0]).sharded == [False, False]
    assert is_deepspeed_zero3_enabled()  # as before, for the policy


def test_empty_and_meta_weights_are_refused_with_the_rewards_name():
    sharded = torch.nn.Linear(2, 2)
    sharded.weight.data = torch.empty(0)
    with pytest.raises(ValueError, match="reward 'mine': parameter 'weight' has shape"):
        check_weights_present(sharded, "mine")
    with pytest.raises(ValueError, match="reward 'mine'.*meta"):
        check_weights_present(torch.nn.Linear(2, 2, device="meta"), "mine")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"device": "cuda:0"}, "'cuda:0'.*every rank on one card.*'auto' or 'cuda'"),
        ({"device": "tpu9"}, "device is 'tpu9'; valid: auto, cuda, cpu"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"model": "./nowhere"}, "model is './nowhere'; there is no such folder"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_loaded(args, message):
    with pytest.raises(ValueError, match=message):
        get_reward_funcs({"name": "pickscore", "args": args})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(clip_folder):
    reward = PickScore(model=clip_folder, processor=clip_folder, device="auto")
    reward.load()
    with reward.clip.ready() as clip:
        assert clip.module.device.type == "cpu"
    with pytest.raises(ValueError, match="no GPU is visible"):
        PickScore(device="cuda")


def test_prompts_in_other_scripts_are_scored_and_warned_about_once(clip_folder, caplog):
    prompts = ["a cat", "一只猫", "قطة", "🦊 café"]
    with caplog.at_level(logging.WARNING):
        check_reward_rows(["pickscore", "clip_score"], datasets.Dataset.from_dict({"prompt": prompts}))
    assert len(caplog.records) == 1 and "50.0 %" in caplog.text
    values = build(clip_folder).funcs[0](prompts=prompts, completions=prompts, generated_images=pictures()[:4])
    assert np.isfinite(values).all()
    caplog.clear()
    check_reward_rows("pickscore", datasets.Dataset.from_dict({"prompt": ["a cat", "café 🦊 12"]}))
    assert not caplog.records


@pytest.mark.parametrize("caption", ["a photo of a red cat", "Ein Vögelchen, 3 €", "a very long caption " * 40])
def test_scores_with_the_real_vocabulary_equal_a_direct_computation(caption):
    processor, model = clip_processor(), build_clip("tiny", "cpu", torch.float32)
    reward = PickScore.of_model(model, processor, raw=True)
    given = pictures(5)
    values = reward(prompts=[caption] * 5, generated_images=given)
    inputs = processor(text=[caption], images=given, return_tensors="pt", padding=True, truncation=True, max_length=77)
    with torch.no_grad():
        expected = model(**inputs).logits_per_image[:, 0]
    assert values == pytest.approx(expected.tolist(), abs=1e-5 * 100)  # 1e-5 of the cosine
    assert expected.std() > 0.05


def test_the_benchmark_runs_on_a_cpu(capsys):
    rewards_benchmark(["--size", "tiny", "--batch", "4", "--repeats", "1"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["measured"] for line in lines] == ["model", "step"]
    assert lines[0]["images_per_s"] > 0 and 0 < lines[1]["preprocessing_s"] < 5 and lines[1]["batch"] == 4
