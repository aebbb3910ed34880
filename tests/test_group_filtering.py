"""Dynamic sampling: flat groups are replaced, the rest is left as it was."""

import logging
import re

import pytest
import torch

from janus_trl.group_filtering import candidate_groups, flat_groups, join_rows, split_rows, total_rewards
from tests.grpo import COLORS, pictures_dataset, prompts_dataset, steps

NAN = float("nan")
LETTERS = [chr(ord("a") + i) for i in range(16)]


@pytest.mark.parametrize(("group", "flat"), [
    ([0.0, 0.0, 0.0, 0.0], True),
    ([0.1, 0.1, 0.1, 0.1 + 1e-9], True),
    ([1e-8, 2e-8, 1e-8, 1e-8], False),  # small is not flat
    ([0.0, 0.0, 0.0, 1.0], False),
    ([NAN, 1.0, 1.0, 1.0], True),
    ([NAN, NAN, NAN, 1.0], True),  # nothing to compare with
    ([NAN, NAN, 0.0, 1.0], False),
    ([NAN, NAN, NAN, NAN], True),
    ([1000.0, 1000.0, 1000.0, 1000.1], False),
])  # fmt: skip
def test_a_group_is_flat_without_two_scored_rows_that_differ(group, flat):
    spread = [0.0, 1.0, 2.0, 3.0]
    values = torch.tensor([*spread, *group]).unsqueeze(1)
    assert flat_groups(values, 4).tolist() == [False, flat]


def test_the_total_is_unscored_only_where_no_reward_scored():
    rewards = torch.tensor([[1.0, NAN], [NAN, NAN], [2.0, 3.0]])
    assert total_rewards(rewards, torch.tensor([1.0, 2.0]))[[0, 2]].tolist() == [1.0, 8.0]
    assert total_rewards(rewards, torch.tensor([1.0, 2.0])).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(("needed", "group", "processes", "images", "expected"), [
    (3, 4, 1, 1, 3), (1, 4, 2, 1, 1), (1, 8, 16, 1, 2), (3, 3, 2, 1, 4), (1, 4, 2, 2, 1), (1, 4, 4, 2, 2),
])  # fmt: skip
def test_candidates_are_shared_evenly(needed, group, processes, images, expected):
    count = candidate_groups(needed, group, processes, images)
    assert count == expected and count * group % (processes * images) == 0


def test_rows_split_and_join_to_the_same_batch_and_pad_to_the_longest():
    def batch(width, length, pictures):
        rows = len(pictures)
        out = {
            "prompt_ids": torch.arange(rows * width).view(rows, width) + 10,
            "prompt_mask": torch.ones(rows, width, dtype=torch.long),
            "completion_ids": torch.arange(rows * length).view(rows, length) + 50,
            "completion_mask": torch.ones(rows, length, dtype=torch.long),
            "tool_mask": torch.ones(rows, length, dtype=torch.long),
            "sampling_per_token_logps": torch.full((rows, length), -2.0),
            "advantages": torch.arange(rows) + 0.5,
            "num_items_in_batch": torch.tensor(99),
        }
        if sum(pictures):
            out |= {"pixel_values": torch.rand(sum(pictures), 3, 2, 2), "num_images": pictures}
        return out

    device = torch.device("cpu")
    a, b = batch(3, 4, [1, 0, 2]), batch(5, 2, [0, 0, 0])
    again = join_rows(split_rows(a), 0, device)
    assert again.keys() == a.keys() - {"num_items_in_batch"}
    assert all(torch.equal(again[k], a[k]) for k in again if k != "num_images") and again["num_images"] == [1, 0, 2]
    (first, *_), (_, second, _) = split_rows(a), split_rows(b)
    mixed = join_rows([second, first], 7, device)
    assert mixed["prompt_ids"].tolist() == [[15, 16, 17, 18, 19], [7, 7, 10, 11, 12]]
    assert mixed["prompt_mask"].tolist() == [[1] * 5, [0, 0, 1, 1, 1]]
    assert mixed["completion_ids"].tolist() == [[52, 53, 7, 7], [50, 51, 52, 53]]
    assert mixed["completion_mask"].tolist() == [[1, 1, 0, 0], [1] * 4] and mixed["tool_mask"].tolist()[0] == [1] * 4
    assert mixed["sampling_per_token_logps"].tolist()[0] == [-2.0, -2.0, 0.0, 0.0]
    assert mixed["num_images"] == [0, 1] and torch.equal(mixed["pixel_values"], a["pixel_values"][:1])
    assert "pixel_values" not in join_rows([second], 7, device)


class Scripted:
    """Spread for prompts in `lively`, a constant for all others; records every call."""

    __name__ = "scripted"

    def __init__(self, lively: str):
        self.lively, self.calls = lively, []

    def __call__(self, prompts, completion_ids, **_):
        texts = [prompt if isinstance(prompt, str) else prompt[0]["content"][-1]["text"] for prompt in prompts]
        self.calls.append((texts, completion_ids))
        return [0.1 * (1 + i % 4) if text in self.lively else 0.5 for i, text in enumerate(texts)]


def record_losses(trainer) -> list[dict]:
    """Keep the inputs of every loss."""
    seen, compute = [], trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, *a, **k: (seen.append(inputs), compute(model, inputs, *a, **k))[1]
    return seen


def letters_of(processor, ids: torch.Tensor) -> list[str]:
    """The prompt of each row, which is one letter."""
    texts = ["".join(processor.tokenizer.convert_ids_to_tokens(row)) for row in ids.tolist()]
    return [re.findall(r"([a-p])\n\n<\|Assistant", text)[0] for text in texts]


BY_HAND = (torch.tensor([0.1, 0.2, 0.3, 0.4]) - 0.25) / (torch.tensor([0.1, 0.2, 0.3, 0.4]).std() + 1e-4)


@pytest.mark.parametrize("settings", [
    {}, {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    {"num_iterations": 2, "max_reasoning_length": 3, "beta": 0.1},
])  # fmt: skip
def test_flat_groups_are_replaced_and_the_others_stay(trainer_of, processor, settings):
    reward = Scripted("acegik")  # every second prompt
    trainer = trainer_of(reward, prompts_dataset(LETTERS[:12]), **{
        "per_device_train_batch_size": 8, "dynamic_sampling": True, "dynamic_sampling_max_rounds": 20,
        "shuffle_dataset": False, **settings,
    })  # fmt: skip
    losses = record_losses(trainer)
    trainer.train()
    assert reward.calls[0][0] == ["a"] * 4 + ["b"] * 4  # the second group is flat
    # Later rounds sample one group, until one is lively.
    drawn = [texts[0] for texts, _ in reward.calls[1:]]
    assert not set(drawn) & {"a", "b"} and len(set(drawn)) == len(drawn)  # new prompts, in every round
    assert all(len(texts) == 4 and len(set(texts)) == 1 for texts, _ in reward.calls[1:])
    assert all(text not in "acegik" for text in drawn[:-1]) and drawn[-1] in "acegik"
    rows = {}
    for inputs in losses[: trainer.args.gradient_accumulation_steps]:
        for text, ids, mask, advantage in zip(
            letters_of(processor, inputs["prompt_ids"]), inputs["completion_ids"], inputs["completion_mask"],
            inputs["advantages"], strict=True,
        ):  # fmt: skip
            rows.setdefault(text, []).append((ids[mask.bool()].tolist(), advantage.item()))
    kept = {"a": reward.calls[0][1][:4], drawn[-1]: reward.calls[-1][1]}
    assert len(kept) == 2 and rows.keys() == kept.keys()
    for text, completions in kept.items():
        by_row = sorted(zip(completions, BY_HAND.tolist(), strict=True))
        for (ids, advantage), (expected, by_hand) in zip(sorted(rows[text]), by_row, strict=True):
            assert ids == expected and advantage == pytest.approx(by_hand, abs=1e-5)
    log = steps(trainer)[0]
    assert log["dynamic_sampling/rounds"] == len(drawn) and log["dynamic_sampling/flat_groups_0"] == 0.5
    assert log[f"dynamic_sampling/flat_groups_{len(drawn)}"] == 0 == log["dynamic_sampling/flat_groups_left"]
    assert log["reward"] == pytest.approx(0.375)  # of the first round: what the prompts of the data set give
    assert log["dynamic_sampling/reward"] == pytest.approx(0.25) and log["time/dynamic_sampling_s"] >= 0
    assert all(log["logps/drift_max"] < 1e-5 and log["grad_norm"] > 0 for log in steps(trainer))
    items = sum(int((i["completion_mask"] * i["tool_mask"]).sum()) for i in losses[: trainer.args.steps_per_generation])
    assert all(int(i["num_items_in_batch"]) == items for i in losses[: trainer.args.steps_per_generation])


def test_pictures_travel_with_their_rows(trainer_of, processor):
    reward = Scripted("ad")
    trainer = trainer_of(
        reward, pictures_dataset((1, 2, 0, 3)), task="i2t", per_device_train_batch_size=8, num_generations=4,
        dynamic_sampling=True, dynamic_sampling_max_rounds=20, shuffle_dataset=False,
    )  # fmt: skip
    losses = record_losses(trainer)
    trainer.train()
    (inputs,) = losses
    texts = letters_of(processor, inputs["prompt_ids"])
    assert len(texts) == 8 and set(texts) <= {"a", "d"}
    counts = [{"a": 1, "d": 3}[text] for text in texts]
    assert inputs["num_images"] == counts
    colors = [COLORS[text] for text, count in zip(texts, counts, strict=True) for _ in range(count)]
    means = ((inputs["pixel_values"].mean((2, 3)) + 1) * 127.5).round().int().tolist()
    assert means == [list(color) for color in colors]
    assert steps(trainer)[0]["logps/drift_max"] < 1e-5


def test_groups_that_stay_flat_have_advantage_zero_and_warn_once(trainer_of, caplog):
    reward = Scripted("")
    trainer = trainer_of(
        reward, prompts_dataset(LETTERS), per_device_train_batch_size=8, dynamic_sampling=True,
        dynamic_sampling_max_rounds=2, max_steps=2,
    )  # fmt: skip
    losses = record_losses(trainer)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert [len(texts) for texts, _ in reward.calls] == [8] * 6  # a first and two further rounds, in two steps
    prompts = [{text for texts, _ in reward.calls[i : i + 3] for text in texts} for i in (0, 3)]
    assert [len(drawn) for drawn in prompts] == [6, 6]  # two new ones in every round
    assert all((inputs["advantages"] == 0).all() for inputs in losses)
    assert sum("still have no reward spread" in record.message for record in caplog.records) == 1
    for log in steps(trainer):
        assert log["dynamic_sampling/rounds"] == 2 and log["dynamic_sampling/flat_groups_left"] == 1.0
        assert log["grad_norm"] == 0


def test_what_is_trained_on_decides_whether_there_is_signal(trainer_of):
    holder = {}

    def reward(prompts, **_):  # the first sampling is flat, and one of its rows a fault
        first = holder["trainer"].sampling_round == 0
        return [0.5 if first else (NAN if i == 0 else 0.1 * i) for i in range(len(prompts))]

    trainer = holder["trainer"] = trainer_of(
        reward, prompts_dataset(LETTERS), dynamic_sampling=True, max_steps=4, no_signal_patience=2,
        stop_on_no_signal=True,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 4 and not any("monitor/" in str(list(row)) for row in trainer.state.log_history)
    for log in steps(trainer):
        assert log["dynamic_sampling/flat_groups_0"] == 1 and log["signal/flat_groups"] == 0
        assert log["signal/within_group_std"] == pytest.approx(0.1) and log["signal/advantage_abs_mean"] > 0.4
        assert log["rewards/reward/nan"] == 1  # of all rounds


def test_without_flat_groups_nothing_changes(trainer_of):
    runs = []
    for dynamic_sampling in (False, True):
        trainer = trainer_of(Scripted("".join(LETTERS)), prompts_dataset(LETTERS), dynamic_sampling=dynamic_sampling)
        losses = record_losses(trainer)
        trainer.train()
        runs.append((losses[0], steps(trainer)[0]))
    (off, off_log), (on, on_log) = runs
    assert on.keys() == off.keys() and all(torch.equal(on[k], off[k]) for k in on if isinstance(on[k], torch.Tensor))
    assert on_log["grad_norm"] == off_log["grad_norm"] and on_log["dynamic_sampling/rounds"] == 0


@pytest.mark.parametrize(("scale", "aggregation"), [
    ("batch", "sum_then_normalize"), ("none", "sum_then_normalize"), ("group", "normalize_then_sum"),
])  # fmt: skip
def test_advantages_are_scaled_over_the_rows_that_are_kept(trainer_of, scale, aggregation):
    sizes = dict(zip(LETTERS, [1.0, 0.0, 3.0, 3.0, 3.0, 3.0], strict=False))  # "b" is flat

    def reward(prompts, **_):
        return [sizes[prompt] * (0.1 * (1 + i % 4)) for i, prompt in enumerate(prompts)]

    trainer = trainer_of(
        reward, prompts_dataset(LETTERS[:6]), per_device_train_batch_size=8, dynamic_sampling=True, scale_rewards=scale,
        multi_objective_aggregation=aggregation, dynamic_sampling_max_rounds=20, shuffle_dataset=False,
    )  # fmt: skip
    losses = record_losses(trainer)
    trainer.train()
    drawn = steps(trainer)[0]["dynamic_sampling/reward"] * 8 / 4 - 0.25  # mean reward of the second group
    base = torch.tensor([0.1, 0.2, 0.3, 0.4])
    groups = torch.stack([base, base * drawn / 0.25])
    if aggregation == "normalize_then_sum":
        groups = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    expected = groups - groups.mean(1, keepdim=True)
    if scale != "none":
        expected = expected / (groups.flatten().std() + 1e-4)
    found = losses[0]["advantages"].sort().values
    torch.testing.assert_close(found, expected.flatten().sort().values, atol=1e-5, rtol=1e-5)


def test_a_resumed_run_draws_the_same_prompts(trainer_of, tmp_path):
    calls = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        reward = Scripted("acegikmo")
        trainer = trainer_of(
            reward, prompts_dataset(LETTERS), per_device_train_batch_size=8, dynamic_sampling=True, max_steps=3,
            save_strategy="steps", save_steps=2, max_reasoning_length=2,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=checkpoint)
        calls.append([(texts, ids) for texts, ids in reward.calls])
    rounds = len(calls[1])
    assert calls[0][-rounds:] == calls[1] and rounds > 1
    seen = [str(row) for _, ids in calls[0] for row in ids]
    assert len(set(seen)) == len(seen)  # rounds do not repeat random numbers


def test_evaluation_does_not_replace_rows(trainer_of):
    reward = Scripted("")
    trainer = trainer_of(reward, prompts_dataset(LETTERS), eval_dataset=prompts_dataset(), dynamic_sampling=True)
    trainer.evaluate()
    assert len(reward.calls) == 1
