"""The decode engine, uncaptured on CPU: the same rows as the plain path."""

import pytest
import torch
from PIL import Image

from janus_trl.engine import DecodeEngine
from janus_trl.engine_buffers import SLOT_MULTIPLE, supports
from janus_trl.modeling import JanusForInterleavedGeneration
from janus_trl.prompts import different_prompts
from janus_trl.sampling import SamplingSettings, rollout, row_seed, score_rollout
from tests.triton_switch import needs_triton, use_triton

PROMPTS = ["a", "a", "a red cat sits on a mat and more", "xyz" * 20, "a"]
PICTURES = [[Image.new("RGB", (20, 10), "red")]] * 2 + [[], [Image.new("RGB", (20, 10), "blue")] * 2, []]
SEEDS = [row_seed(0, "engine", i) for i in range(5)]


@pytest.fixture
def stopping_model(model):
    """Rows end their text at different lengths, some by eos and some by `<begin_of_image>`."""
    special = model.special_ids
    with torch.no_grad():
        model.lm_head.weight[special.begin_of_image] *= 2.5
        model.lm_head.weight[special.eos[0]] *= 2.5
    return model


@pytest.fixture
def engine(stopping_model):
    engine = DecodeEngine(torch.float32, use_cuda_graphs=False)
    engine.load_weights(stopping_model)
    return engine


def both(model, processor, engine, settings, images=None, prompts=PROMPTS):
    seeds = SEEDS[: len(prompts)]
    plain = rollout(model, processor, prompts, settings, seeds, images=images)
    return plain, rollout(model, processor, prompts, settings, seeds, images=images, engine=engine)


def same(plain, ours) -> None:
    assert ours.completion_ids == plain.completion_ids
    assert (ours.prompt_ids, ours.env_mask) == (plain.prompt_ids, plain.env_mask)
    gaps = [abs(a - b) for x, y in zip(ours.logprobs, plain.logprobs) for a, b in zip(x, y)]
    assert max(gaps) < 2e-5


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("logp_guidance", ["guided", "conditional"])
@pytest.mark.parametrize(("guidance", "text"), [(1.0, 0), (1.0, 12), (5.0, 0), (5.0, 12)])
def test_engine_samples_the_rows_of_the_plain_path(
    stopping_model, processor, engine, guidance, text, logp_guidance, greedy
):
    settings = SamplingSettings("t2i", text, guidance, 0.7, 1.3, logp_guidance, greedy)
    plain, ours = both(stopping_model, processor, engine, settings)
    if text and not greedy:
        assert len({len(row) for row in plain.completion_ids}) > 1  # rows did stop at different lengths
    same(plain, ours)


@pytest.mark.parametrize(("guidance", "batch_size"), [(1.0, None), (5.0, None), (5.0, 4)])
@pytest.mark.parametrize("with_triton", [False, True])
def test_images_of_one_reasoning_are_those_of_the_plain_path(
    stopping_model, processor, engine, guidance, batch_size, with_triton, monkeypatch
):
    if with_triton:  # rows of a group read their prompt at one place
        needs_triton(on_cpu=True)
        use_triton(monkeypatch, True)
    prompts = ["a"] * 4 + ["a red cat sits on a mat and more"] * 2 + ["a"] * 2
    settings = SamplingSettings("t2i", 12, guidance, images_per_reasoning=2, batch_size=batch_size)
    seeds = [row_seed(0, "engine", i) for i in range(8)]
    plain = rollout(stopping_model, processor, prompts, settings, seeds)
    ours = rollout(stopping_model, processor, prompts, settings, seeds, engine=engine)
    same(plain, ours)
    lengths = {len(row) for row in plain.completion_ids}
    assert len(lengths) > 1 and len({tuple(row) for row in plain.completion_ids}) == 8


def test_engine_answers_about_pictures_like_the_plain_path(stopping_model, processor, engine):
    plain, ours = both(stopping_model, processor, engine, SamplingSettings("i2t", 12), PICTURES)
    assert len({len(row) for row in plain.completion_ids}) > 1
    same(plain, ours)


def test_buffers_serve_smaller_chunks_and_other_prompt_lengths_and_grow_for_larger_ones(
    stopping_model, processor, engine
):
    settings = SamplingSettings("t2i", 4, 5.0, batch_size=2)
    same(*both(stopping_model, processor, engine, settings))  # chunks of 2, 2 and 1 rows
    keys = engine.keys.data_ptr()
    same(*both(stopping_model, processor, engine, settings, prompts=["q", "another prompt"]))
    assert engine.keys.data_ptr() == keys
    same(*both(stopping_model, processor, engine, SamplingSettings("t2i", 4, 5.0)))  # 5 rows at once
    assert engine.keys.shape[1] == 10 and engine.keys.shape[3] == SLOT_MULTIPLE


def test_rows_of_one_stream_leave_no_room_for_half_as_many_in_two(stopping_model, processor, engine):
    same(*both(stopping_model, processor, engine, SamplingSettings("t2i", 4, 1.0), prompts=PROMPTS[:4]))
    same(*both(stopping_model, processor, engine, SamplingSettings("t2i", 4, 5.0), prompts=PROMPTS[1:3]))
    assert len(engine.state.alive) == 4 and engine.keys.shape[1] == 8


def test_released_buffers_come_back(stopping_model, processor, engine):
    settings = SamplingSettings("t2i", 4, 5.0)
    same(*both(stopping_model, processor, engine, settings))
    engine.release()
    assert engine.keys is None and not engine.graphs
    same(*both(stopping_model, processor, engine, settings))


def test_engine_samples_from_the_new_weights_after_an_update(stopping_model, processor, engine):
    settings = SamplingSettings("t2i", 6, 5.0)
    old, _ = both(stopping_model, processor, engine, settings)
    optimizer = torch.optim.SGD(stopping_model.parameters(), lr=0.5)
    sum(p.square().sum() for p in stopping_model.model.language_model.parameters()).backward()
    optimizer.step()
    engine.load_weights(stopping_model)
    plain, ours = both(stopping_model, processor, engine, settings)
    same(plain, ours)
    assert ours.completion_ids != old.completion_ids
    replay = score_rollout(stopping_model, ours, settings)
    masks = [torch.tensor(row).bool() for row in ours.env_mask]
    gaps = [(torch.tensor(a) - b)[m].abs().max() for a, b, m in zip(ours.logprobs, replay, masks)]
    assert max(gaps) < 2e-5


def test_fused_matrices_become_the_storage_of_the_parameters(stopping_model, engine):
    attention = stopping_model.model.language_model.layers[0].self_attn
    fused = engine.weights["0.qkv"]
    assert attention.q_proj.weight.data_ptr() == fused.data_ptr()
    assert torch.equal(torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]), fused)
    with torch.no_grad():
        attention.v_proj.weight.fill_(3.0)
    assert (fused[-len(attention.v_proj.weight) :] == 3.0).all()  # an update needs no copy


def test_lora_is_merged_on_the_way_and_the_base_stays_as_it_was(stopping_model, processor):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(stopping_model, LoraConfig(r=4, target_modules=r".*language_model.*(q|v|down)_proj"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    base = stopping_model.model.language_model.layers[0].self_attn.q_proj.base_layer.weight
    before = base.clone()
    engine = DecodeEngine(torch.float32, use_cuda_graphs=False)
    engine.load_weights(stopping_model)
    same(*both(stopping_model, processor, engine, SamplingSettings("t2i", 6, 5.0)))
    assert torch.equal(base, before)
    with adapted.disable_adapter():
        engine.load_weights(stopping_model)
        same(*both(stopping_model, processor, engine, SamplingSettings("t2i", 6, 5.0)))


@pytest.mark.parametrize("active_first", [True, False])
def test_an_adapter_that_is_switched_off_and_on_leaves_the_base_as_it_was(
    stopping_model, processor, engine, active_first
):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(stopping_model, LoraConfig(r=4, target_modules=r".*language_model.*(q|v|down)_proj"))
    bases = [module.base_layer for module in stopping_model.modules() if hasattr(module, "base_layer")]
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    before, settings = [base.weight.clone() for base in bases], SamplingSettings("t2i", 4, 5.0)
    if active_first:
        engine.load_weights(stopping_model)
    for _ in range(2):
        with adapted.disable_adapter():
            engine.load_weights(stopping_model)
            assert engine.weights.moved or not active_first
            same(*both(stopping_model, processor, engine, settings))
        engine.load_weights(stopping_model)
        assert engine.weights.moved  # graphs are captured again
        same(*both(stopping_model, processor, engine, settings))
        active_first = True
    engine.load_weights(stopping_model)
    assert not engine.weights.moved
    assert all(torch.equal(base.weight, old) for base, old in zip(bases, before, strict=True))


def test_dora_is_merged_on_the_way(stopping_model, processor):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, use_dora=True, target_modules=r".*language_model.*(q|v|down)_proj")
    adapted = get_peft_model(stopping_model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
            if "magnitude" in name:
                parameter.mul_(1.5)
    engine = DecodeEngine(torch.float32, use_cuda_graphs=False)
    engine.load_weights(stopping_model)
    same(*both(stopping_model, processor, engine, SamplingSettings("t2i", 6, 5.0)))


def test_rows_of_a_group_share_one_prefill(stopping_model, processor, engine, monkeypatch):
    assert different_prompts(PROMPTS) == ([0, 2, 3], [0, 0, 1, 2, 0])
    assert different_prompts(PROMPTS, PICTURES) == ([0, 2, 3, 4], [0, 0, 1, 2, 3])
    wide, tall, again = (Image.new("RGB", size, "red") for size in ((20, 10), (10, 20), (20, 10)))
    assert different_prompts(["a"] * 3, [[wide], [tall], [again]]) == ([0, 1], [0, 1, 0])
    rows = []
    prefill = DecodeEngine._prefill_pass
    monkeypatch.setattr(
        DecodeEngine,
        "_prefill_pass",
        lambda self, embeds, *rest: rows.append(len(embeds)) or prefill(self, embeds, *rest),
    )
    both(stopping_model, processor, engine, SamplingSettings("t2i", 4, 5.0))
    assert rows == [3, 1]  # three prompts; one unconditional row, which is bos and pads for all


def test_engine_is_offered_to_plain_llama_only(model: JanusForInterleavedGeneration):
    assert supports(model)
    model.config.text_config.attention_bias = True
    assert not supports(model)


@pytest.mark.parametrize(("heads", "kv_heads", "fits"), [(32, 2, True), (32, 1, False), (17, 1, False)])
def test_engine_is_offered_where_a_tile_holds_the_queries_of_a_key_head(model, heads, kv_heads, fits):
    config = model.config.text_config
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = heads, kv_heads, 32
    assert supports(model) == fits
