"""Resumed GRPO runs equal straight ones, and checkpoints are stock Janus."""

import pytest
import torch
from transformers import JanusForConditionalGeneration

from janus_trl.modeling import bind_special_ids
from tests.grpo import PROMPTS, ascending, lora, prompts_dataset, steps, weights


def codes_reward(completion_ids, **_):
    return [ids.count(111) + 0.1 * ids.count(115) for ids in completion_ids]


RESUME = {
    "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_reasoning_length": 2, "image_temperature": 2.0
}  # fmt: skip


@pytest.mark.parametrize("settings", [
    {"peft": True}, {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
    {"gradient_accumulation_steps": 2, "num_iterations": 2, "num_generations": 8},
])  # fmt: skip
def test_a_resumed_run_equals_a_straight_one(trainer_of, tmp_path, settings):
    settings = {**RESUME, **settings}
    runs = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        peft = lora() if "peft" in settings else None
        dataset = prompts_dataset([*PROMPTS, "five", "six", "seven", "eight"])  # four steps are within one epoch
        trainer = trainer_of(codes_reward, dataset, **{**settings, "peft": peft})
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append(trainer)
    a, b = (steps(trainer) for trainer in runs)
    assert [log["step"] for log in b] == [1, 2, 3, 4]
    for x, y in zip(a[2:], b[2:], strict=True):
        assert x.get("reward") == y.get("reward") and x["grad_norm"] == pytest.approx(y["grad_norm"], rel=1e-5)
    for name, p in weights(runs[0]).items():
        torch.testing.assert_close(p, weights(runs[1])[name])


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_run_resumed_in_a_later_epoch_sees_the_prompts_of_a_straight_one(trainer_of, tmp_path, iterations):
    orders, save_steps = [], 5 * iterations
    for checkpoint in (None, str(tmp_path / f"checkpoint-{save_steps}")):
        orders.append([])

        def reward(prompts, completions, **_):
            orders[-1].append(prompts[0])
            return ascending(completions)

        settings = {"max_steps": 8 * iterations, "save_steps": save_steps, "num_iterations": iterations}
        trainer = trainer_of(reward, **{**RESUME, **settings, "max_reasoning_length": 0})
        trainer.train(resume_from_checkpoint=checkpoint)
    assert orders[1] == orders[0][5:]
    assert orders[0][:4] != orders[0][4:]  # every epoch has its own order
    assert sorted(orders[0][:4]) == sorted(orders[0][4:]) == sorted(PROMPTS)


def test_a_checkpoint_is_stock_janus(trainer_of, tmp_path):
    trainer = trainer_of(save_strategy="steps", save_steps=1)
    trainer.train()
    stock = JanusForConditionalGeneration.from_pretrained(str(tmp_path / "checkpoint-1"), dtype=torch.float32)
    state = trainer.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in stock.state_dict().items())
    assert "JanusForInterleaved" not in (tmp_path / "checkpoint-1" / "config.json").read_text()


def test_special_ids_are_bound_to_policy_and_reference(trainer_of, model, processor):
    bind_special_ids(model, processor)
    trainer = trainer_of(beta=0.04)
    assert trainer.model.special_ids == trainer.ref_model.special_ids == model.special_ids
