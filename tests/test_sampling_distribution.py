"""Rollouts: what is sampled with which probabilities, and the pictures that come out."""

import math

import pytest
import torch
from transformers import JanusProcessor

from janus_trl.modeling import JanusForInterleavedGeneration, bind_special_ids
from janus_trl.picture_decoder import PictureDecoder
from janus_trl.sampling import (
    SamplingSettings,
    rollout,
    sample_ids,
)
from tests.rollouts import PROMPTS, SEEDS, Calls, assert_replay_equals_rollout, codes_of, favour
from tests.tiny import build_random_janus

# ---- the distribution -----------------------------------------------------------------------------------------------


def test_sample_ids_matches_the_probabilities():
    p = torch.tensor([0.0, 0.1, 0.0, 0.6, 0.3, 0.0])
    uniforms = (torch.arange(10_000) + 0.5) / 10_000
    ids = sample_ids(p.log().expand(10_000, -1), uniforms)
    frequencies = torch.bincount(ids, minlength=6) / 10_000
    torch.testing.assert_close(frequencies, p, atol=2e-4, rtol=0)
    assert (ids[1:] >= ids[:-1]).all()


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-24, 1.0])
def test_sample_ids_never_chooses_an_impossible_id(uniform):
    for seed in range(20):
        logits = torch.randn(3, 101, generator=torch.Generator().manual_seed(seed)) * 3
        logits[:, :4] = logits[:, -4:] = -math.inf
        ids = sample_ids(logits.log_softmax(-1), torch.full((3,), uniform))
        assert ((ids >= 4) & (ids < 97)).all()


def test_all_codes_of_the_codebook_can_be_sampled(tmp_path):
    build_random_janus(str(tmp_path), codebook=200)
    processor = JanusProcessor.from_pretrained(str(tmp_path))
    model = JanusForInterleavedGeneration.from_pretrained(str(tmp_path), dtype=torch.float32).eval()
    bind_special_ids(model, processor)
    result = rollout(model, processor, ["q"] * 200, SamplingSettings(image_temperature=100.0), list(range(200)))
    first = {codes_of(model, ids)[0] for ids in result.completion_ids}
    assert len(first) > 100  # 200 uniform draws from 200: 126 distinct on average, 50 with a top-k of 50


def test_sampled_codes_follow_the_model(model, processor):
    rows = 250
    result = rollout(model, processor, ["q"] * rows, SamplingSettings(guidance_scale=2.0), list(range(rows)))
    first = torch.tensor([codes_of(model, ids)[0] for ids in result.completion_ids])
    probabilities = {codes_of(model, ids)[0]: lp[1] for ids, lp in zip(result.completion_ids, result.logprobs)}
    for code, logp in probabilities.items():
        p = math.exp(logp)
        assert abs((first == code).float().mean().item() - p) < 4 * math.sqrt(p * (1 - p) / rows) + 1e-3


def test_low_temperature_approaches_greedy(model, processor):
    cold = SamplingSettings(max_text_length=3, guidance_scale=2.0, temperature=1e-3, image_temperature=1e-3)
    greedy = SamplingSettings(max_text_length=3, guidance_scale=2.0, greedy=True)
    sampled = rollout(model, processor, PROMPTS, cold, SEEDS).completion_ids
    assert sampled == rollout(model, processor, PROMPTS, greedy, SEEDS).completion_ids


@pytest.mark.parametrize("task", ["t2i", "i2t"])
def test_ids_that_are_no_text_are_never_sampled(model, processor, task):
    forbidden = model.special_ids.forbidden_in_text(task == "t2i")
    favour(model, forbidden, 50.0)
    result = rollout(model, processor, PROMPTS, SamplingSettings(task=task, max_text_length=5), SEEDS)
    for ids, mask in zip(result.completion_ids, result.env_mask, strict=True):
        assert sum(mask) >= 5 and not {i for i, m in zip(ids, mask, strict=True) if m} & set(forbidden)
    assert_replay_equals_rollout(model, result)


# ---- pictures and modes ---------------------------------------------------------------------------------------------


def test_decoding_is_deterministic_rgb_and_of_the_size_in_the_config(model):
    codes = torch.stack([torch.arange(16), torch.zeros(16, dtype=torch.long)])
    first, again = (PictureDecoder(model)(codes) for _ in range(2))
    assert [p.tobytes() for p in first] == [p.tobytes() for p in again]
    assert all(p.mode == "RGB" and p.size == (16, 16) for p in first)
    assert first[0].tobytes() != first[1].tobytes()


@pytest.mark.parametrize(
    ("value", "pixel"), [(-1.0, 0), (1.0, 255), (0.0, 128), (9.0, 255), (-9.0, 0), (-1 + 1.4 / 127.5, 1)]
)
def test_pixel_values_are_clamped_and_rounded(model, value, pixel):
    model.model.vqmodel.decode = lambda codes: torch.full((1, 3, 16, 16), value)
    (picture,) = PictureDecoder(model)(torch.zeros(1, 16, dtype=torch.long))
    assert picture.getextrema() == ((pixel, pixel),) * 3


def test_pictures_do_not_depend_on_the_chunk_nor_on_autocast(model):
    codes = torch.randint(16, (5, 16), generator=torch.Generator().manual_seed(0))
    whole, parts = PictureDecoder(model)(codes), PictureDecoder(model, batch_size=2)(codes)
    with torch.autocast("cpu", torch.bfloat16):
        cast = PictureDecoder(model)(codes)
    assert len(whole) == 5
    for a, b, c in zip(whole, parts, cast, strict=True):
        assert a.tobytes() == b.tobytes() == c.tobytes()


def test_a_decoder_in_another_precision_keeps_a_copy_and_leaves_the_model_alone(model):
    codes = torch.randint(16, (2, 16), generator=torch.Generator().manual_seed(0))
    expected = PictureDecoder(model)(codes)
    before = {name: weight.dtype for name, weight in model.state_dict().items()}
    coarse = PictureDecoder(model, torch.bfloat16)
    assert {p.dtype for p in coarse.vq.parameters()} == {torch.bfloat16} and coarse.vq is not model.model.vqmodel
    gaps = torch.tensor([a - b for a, b in zip(coarse(codes)[0].tobytes(), expected[0].tobytes(), strict=True)])
    assert 0 < gaps.abs().max() < 16
    kept = PictureDecoder(model, torch.float32, keep_copy=True)
    model.to(torch.bfloat16)  # as DeepSpeed does
    assert [p.tobytes() for p in kept(codes)] == [p.tobytes() for p in expected]
    assert PictureDecoder(model.float(), torch.float32).vq is model.model.vqmodel
    assert {name: weight.dtype for name, weight in model.state_dict().items()} == before
    assert not any(p.requires_grad for p in coarse.vq.parameters()) and not coarse.vq.training


def test_pictures_belong_to_the_codes_of_their_row(model, processor):
    result = rollout(model, processor, PROMPTS, SamplingSettings(batch_size=2), SEEDS)
    for ids, picture in zip(result.completion_ids, result.images, strict=True):
        (expected,) = PictureDecoder(model)(torch.tensor([codes_of(model, ids)]))
        assert picture.tobytes() == expected.tobytes()


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_restored_also_after_an_error(model, processor, training):
    model.train(training)
    rollout(model, processor, ["q"], SamplingSettings(), [1])
    assert model.training is training and model.lm_head.training is training
    with pytest.raises(ZeroDivisionError):
        rollout(model, processor, ["q"], SamplingSettings(max_text_length=3), [1], any_rank=lambda flag: 1 / 0)
    assert model.training is training


def test_dropout_of_adapters_is_off_in_rollouts(model, processor):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = get_peft_model(model, config).train()
    base = wrapped.get_base_model()
    settings = SamplingSettings(max_text_length=3, guidance_scale=2.0)
    result = rollout(base, processor, PROMPTS, settings, SEEDS)
    assert base.training
    wrapped.eval()
    assert rollout(base, processor, PROMPTS, settings, SEEDS).logprobs == result.logprobs
    assert_replay_equals_rollout(base, result, guidance_scale=2.0)


def test_rollouts_use_the_cache_under_gradient_checkpointing(model, processor):
    settings = SamplingSettings(max_text_length=3, guidance_scale=2.0)
    expected = rollout(model, processor, PROMPTS, settings, SEEDS)
    model.gradient_checkpointing_enable()
    model.train()
    calls = Calls(model)
    result = rollout(model, processor, PROMPTS, settings, SEEDS)
    assert result.completion_ids == expected.completion_ids
    assert all(length == 1 for _, length in calls.shapes[-model.num_image_codes :])
