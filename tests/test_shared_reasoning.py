"""Several images from one reasoning: one text, different codes, exact replay, advantages of both segments."""

import pytest
import torch

from janus_trl.configs import JanusGRPOConfig
from janus_trl.sampling import SamplingSettings, rollout, row_seed
from janus_trl.shared_reasoning import advantages_per_token, scored_rows
from tests.grpo import prompts_dataset, steps
from tests.rollouts import Calls, assert_replay_equals_rollout, codes_of, text_of

LENGTH = 6


def settings(images: int, **options) -> SamplingSettings:
    return SamplingSettings(max_text_length=LENGTH, image_temperature=2.0, images_per_reasoning=images, **options)


def sampled(model, processor, prompts, images, **options):
    seeds = [row_seed(1, i) for i in range(len(prompts))]
    return rollout(model, processor, prompts, settings(images, **options), seeds)


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_images_of_one_reasoning_share_its_text_and_differ_in_their_codes(model, processor, guidance_scale):
    prompts = ["q"] * 4 + ["a longer prompt"] * 4
    result = sampled(model, processor, prompts, 2, guidance_scale=guidance_scale)
    texts, codes = ([of(model, ids) for ids in result.completion_ids] for of in (text_of, codes_of))
    assert all(texts[i] == texts[i + 1] and codes[i] != codes[i + 1] for i in range(0, 8, 2))
    assert texts[0] != texts[2] and texts[4] != texts[6]  # other reasonings of the same prompt
    assert all(
        a[: len(t) + 1] == b[: len(t) + 1] for t, a, b in zip(texts[::2], result.logprobs[::2], result.logprobs[1::2])
    )
    assert [len(row) for row in (result.prompt_ids, result.images, result.env_mask)] == [8] * 3
    assert_replay_equals_rollout(model, result, guidance_scale=guidance_scale, image_temperature=2.0)


def test_the_first_image_of_a_reasoning_is_that_of_a_row_of_its_own(model, processor):
    together = sampled(model, processor, ["q"] * 4, 2, guidance_scale=2.0)
    alone = sampled(model, processor, ["q"] * 4, 1, guidance_scale=2.0)
    assert together.completion_ids[::2] == alone.completion_ids[::2]  # rows sample on streams of their own
    chunks = sampled(model, processor, ["q"] * 4, 2, guidance_scale=2.0, batch_size=2)
    assert chunks.completion_ids == together.completion_ids


def test_prompt_and_reasoning_run_once_for_all_images(model, processor):
    calls = Calls(model)
    sampled(model, processor, ["q"] * 8, 4, guidance_scale=2.0)
    rows = [shape[0] for shape in calls.shapes]
    codes = model.num_image_codes
    assert rows[-codes:] == [16] * codes  # 8 images, two streams
    assert set(rows[:-codes]) == {2}  # two reasonings: prefill, text, and prefill of the unconditional stream


@pytest.mark.parametrize(("prompts", "options", "message"), [
    (["q"] * 3, {}, "rows = 3 must be a multiple of images_per_reasoning = 2"),
    (["q", "r"], {}, "so many prompts after one another must be the same"),
    (["q"] * 4, {"batch_size": 3}, "batch_size = 3 must be a multiple of images_per_reasoning = 2"),
])  # fmt: skip
def test_rows_that_cannot_share_a_reasoning_are_refused(model, processor, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        sampled(model, processor, prompts, 2, **options)


V = 100
#                  reasoning 1: two images        reasoning 2: two images
IDS = torch.tensor([[5, 4, V, V + 1, 2, 0], [5, 4, V + 3, V, 2, 0], [7, 8, 4, V, V, 2], [7, 8, 4, V + 1, V + 1, 2]])


def test_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.7])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    text = ((rewards.view(2, 2).mean(1) - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
    found = advantages_per_token(advantages, IDS, V, 2)
    a, b, c, d = advantages.tolist()
    first, second = text
    expected = [
        [first, first, a, a, first, first], [first, first, b, b, first, first],
        [second] * 3 + [c, c] + [second], [second] * 3 + [d, d] + [second],
    ]  # fmt: skip
    torch.testing.assert_close(found, torch.tensor(expected))
    assert first == pytest.approx((0.5 - 0.55) / (rewards.std().item() + 1e-4))
    torch.testing.assert_close(advantages_per_token(advantages, IDS, V, 1), advantages.unsqueeze(1).expand(4, 6))


def test_an_image_without_reward_is_left_out_of_the_mean_of_its_reasoning():
    advantages = torch.tensor([0.8, 0.0, 0.0, 0.0])  # as TRL gives them: 0 where nothing was scored
    text = [row[0].item() for row in advantages_per_token(advantages, IDS, V, 2, torch.tensor([True, False] * 2))]
    assert text == pytest.approx([0.8, 0.8, 0.0, 0.0])
    found = advantages_per_token(advantages, IDS, V, 2, torch.tensor([True, True, False, False]))
    assert found[:, 0].tolist() == pytest.approx([0.4, 0.4, 0.0, 0.0])  # a reward that is that of the mean counts
    assert found[:, 3].tolist() == pytest.approx([0.8, 0.0, 0.0, 0.0])  # codes


def test_a_row_is_scored_if_any_reward_function_gave_it_one():
    nan = float("nan")
    rewards = torch.tensor([[1.0, nan], [nan, nan], [nan, 0.0], [nan, nan], [2.0, 3.0], [nan, 1.0]])
    assert scored_rows(rewards, 0, 3).tolist() == [True, False, True]
    assert scored_rows(rewards, 1, 3).tolist() == [False, True, True]


def by_image(generated_images, **_):
    """Rewards that differ between the images of a reasoning."""
    return [(sum(image.tobytes()) % 97) / 97 for image in generated_images]


SHARED = {
    "max_reasoning_length": LENGTH, "per_device_train_batch_size": 8, "num_generations": 4, "image_temperature": 2.0,
    "images_per_reasoning": 2,
}  # fmt: skip


@pytest.mark.parametrize("options", [
    {"num_iterations": 2, "max_steps": 2}, {"loss_type": "vespo"}, {"dynamic_sampling": True, "rollout_batch_size": 4},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
])  # fmt: skip
def test_training_gives_text_the_mean_advantage_of_its_images(trainer_of, options):
    seen = []

    def reward(completion_ids, generated_images, **_):
        values = by_image(generated_images)
        seen.append((completion_ids, values))
        return values

    trainer = trainer_of(reward, prompts_dataset(), **SHARED, **options)
    losses, compute = [], trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, *a, **k: (losses.append(inputs), compute(model, inputs, *a, **k))[1]
    trainer.train()
    ids, values = seen[0]
    rewards = torch.tensor(values).view(2, 4)
    by_row = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    by_reasoning = by_row.view(2, 2, 2).mean(2).repeat_interleave(2, 1).flatten()
    wanted = {tuple(row): pair for row, pair in zip(ids, zip(by_row.flatten(), by_reasoning, strict=True), strict=True)}
    inputs = losses[0]
    for row, mask, advantages in zip(
        inputs["completion_ids"], inputs["completion_mask"], inputs["advantages"], strict=True
    ):
        of_image, of_text = wanted[tuple(row[mask.bool()].tolist())]
        is_code = row >= trainer.model.vocab_size
        torch.testing.assert_close(advantages[is_code], of_image.expand(16), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(advantages[~is_code], of_text.expand((~is_code).sum()), atol=1e-4, rtol=1e-4)
    assert all(log["logps/drift_max"] < 1e-5 and log["grad_norm"] > 0 for log in steps(trainer))


# Two groups of two reasonings with two images: of the first group only one image is scored, of the second one is not.
MISSING = [0.9, None, None, None, None, 0.3, 0.1, 0.2]
STD = torch.tensor([0.3, 0.1, 0.2]).std().item() + 1e-4


@pytest.mark.parametrize(("options", "scale"), [
    ({}, STD), ({"scale_rewards": "none", "beta": 0.1}, 1.0), ({"dynamic_sampling": True}, STD),
])  # fmt: skip
def test_rewards_that_are_missing_do_not_count_as_zero(trainer_of, options, scale):
    calls, losses = [], []

    def reward(completion_ids, **_):
        calls.append(completion_ids)
        return MISSING if len(calls) == 1 else MISSING[4:]  # a group without spread is sampled again

    prompts = prompts_dataset(["q", "r", "s"])
    trainer = trainer_of(reward, prompts, **SHARED, **options, temperature=3.0)
    compute = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, *a, **k: (losses.append(inputs), compute(model, inputs, *a, **k))[1]
    trainer.train()
    ids = [*calls[1], *calls[0][4:]] if "dynamic_sampling" in options else calls[0]
    codes, texts = [0.0, 0.1 / scale, -0.1 / scale, 0.0], [0.1 / scale, 0.1 / scale, -0.05 / scale, -0.05 / scale]
    first = (codes, texts) if "dynamic_sampling" in options else ([0.0] * 4, [0.0] * 4)
    wanted = dict(zip(map(tuple, ids), zip(first[0] + codes, first[1] + texts, strict=True), strict=True))
    assert len(wanted) == 8 and len(calls) == 1 + ("dynamic_sampling" in options)
    for row, mask, advantages in zip(
        losses[0]["completion_ids"], losses[0]["completion_mask"], losses[0]["advantages"], strict=True
    ):
        kept = mask.bool()
        of_image, of_text = torch.tensor(wanted[tuple(row[kept].tolist())])
        expected = torch.where(row >= trainer.model.vocab_size, of_image, of_text)
        torch.testing.assert_close(advantages[kept], expected[kept], atol=1e-4, rtol=1e-4)
    assert steps(trainer)[0]["grad_norm"] > 0


def test_before_an_update_the_gradient_is_that_of_the_advantage_of_each_row(trainer_of, monkeypatch):
    norms = []
    for _ in range(2):
        trainer = trainer_of(by_image, prompts_dataset(), loss_type="dapo", **SHARED)
        trainer.train()
        norms.append(steps(trainer)[0]["grad_norm"])
        rows = "janus_trl.grpo_trainer.advantages_per_token"
        monkeypatch.setattr(rows, lambda advantages, *_: advantages)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0


def test_evaluation_samples_a_reasoning_for_every_row(trainer_of):
    trainer = trainer_of(by_image, prompts_dataset(), eval_dataset=prompts_dataset(["q", "r", "s"]), **SHARED)
    assert trainer.sampling_settings("eval").images_per_reasoning == 1
    trainer.evaluate()
    assert len(trainer.eval_rewards()) == 3


@pytest.mark.parametrize(("options", "message"), [
    ({"images_per_reasoning": 0}, "images_per_reasoning = 0 must be >= 1"),
    ({"task": "i2t"}, "needs a reasoning before an image, but task = 'i2t'"),
    ({"max_reasoning_length": 0}, "but max_reasoning_length = 0"),
    ({"images_per_reasoning": 3}, "must divide num_generations = 4 .* Set num_generations: 6"),
    ({"images_per_reasoning": 4}, "into at least 2 reasonings.* Set num_generations: 8"),
    ({"rollout_batch_size": 3}, "rollout_batch_size = 3 must be a multiple .* Set rollout_batch_size: 4"),
    ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 5, "num_generations": 4,
      "generation_batch_size": 4, "images_per_reasoning": 2, "world": 4}, "must divide the 1 completions"),
    ({"dynamic_sampling_max_rounds": 0}, "dynamic_sampling_max_rounds = 0 must be >= 1"),
])  # fmt: skip
def test_bad_values_are_refused(options, message):
    world = options.pop("world", 1)
    with pytest.raises(ValueError, match=message):
        config = JanusGRPOConfig(**{"output_dir": "x", "report_to": "none", **SHARED, **options})
        if world > 1:  # what the check sees on one of several processes
            from janus_trl.sampling_checks import check_rows_of_a_process

            config.steps_per_generation = 1
            check_rows_of_a_process(config)
