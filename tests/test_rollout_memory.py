"""What a rollout needs, and the message when it does not fit."""

import pytest
import torch
from transformers import JanusConfig

from janus_trl.engine import DecodeEngine
from janus_trl.rollout_memory import cache_bytes, out_of_memory_message, row_bytes
from janus_trl.sampling import SamplingSettings, rollout
from tests.rollouts import PROMPTS, SEEDS

GIB = 2**30


@pytest.fixture
def janus_7b() -> JanusConfig:
    text = {"vocab_size": 102400, "hidden_size": 4096, "num_hidden_layers": 30, "num_attention_heads": 32}
    return JanusConfig(text_config={**text, "intermediate_size": 11008}, vq_config={"num_patches": 24})


def test_a_row_of_a_7b_model_takes_half_a_mebibyte_a_position_and_stream(janus_7b):
    assert cache_bytes(janus_7b, 1, 1) == 2 * 30 * 4096 * 2
    guided, alone = (row_bytes(janus_7b, SamplingSettings(guidance_scale=w), 32) for w in (5.0, 1.0))
    assert guided == pytest.approx(2 * 640 * 491520 + 12 * 16384)
    assert guided - alone == 640 * 491520
    answer = SamplingSettings("i2t", 64)
    assert row_bytes(janus_7b, answer, 600) == 768 * 491520 + 12 * 102400


def test_the_message_names_the_size_that_was_used_and_the_largest_that_fits(janus_7b):
    settings = SamplingSettings(guidance_scale=5.0)
    one = row_bytes(janus_7b, settings, 32)
    said = out_of_memory_message(janus_7b, settings, 64, 32, int(20.5 * one / 0.85))
    assert "rollout_batch_size = 64 (unset: all 64 rows at once)" in said
    assert "a row takes about 0.59 GiB" in said and "rollout_batch_size: 20 would fit" in said
    said = out_of_memory_message(janus_7b, SamplingSettings(guidance_scale=5.0, batch_size=16), 64, 32, 100 * one)
    assert "rollout_batch_size = 16:" in said and "rollout_batch_size: 15 would fit" in said  # 16 did not
    assert "Not even one row fits" in out_of_memory_message(janus_7b, settings, 64, 32, one // 2)


@pytest.mark.parametrize("with_engine", [True, False])
def test_a_rollout_that_does_not_fit_says_so(model, processor, monkeypatch, with_engine):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12 GiB.")

    engine = None
    if with_engine:
        engine = DecodeEngine(torch.float32, use_cuda_graphs=False)
        engine.load_weights(model)
        monkeypatch.setattr(engine, "prefill", fail)
    else:
        monkeypatch.setattr(model, "image_head_hidden", fail)
    monkeypatch.setattr("janus_trl.sampling.free_bytes", lambda device: GIB)
    training = model.training
    with pytest.raises(torch.OutOfMemoryError, match="rollout_batch_size = 2: a row takes about .* would fit") as error:
        rollout(model, processor, PROMPTS, SamplingSettings(batch_size=2), SEEDS, engine=engine)
    assert "Tried to allocate 12 GiB" in str(error.value.__cause__)
    assert model.training == training and (engine is None or engine.keys is None)


def test_the_size_that_would_fit_keeps_reasonings_whole():
    settings = SamplingSettings("t2i", 8, 5.0, images_per_reasoning=4, batch_size=32)
    free = int(8 * row_bytes(JanusConfig(), settings, 32))  # 6 rows after the margin
    message = out_of_memory_message(JanusConfig(), settings, 32, 32, free)
    assert "rollout_batch_size: 4 would fit" in message
