"""GRPO batches: pictures stay with their rows, several updates and several rollouts in a step."""

import math
import re

import pytest

from tests.grpo import COLORS, ascending, pictures_dataset, prompts_dataset, steps


def record_scored_batches(trainer, batches: list) -> None:
    """Keep the ids and pictures of every scoring forward."""
    forward = type(trainer.model).forward

    def recorded(self, *args, **kwargs):
        if kwargs.get("fused_lm_head"):
            batches.append((kwargs["input_ids"], kwargs.get("pixel_values")))
        return forward(self, *args, **kwargs)

    trainer.model.forward = recorded.__get__(trainer.model)


@pytest.mark.parametrize("steps_per_generation", [1, 2])
def test_every_micro_batch_gets_its_own_pictures(trainer_of, processor, steps_per_generation):
    trainer = trainer_of(
        task="i2t", steps_per_generation=steps_per_generation, gradient_accumulation_steps=2, num_generations=2,
        max_steps=2, shuffle_dataset=False,
    )  # fmt: skip
    batches: list = []
    record_scored_batches(trainer, batches)
    trainer.train()
    seen, sizes = set(), []
    for ids, pixels in batches:
        colors = []
        for row in ids.tolist():
            text = "".join(processor.tokenizer.convert_ids_to_tokens(row))
            (name,) = re.findall(r"([abcd])\n\n<\|Assistant", text)
            count = text.count("<image_placeholder>") // 16
            assert count == dict(zip(COLORS, (1, 2, 0, 3), strict=True))[name]
            colors += [COLORS[name]] * count
            seen.add(name)
        means = [] if pixels is None else ((pixels.mean((2, 3)) + 1) * 127.5).round().int().tolist()
        assert means == [list(color) for color in colors]
        sizes.append(len(ids))
    assert seen == set(COLORS) and set(sizes) == {4}
    assert all(log["logps/drift_max"] < 1e-5 for log in steps(trainer))


def test_a_batch_without_any_picture_still_runs_the_vision_tower(trainer_of):
    trainer = trainer_of(task="i2t", dataset=pictures_dataset((0, 0, 0, 0)))
    calls = []
    trainer.model.model.vision_model.register_forward_hook(lambda *_: calls.append(1))
    trainer.train()
    assert len(calls) == 2 and math.isfinite(steps(trainer)[0]["grad_norm"])  # rollout and replay


def test_prompts_of_unequal_length_train_together(trainer_of):
    trainer = trainer_of(dataset=prompts_dataset(["q", "qq", "qqq", "qqqq"]), num_generations=2, max_steps=2)
    trainer.train()
    assert all(log["logps/drift_max"] < 1e-5 for log in steps(trainer))


@pytest.mark.parametrize("settings", [
    {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "num_iterations": 2},
    {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2},
])  # fmt: skip
def test_several_updates_on_one_rollout(trainer_of, settings):
    calls = []

    def reward(completion_ids, **_):
        calls.append(completion_ids)
        return ascending(completion_ids)

    trainer = trainer_of(reward, max_steps=8 // settings["gradient_accumulation_steps"], num_generations=4, **settings)
    trainer.train()
    assert len(calls) == 2 and all(len(call) == 8 for call in calls)
    assert calls[0] != calls[1]
    logs = steps(trainer)
    assert all(log["logps/drift_max"] < 1e-5 for log in logs)  # against the policy of the rollout
    assert all(math.isfinite(log["grad_norm"]) for log in logs)


def test_generation_batches_within_a_step_are_not_repeated(trainer_of):
    calls = []

    def reward(completion_ids, **_):
        calls.append(completion_ids)
        return ascending(completion_ids)

    trainer = trainer_of(
        reward, prompts_dataset(["q"] * 4), gradient_accumulation_steps=2, steps_per_generation=1,
        max_reasoning_length=4, max_steps=2, learning_rate=0.0,
    )  # fmt: skip
    trainer.train()
    rows = [tuple(ids) for call in calls for ids in call]
    assert len(rows) == 16 and len(set(rows)) == 16
