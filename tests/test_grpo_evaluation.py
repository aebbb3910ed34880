"""Evaluation and samples of held-out rows in GRPO: every row once, and repeatable."""

import pytest
import torch

from janus_trl.scripts.run import closing_line
from tests.grpo import COLORS, PROMPTS, pictures_dataset, prompts_dataset, steps


@pytest.mark.parametrize("task", ["t2i", "i2t"])
def test_evaluation_counts_every_row_once_and_repeats(trainer_of, task):
    def by_row(completions, value, **_):
        return value

    held_out = pictures_dataset() if task == "i2t" else prompts_dataset()
    held_out = held_out.add_column("value", [1.0, 2.0, 3.0, 10.0])
    train = held_out
    trainer = trainer_of(
        by_row, train, eval_dataset=held_out, task=task, per_device_eval_batch_size=3, learning_rate=0.0
    )
    first = trainer.evaluate()
    assert first["eval_reward"] == pytest.approx(4.0)  # batches of 3 and 1: a mean of means would be 6
    assert trainer.eval_rewards() == {0: 1.0, 1: 2.0, 2: 3.0, 3: 10.0}
    assert first["eval_reward_standard_error"] == pytest.approx(torch.tensor([1.0, 2, 3, 10]).std().item() / 2)


def test_evaluation_repeats_exactly_and_ignores_what_was_trained_between(trainer_of):
    seen = []

    def reward(completion_ids, **_):
        seen.append(completion_ids)
        return [ids.count(111) / 16 for ids in completion_ids]

    trainer = trainer_of(
        reward, eval_dataset=prompts_dataset([*PROMPTS, "five"]), per_device_eval_batch_size=5, learning_rate=0.0,
        eval_guidance_scale=1.0, image_temperature=2.0, max_steps=2,
    )  # fmt: skip
    first = trainer.evaluate()
    rows = [tuple(ids) for ids in seen[0]]
    assert len(rows) == len(set(rows)) == 5
    trainer.train()
    seen.clear()
    second = trainer.evaluate()
    assert [tuple(ids) for ids in seen[0]] == rows
    for name in ("eval_reward", "eval_logps/drift_max"):
        assert first[name] == second[name]
    assert first["eval_logps/drift_max"] < 1e-5  # scored at eval_guidance_scale too


def test_evaluation_leaves_out_rows_without_reward(trainer_of):
    trainer = trainer_of(lambda completions, **_: [None, 1.0, 2.0, 3.0], eval_dataset=prompts_dataset())
    assert trainer.evaluate()["eval_reward"] == pytest.approx(2.0)  # as TRL's own mean does in training
    assert len(trainer.eval_rewards()) == 3 and trainer.evaluations == [(0, trainer.eval_rewards())]


def test_evaluation_with_several_completions_averages_them(trainer_of):
    def ascending_rows(completions, **_):
        return [float(i) for i in range(len(completions))]

    trainer = trainer_of(ascending_rows, eval_dataset=prompts_dataset(), num_generations_eval=2)
    assert trainer.evaluate()["eval_reward"] == pytest.approx(3.5)


async def awaited(completions, **_):
    return [0.5] * len(completions)


def of_conversations(prompts, completions, trainer_state, log_metric, **_):
    assert prompts[0][-1]["role"] == "user"
    return [0.5 * (message[0]["role"] == "assistant") for message in completions]


@pytest.mark.parametrize(("reward", "task"), [(awaited, "t2i"), (of_conversations, "i2t")])
def test_sample_rows_are_scored_by_every_reward_that_training_accepts(trainer_of, reward, task):
    held_out = pictures_dataset() if task == "i2t" else prompts_dataset()
    trainer = trainer_of(reward, eval_dataset=held_out, task=task)
    trainer.train()
    assert steps(trainer)[0]["reward"] == 0.5
    assert [row["reward"] for row in trainer.sample_rows(2)] == [0.5, 0.5]


def test_sample_rows_get_pictures_weights_and_state_and_leave_no_trace_in_the_metrics(trainer_of):
    seen = {}

    def first(generated_images, trainer_state, log_metric, log_extra, tag, **_):
        seen.update(pictures=[p.size for p in generated_images], step=trainer_state.global_step, tag=tag)
        log_metric("mine", 1.0)
        log_extra("column", tag)
        return [1.0, None]

    def second(completions, **_):
        return [10.0, 20.0]

    held_out = prompts_dataset().add_column("tag", ["t1", "t2", "t3", "t4"])
    trainer = trainer_of([first, second], held_out, eval_dataset=held_out, reward_weights=[2.0, 0.5])
    assert [row["reward"] for row in trainer.sample_rows(2)] == [2 * 1.0 + 0.5 * 10.0, 0.5 * 20.0]
    assert seen == {"pictures": [(16, 16)] * 2, "step": 0, "tag": ["t1", "t2"]}
    assert not trainer._pending_metrics and not trainer._pending_extra_logs and not trainer._eval_rewards


def test_a_reward_that_fails_on_samples_stops_the_run(trainer_of):
    def broken(completions, **_):
        raise KeyError("gold")

    with pytest.raises(RuntimeError, match=r"reward 'broken' failed on rank 0, row 0 \(prompt 'q'\): KeyError: 'gold'"):
        trainer_of(broken, eval_dataset=prompts_dataset()).sample_rows(2)


@pytest.mark.parametrize("task", ["t2i", "i2t"])
def test_sample_rows_are_the_first_held_out_rows_and_repeat(trainer_of, task):
    held_out = pictures_dataset() if task == "i2t" else prompts_dataset()
    trainer = trainer_of(eval_dataset=held_out, task=task, max_reasoning_length=2)
    trainer.model.train()
    first, again = trainer.sample_rows(3), trainer.sample_rows(3)
    assert [row["prompt"] for row in first] == held_out["prompt"][:3]
    assert [row["reasoning"] for row in first] == [row["reasoning"] for row in again]
    assert [row["reward"] for row in first] == pytest.approx([0.1, 0.2, 0.3])
    if task == "t2i":
        assert [row["image"].tobytes() for row in first] == [row["image"].tobytes() for row in again]
    else:
        assert [row["image"] and row["image"].getpixel((0, 0)) for row in first] == [COLORS["a"], COLORS["b"], None]
    assert trainer.model.training and trainer.sample_rows(0) == []


def test_the_closing_line_is_about_rows_that_have_a_reward_at_both_ends():
    assert closing_line([(0, {0: 0.1, 1: 0.5}), (4, {1: 0.7, 2: 0.9})], "out").startswith(
        "Held-out reward on 1 rows: 0.500 at step 0, 0.700 at step 4 (+0.200"
    )
    none = closing_line([(0, {0: 0.1}), (4, {1: 0.7})], "out")
    assert none == "Done. No held-out row has a reward at both steps 0 and 4. Output: out"
