"""Rewards in GRPO: what they are given, rows without one, and what stops a run."""

import math

import pytest
import torch

from tests.grpo import PROMPTS, ascending, prompts_dataset, steps, weights


def test_rewards_get_prompts_completions_columns_and_pictures(trainer_of, processor):
    seen = {}

    def reward(prompts, completions, completion_ids, generated_images, tag, **_):
        seen.update(locals())
        return [0.0, 1.0] * 2

    dataset = prompts_dataset().add_column("tag", ["t1", "t2", "t3", "t4"])
    trainer_of(reward, dataset, max_reasoning_length=2).train()
    (index,) = {PROMPTS.index(p) for p in seen["prompts"]}
    assert seen["tag"] == [f"t{index + 1}"] * 4
    assert [(p.mode, p.size) for p in seen["generated_images"]] == [("RGB", (16, 16))] * 4
    reasoning = [
        ids[: ids.index(processor.tokenizer.convert_tokens_to_ids("<begin_of_image>"))]
        for ids in seen["completion_ids"]
    ]
    assert seen["completions"] == processor.batch_decode(reasoning, skip_special_tokens=True)


def test_rows_without_reward_leave_their_group_and_the_policy_alone(trainer_of):
    values = iter([[None, 1.0, 0.0, 2.0]])
    trainer = trainer_of(lambda completions, **_: next(values), num_generations=2)
    trainer.train()
    advantages = list(trainer._logs["advantages"])
    assert advantages[:2] == [0.0, 0.0]
    assert advantages[2] < -0.5 and advantages[3] > 0.5
    assert steps(trainer)[0]["reward"] == pytest.approx(1.0) and steps(trainer)[0]["grad_norm"] > 0


def test_a_group_without_any_reward_gives_no_gradient(trainer_of):
    trainer = trainer_of(lambda completions, **_: [None] * len(completions))
    before = weights(trainer)
    trainer.train()
    assert steps(trainer)[0]["grad_norm"] == 0
    assert all(torch.equal(p, before[name]) for name, p in weights(trainer).items())


def test_weights_of_rewards_are_applied(trainer_of):
    def ones(completions, **_):
        return [1.0] * len(completions)

    trainer = trainer_of([ascending, ones], reward_weights=[2.0, 0.5])
    trainer.train()
    assert steps(trainer)[0]["reward"] == pytest.approx(2 * 0.25 + 0.5)
    assert steps(trainer)[0]["rewards/ascending/mean"] == pytest.approx(0.25)


def test_a_reward_with_the_wrong_number_of_values_is_refused(trainer_of):
    def short(completions, **_):
        return [1.0]

    with pytest.raises(ValueError, match=r"'short' returned 1 rewards, but 4 were expected"):
        trainer_of(short).train()


def test_an_exception_in_a_reward_stops_the_run_and_names_the_reward(trainer_of):
    def broken(completions, **_):
        raise KeyError("gold")

    trainer = trainer_of([ascending, broken])
    before = weights(trainer)
    with pytest.raises(RuntimeError, match=r"reward 'broken' failed on rank 0: KeyError: 'gold'") as error:
        trainer.train()
    assert isinstance(error.value.__cause__, KeyError)
    assert all(torch.equal(p, before[name]) for name, p in weights(trainer).items())


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_non_finite_gradient_stops_before_the_update(trainer_of, value):
    trainer = trainer_of()
    trainer.model.lm_head.weight.register_hook(lambda gradient: gradient + value)
    before = weights(trainer)
    with pytest.raises(FloatingPointError, match=r"Gradient norm (inf|nan) at step 1: .*learning_rate \(0.01\)"):
        trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in weights(trainer).items())


@pytest.mark.parametrize("part", ["text", "image"])
def test_weights_that_are_not_finite_stop_the_rollout_with_a_message(trainer_of, part):
    trainer = trainer_of(max_reasoning_length=2)
    head = trainer.model.lm_head if part == "text" else trainer.model.model.generation_head.vision_head
    with torch.no_grad():
        head.weight[3] = math.nan
    with pytest.raises(FloatingPointError):
        trainer.train()
