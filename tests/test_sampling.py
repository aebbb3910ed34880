"""Rollouts: replay, independence of the batch, protocol and cost."""

import math

import pytest
import torch
from PIL import Image
from transformers import JanusForConditionalGeneration

from janus_trl.sampling import (
    SamplingSettings,
    encode_prompts,
    rollout,
    row_seed,
    row_uniforms,
)
from tests.rollouts import PROMPTS, SEEDS, Calls, assert_replay_equals_rollout, codes_of, favour, text_of

# ---- rollout and replay ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 6])
@pytest.mark.parametrize(("scale", "logp_guidance"), [(1.0, "guided"), (5.0, "guided"), (5.0, "conditional")])
def test_log_probs_of_the_rollout_equal_the_replay(model, processor, length, scale, logp_guidance):
    settings = {"temperature": 0.7, "image_temperature": 1.3}
    result = rollout(
        model, processor, PROMPTS,
        SamplingSettings(max_text_length=length, guidance_scale=scale, logp_guidance=logp_guidance, **settings), SEEDS,
    )  # fmt: skip
    assert len({len(p) for p in result.prompt_ids}) == 3
    assert_replay_equals_rollout(model, result, guidance_scale=scale, logp_guidance=logp_guidance, **settings)


def test_logp_guidance_does_not_change_what_is_sampled(model, processor):
    results = [
        rollout(model, processor, PROMPTS, SamplingSettings(guidance_scale=5.0, logp_guidance=kind), SEEDS)
        for kind in ("guided", "conditional")
    ]
    assert results[0].completion_ids == results[1].completion_ids
    assert results[0].logprobs != results[1].logprobs


@pytest.mark.parametrize("ending", ["eos", "begin_of_image"])
def test_rows_that_stop_at_different_lengths_replay_equally(model, processor, ending):
    special = model.special_ids
    token = special.eos[0] if ending == "eos" else special.begin_of_image
    favour(model, token, 4.0)
    prompts, seeds = PROMPTS * 3, list(range(9))
    result = rollout(model, processor, prompts, SamplingSettings(max_text_length=8, guidance_scale=5.0), seeds)
    lengths = {len(text_of(model, ids)) for ids in result.completion_ids}
    assert len(lengths) > 3
    assert_replay_equals_rollout(model, result, guidance_scale=5.0)


@pytest.mark.parametrize("counts", [(0, 1, 2), (0, 0, 0)])
def test_answers_about_no_one_and_two_pictures_replay_equally(model, processor, counts):
    colors = iter(["red", "blue", "lime"])
    images = [[Image.new("RGB", (16, 16), next(colors)) for _ in range(count)] for count in counts]
    settings = SamplingSettings(task="i2t", max_text_length=7, temperature=0.7)
    favour(model, model.special_ids.eos[0], 3.0)
    result = rollout(model, processor, PROMPTS * 2, settings, list(range(6)), images=images * 2)
    pixels = encode_prompts(processor, PROMPTS * 2, images * 2)["pixel_values"]
    assert (pixels is None) == (sum(counts) == 0)
    assert_replay_equals_rollout(model, result, temperature=0.7, pixel_values=pixels)
    placeholders = [p.count(model.special_ids.image_placeholder) for p in result.prompt_ids[:3]]
    assert placeholders == [16 * count for count in counts]
    assert len({len(c) for c in result.completion_ids}) > 1 and not result.images
    assert all(set(mask) == {1} for mask in result.env_mask)
    special = model.special_ids
    for ids in result.completion_ids:  # ends with eos, or at the limit
        assert special.eos[0] not in ids[:-1] and (ids[-1] == special.eos[0] or len(ids) == 7)


def test_conversations_and_user_texts_are_the_same_prompt(processor):
    image = Image.new("RGB", (16, 16), "red")
    parts = [{"type": "image", "image": image, "text": None}, {"type": "text", "text": "hi", "image": None}]
    talk = encode_prompts(processor, [[{"role": "user", "content": parts}]])
    text = encode_prompts(processor, ["hi"], [[image]])
    assert torch.equal(talk["input_ids"], text["input_ids"])
    assert torch.equal(talk["pixel_values"], text["pixel_values"])
    plain = encode_prompts(processor, [[{"role": "user", "content": "hi"}]])
    assert torch.equal(plain["input_ids"], encode_prompts(processor, ["hi"])["input_ids"])
    assert text["num_images"] == [1] and plain["num_images"] == [0]


# ---- independence of the batch --------------------------------------------------------------------------------------


def test_a_prompt_alone_and_in_a_batch_gives_the_same_greedy_codes(model, processor):
    settings = SamplingSettings(guidance_scale=5.0, greedy=True)
    together = rollout(model, processor, PROMPTS, settings, SEEDS)
    for row, prompt in enumerate(PROMPTS):
        alone = rollout(model, processor, [prompt], settings, SEEDS[:1])
        assert alone.completion_ids[0] == together.completion_ids[row]


@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_greedy_codes_equal_those_of_transformers(model, processor, janus_folder, prompt):
    stock = JanusForConditionalGeneration.from_pretrained(janus_folder, dtype=torch.float32).eval()
    conversation = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    text = processor.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=text, generation_mode="image", return_tensors="pt")
    theirs = stock.generate(**inputs, generation_mode="image", do_sample=False, guidance_scale=5)
    ours = rollout(model, processor, [prompt], SamplingSettings(guidance_scale=5.0, greedy=True), [0])
    assert codes_of(model, ours.completion_ids[0]) == theirs[0, -model.num_image_codes :].tolist()


@pytest.mark.parametrize("task", ["t2i", "i2t"])
def test_chunking_changes_nothing(model, processor, task):
    favour(model, model.special_ids.eos[0], 2.0)
    results = [
        rollout(
            model, processor, PROMPTS,
            SamplingSettings(task=task, max_text_length=5, guidance_scale=2.0, batch_size=size), SEEDS,
        )
        for size in (None, 1, 2)
    ]  # fmt: skip
    for other in results[1:]:
        assert other.completion_ids == results[0].completion_ids
        assert other.env_mask == results[0].env_mask
        for a, b in zip(other.logprobs, results[0].logprobs, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-5, rtol=0)


def test_a_row_depends_on_its_seed_alone(model, processor):
    settings = SamplingSettings(max_text_length=4, image_temperature=3.0)
    first = rollout(model, processor, ["q"] * 4, settings, [1, 2, 3, 4])
    again = rollout(model, processor, ["q"] * 4, settings, [4, 3, 2, 1])
    assert again.completion_ids == first.completion_ids[::-1]
    assert len({tuple(codes_of(model, ids)) for ids in first.completion_ids}) == 4
    same = rollout(model, processor, ["q"] * 2, settings, [5, 5])
    assert same.completion_ids[0] == same.completion_ids[1]


def test_sampling_does_not_touch_the_global_random_state(model, processor):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first = rollout(model, processor, ["q"], SamplingSettings(), [1])
    assert torch.equal(torch.rand(1), expected)
    assert rollout(model, processor, ["q"], SamplingSettings(), [1]).completion_ids == first.completion_ids


def test_codes_do_not_depend_on_where_the_text_of_other_rows_stops(model, processor):
    """Text and image draw from their own stretch of the stream, whatever the number of text steps."""
    uniforms = row_uniforms([1, 2], 6)
    assert torch.equal(uniforms[:1], row_uniforms([1], 6)) and not torch.equal(uniforms[0], uniforms[1])
    assert torch.equal(row_uniforms([1], 4), uniforms[:1, :4])
    assert row_uniforms([], 5).shape == (0, 5)


def test_row_seeds_are_fixed_and_differ_in_every_part():
    assert row_seed(0, "train", 1, 0, 2) == row_seed(0, "train", 1, 0, 2)
    seeds = {row_seed(s, mode, t, 0, r) for s in (0, 1) for mode in ("train", "eval") for t in range(3) for r in (0, 1)}
    assert len(seeds) == 24 and all(0 <= seed < 2**63 for seed in seeds)
    assert row_seed(1, 23) != row_seed(12, 3)


# ---- cost -----------------------------------------------------------------------------------------------------------


def test_number_of_forwards_is_prefill_and_text_and_codes_per_batch(model, processor):
    calls, n = Calls(model), model.num_image_codes
    rollout(model, processor, PROMPTS, SamplingSettings(max_text_length=4, guidance_scale=1.0), SEEDS)
    assert len(calls.shapes) == 1 + 4 + n
    assert {rows for rows, _ in calls.shapes} == {3}  # no unconditional stream
    calls.shapes.clear()
    rollout(model, processor, PROMPTS, SamplingSettings(max_text_length=4, guidance_scale=5.0), SEEDS)
    assert len(calls.shapes) == 1 + 4 + 1 + n  # one prefill for each stream
    assert [rows for rows, _ in calls.shapes] == [3] * 6 + [6] * n
    assert all(length == 1 for _, length in calls.shapes[6:])
    calls.shapes.clear()
    rollout(model, processor, PROMPTS, SamplingSettings(guidance_scale=5.0, batch_size=2), SEEDS)
    assert len(calls.shapes) == 2 * (2 + n)


def test_text_stops_when_every_row_has_stopped(model, processor):
    favour(model, model.special_ids.begin_of_image, 50.0)
    calls = Calls(model)
    result = rollout(model, processor, PROMPTS, SamplingSettings(max_text_length=100), SEEDS)
    assert len(calls.shapes) == 1 + model.num_image_codes  # `<begin_of_image>` is fed with the image
    assert [len(text_of(model, ids)) for ids in result.completion_ids] == [0, 0, 0]


def test_a_rank_goes_on_as_long_as_any_rank_does(model, processor):
    favour(model, model.special_ids.begin_of_image, 50.0)
    alone = rollout(model, processor, PROMPTS, SamplingSettings(max_text_length=6, guidance_scale=2.0), SEEDS)
    calls, others = Calls(model), iter([True] * 7)  # another rank stops after its fourth forward
    waiting = rollout(
        model, processor, PROMPTS, SamplingSettings(max_text_length=6, guidance_scale=2.0), SEEDS,
        any_rank=lambda flag: flag or next(others, False),
    )  # fmt: skip
    assert len(calls.shapes) == 1 + 4 + 1 + model.num_image_codes
    assert waiting.completion_ids == alone.completion_ids
    assert_replay_equals_rollout(model, waiting, guidance_scale=2.0)


# ---- protocol -------------------------------------------------------------------------------------------------------


def test_without_reasoning_the_image_opens_at_once(model, processor):
    special, n = model.special_ids, model.num_image_codes
    result = rollout(model, processor, PROMPTS, SamplingSettings(max_text_length=0), SEEDS)
    for ids, mask, logps in zip(result.completion_ids, result.env_mask, result.logprobs, strict=True):
        assert ids[0] == special.begin_of_image and ids[-2:] == [special.end_of_image, special.eos[0]]
        assert len(codes_of(model, ids)) == n == len(ids) - 3
        assert mask == [0] + [1] * n + [0, 0]
        assert logps[0] == 0 and logps[-2:] == [0, 0] and all(lp < 0 for lp in logps[1:-2])


def test_a_forced_begin_of_image_is_not_trained_and_a_sampled_one_is(model, processor):
    special = model.special_ids
    result = rollout(model, processor, PROMPTS, SamplingSettings(max_text_length=3), SEEDS)
    for ids, mask in zip(result.completion_ids, result.env_mask, strict=True):
        at = ids.index(special.begin_of_image)
        assert mask[at] == (1 if at < 3 else 0) and mask[:at] == [1] * at
    favour(model, special.begin_of_image, 50.0)
    result = rollout(model, processor, PROMPTS, SamplingSettings(max_text_length=3), SEEDS)
    for ids, mask, logps in zip(result.completion_ids, result.env_mask, result.logprobs, strict=True):
        assert ids.count(special.begin_of_image) == 1 and ids[0] == special.begin_of_image
        assert mask[0] == 1 and logps[0] == pytest.approx(0, abs=1e-6)


def test_a_sampled_eos_is_trained_and_followed_by_a_forced_image(model, processor):
    special, n = model.special_ids, model.num_image_codes
    favour(model, special.eos[0], 50.0)
    result = rollout(model, processor, PROMPTS, SamplingSettings(max_text_length=3), SEEDS)
    for ids, mask in zip(result.completion_ids, result.env_mask, strict=True):
        assert ids[:2] == [special.eos[0], special.begin_of_image]
        assert mask == [1, 0] + [1] * n + [0, 0] and ids[-1] == special.eos[0]


def test_reasoning_precedes_the_image_in_the_unconditional_stream_as_padding(model, processor):
    """The text of a row reaches its codes through the conditional stream only."""
    seen = []
    original = model.unconditional_ids
    model.unconditional_ids = lambda ids: seen.append(original(ids)) or seen[-1]
    rollout(model, processor, ["abc"], SamplingSettings(max_text_length=4, guidance_scale=5.0), [1])
    assert set(seen[0][0].tolist()) == {model.special_ids.bos, model.special_ids.pad}


# ---- overflow -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["text", "image"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_not_finite_end_the_rollout_with_their_cause(model, processor, part, value):
    head = model.lm_head if part == "text" else model.model.generation_head.vision_head
    with torch.no_grad():
        head.weight[3] = value
    with pytest.raises(
        FloatingPointError, match=r"non-finite log-probabilities \(rows \[0, 1, 2\] of 3\).*learning_rate"
    ):
        rollout(model, processor, PROMPTS, SamplingSettings(max_text_length=2), SEEDS)


def test_all_ranks_end_when_the_scores_of_one_are_not_finite(model, processor):
    asked = []

    def other_rank_fails(flag):
        asked.append(flag)
        return True

    with pytest.raises(FloatingPointError, match="rows of another rank"):
        rollout(
            model, processor, PROMPTS, SamplingSettings(batch_size=1), SEEDS, any_rank_fails=other_rank_fails
        )  # fmt: skip
    assert asked == [False]  # once, whatever the number of chunks: ranks may differ in it
