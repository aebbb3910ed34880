"""The captured engine on a GPU: the rows of the plain path, from graphs that stay. Run with CUDA_VISIBLE_DEVICES=0."""

import pytest
import torch
from transformers import JanusConfig

from janus_trl.engine import STOP_CHECK_EVERY, DecodeEngine
from janus_trl.modeling import JanusForInterleavedGeneration, bind_special_ids
from janus_trl.sampling import SamplingSettings, rollout, row_seed
from tests.test_engine import PROMPTS, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA_VISIBLE_DEVICES=0")


@pytest.fixture
def model(janus_folder, processor):
    """Heads of 16, the least that the kernels take; rows end their text at different lengths."""
    config = JanusConfig.from_pretrained(janus_folder)
    config.text_config.num_attention_heads = config.text_config.num_key_value_heads = 2
    config.text_config.head_dim = 16
    model = JanusForInterleavedGeneration.from_pretrained(janus_folder, config=config, dtype=torch.float32)
    bind_special_ids(model, processor)
    with torch.no_grad():
        for special in (model.special_ids.begin_of_image, model.special_ids.eos[0]):
            model.lm_head.weight[special] *= 2.5
    return model.eval().cuda()


@pytest.fixture
def engine():
    return DecodeEngine(torch.float32)


def sample(model, processor, engine, settings, prompts=PROMPTS):
    if engine is not None:
        engine.load_weights(model)
    seeds = [row_seed(0, "engine", i) for i in range(len(prompts))]
    return rollout(model, processor, prompts, settings, seeds, engine=engine)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(("guidance", "text"), [(1.0, 0), (5.0, 0), (1.0, 12), (5.0, 12)])
def test_captured_steps_sample_the_rows_of_the_plain_path(model, processor, engine, guidance, text, greedy):
    settings = SamplingSettings("t2i", text, guidance, greedy=greedy)
    plain = sample(model, processor, None, settings)
    same(plain, sample(model, processor, engine, settings))
    assert len(engine.graphs) == (2 if text else 1)
    if text and not greedy:
        assert len({len(row) for row in plain.completion_ids}) > 1


def test_conditional_log_probs_and_a_short_last_chunk_are_those_of_the_plain_path(model, processor, engine):
    conditional = SamplingSettings("t2i", 12, 5.0, 0.7, 1.3, "conditional")
    for settings in (
        conditional,
        SamplingSettings("t2i", 12, 5.0, batch_size=3),
        SamplingSettings("i2t", 12, batch_size=4),
    ):
        same(*(sample(model, processor, one, settings) for one in (None, engine)))


def test_answers_and_images_of_one_reasoning_are_those_of_the_plain_path(model, processor, engine):
    for settings in (SamplingSettings("i2t", 12), SamplingSettings("t2i", 12, 5.0, images_per_reasoning=2)):
        prompts = ["a"] * 4 + ["a red cat sits on a mat"] * 2
        same(*(sample(model, processor, one, settings, prompts) for one in (None, engine)))


def test_graphs_stay_for_other_prompt_lengths_and_other_weights(model, processor, engine):
    settings = SamplingSettings("t2i", 4, 5.0)
    first = sample(model, processor, engine, settings, ["a", "b"])
    warmup, graphs = engine.warmup_seconds, dict(engine.graphs)
    for prompts in (["another prompt", "b"], ["x" * 40, "y"]):
        same(*(sample(model, processor, one, settings, prompts) for one in (None, engine)))
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            parameter.mul_(1.1)
    after = sample(model, processor, engine, settings, ["a", "b"])
    same(sample(model, processor, None, settings, ["a", "b"]), after)
    assert after.completion_ids != first.completion_ids
    assert engine.warmup_seconds == warmup and engine.graphs == graphs


def test_text_ends_soon_after_the_last_row(model, processor, engine):
    settings = SamplingSettings("i2t", 64)
    with torch.no_grad():
        model.lm_head.weight[model.special_ids.eos[0]] *= 4
    longest = max(map(len, sample(model, processor, engine, settings).completion_ids))
    assert longest < 32 and longest <= engine.state.step.item() <= longest + STOP_CHECK_EVERY + 1


def test_memory_does_not_grow_with_released_buffers(model, processor, engine):
    allocated = []
    for _ in range(6):
        sample(model, processor, engine, SamplingSettings("t2i", 4, 5.0))
        engine.release(with_weights=True)
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert max(allocated[2:]) == allocated[2]
