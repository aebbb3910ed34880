"""Both tasks in one run: whole batches of one task, shares, metrics and rewards by task."""

import json
from collections import Counter, defaultdict

import pytest
import torch
from datasets import Dataset, IterableDataset
from PIL import Image

from janus_trl.configs import JanusGRPOConfig
from janus_trl.rewards.by_task import get_rewards_by_task
from janus_trl.scripts import sft
from janus_trl.task_mixture import TaskSampler, join_tasks, split_by_task
from tests.grpo import PROMPTS, lora, pictures_dataset, prompts_dataset, steps, weights

ROWS = {"t2i": list(range(20)), "i2t": list(range(20, 32))}


def sampler(shares=(0.5, 0.5), seed=0, shuffle=True, **options):
    options = {"mini_repeat_count": 2, "batch_size": 4, "repeat_count": 3, **options}
    return TaskSampler(ROWS, dict(zip(ROWS, shares, strict=True)), shuffle=shuffle, seed=seed, **options)


def batches(rows: list[int], size: int) -> list[list[int]]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def task_of(row: int) -> str:
    return "t2i" if row < 20 else "i2t"


@pytest.mark.parametrize(("shares", "expected"), [
    ((0.5, 0.5), "titititi"), ((0.75, 0.25), "tittttit"), ((0.25, 0.75), "itiiiiti"),
])  # fmt: skip
def test_every_stretch_of_batches_keeps_the_shares(shares, expected):
    rows = list(sampler(shares))
    assert len(rows) == len(sampler(shares)) == 8 * 4 * 2 * 3  # 32 rows are 8 batches of 4 prompts
    repeats = batches(rows, 4 * 2)
    assert all(repeats[i] == repeats[i - i % 3] for i in range(len(repeats)))  # repeat_count
    tasks = [{task_of(row) for row in batch} for batch in repeats[::3]]
    assert all(len(task) == 1 for task in tasks)
    counts = Counter(task for batch in tasks for task in batch)
    assert [counts[task] / 8 for task in ROWS] == list(shares)
    for n in range(1, 9):  # never more than one batch off
        assert all(abs(sum(task in t for t in tasks[:n]) - share * n) < 1 for task, share in zip(ROWS, shares))
    assert all(Counter(batch).most_common()[0][1] == 2 == min(Counter(batch).values()) for batch in repeats)


@pytest.mark.parametrize(("shares", "batch_size"), [((0.5, 0.5), 10), ((0.75, 0.25), 12), ((0.9, 0.1), 8)])
def test_short_epochs_keep_the_shares_together(shares, batch_size):
    one = sampler(shares, batch_size=batch_size, repeat_count=1, mini_repeat_count=1)
    counts = Counter()
    for one.epoch in range(20):
        counts.update(task_of(batch[0]) for batch in batches(list(one), batch_size))
    total = sum(counts.values())
    assert all(abs(counts[task] - share * total) < 1 for task, share in zip(ROWS, shares, strict=True)), counts


def test_rows_of_a_task_come_up_once_before_they_repeat():
    rows = list(dict.fromkeys(batches(list(sampler(repeat_count=1, mini_repeat_count=1)), 4)[0]))
    first, again, other = (list(sampler(repeat_count=1, mini_repeat_count=1, seed=s)) for s in (0, 0, 1))
    assert first == again != other and first[:4] == rows
    questions = [row for row in first if row >= 20]
    assert sorted(questions[:12]) == ROWS["i2t"] and len(questions) == 16
    plain = list(sampler(repeat_count=1, mini_repeat_count=1, shuffle=False))
    assert plain[:8] == [0, 1, 2, 3, 20, 21, 22, 23]


def test_metrics_are_logged_by_task_too_and_once():
    metrics = defaultdict(list, {"reward": [1.0], "reward/i2t": [1.0]})
    for value in (2.0, 3.0):
        with split_by_task(metrics, "t2i"):
            metrics["reward"].append(value)
            metrics["rewards/mine/mean"].append(value)
    with split_by_task(metrics, None):
        metrics["kl"].append(0.0)
    assert metrics == {
        "reward": [1.0, 2.0, 3.0], "reward/i2t": [1.0], "reward/t2i": [2.0, 3.0], "rewards/mine/mean": [2.0, 3.0],
        "kl": [0.0],
    }  # fmt: skip


# Training -------------------------------------------------------------------------------------------------------------


def shared(completion_ids, **columns):
    """Scores both tasks."""
    assert len(set(columns.get("task", ["t2i"]))) == 1
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def both(prompts=PROMPTS, counts=(1, 2, 0, 3)) -> dict[str, Dataset]:
    return {"t2i": prompts_dataset(prompts), "i2t": pictures_dataset(counts)}


MIXED = {"task": "both", "max_reasoning_length": 2, "max_completion_length": 5, "num_generations": 4}


@pytest.fixture
def mixed_trainer(trainer_of):
    def build(reward=shared, dataset=None, **settings):
        return trainer_of(reward, dataset or both(), **{**MIXED, **settings})

    return build


@pytest.mark.parametrize("settings", [
    {}, {"peft": True}, {"loss_type": "dr_grpo", "gradient_accumulation_steps": 2, "steps_per_generation": 1},
    {"num_iterations": 2, "beta": 0.1},
])  # fmt: skip
def test_batches_of_both_tasks_replay_exactly_and_log_by_task(mixed_trainer, settings):
    peft = {"peft": lora()} if settings.get("peft") else {}
    trainer = mixed_trainer(max_steps=4, **{**settings, **peft})
    lengths, compute = [], trainer.compute_loss

    def recorded(model, inputs, *args, **kwargs):
        loss = compute(model, inputs, *args, **kwargs)
        lengths.append((trainer.batch_task, trainer.max_completion_length))
        return loss

    trainer.compute_loss = recorded
    trainer.train()
    assert set(lengths) == {("t2i", 2 + 16 + 3), ("i2t", 5)}
    logs = steps(trainer)
    assert all(log["logps/drift_max"] < 1e-5 and log["grad_norm"] > 0 for log in logs)
    for task, modality in (("t2i", "image"), ("i2t", "text")):
        of_task = [log for log in logs if f"reward/{task}" in log]
        assert len(of_task) == {1: 2, 2: 1}[trainer.num_iterations] * trainer.args.gradient_accumulation_steps
        assert all(log[f"logps/drift_max/{task}"] < 1e-5 and f"entropy/{modality}/{task}" in log for log in of_task)
    assert not any("entropy/image/i2t" in log or "/t2i/" in "".join(log) for log in logs)


def test_each_task_trains_its_own_parts_and_all_get_a_gradient(mixed_trainer):
    trainer = mixed_trainer(max_steps=1, max_grad_norm=0.0)
    grads = []
    clip = trainer._get_grad_norm
    trainer._get_grad_norm = lambda model, **kw: (
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad}), clip(model, **kw)
    )[1]  # fmt: skip
    before = weights(trainer)
    trainer.train()
    moved = {name for name, p in weights(trainer).items() if not torch.equal(p, before[name])}
    assert len(grads) == 1 and all(grad is not None for grad in grads[0].values())  # what DDP and ZeRO wait for
    assert any("vision_model" in name for name in grads[0]) and any("generation_head" in name for name in moved)
    assert not any("vision_model" in name or "vqmodel" in name for name in moved)  # t2i comes first


def test_a_single_task_and_a_mixed_run_sample_and_train_alike(trainer_of, mixed_trainer):
    alone = trainer_of(shared, prompts_dataset(), max_reasoning_length=2, shuffle_dataset=False)
    mixed = mixed_trainer(max_steps=1, shuffle_dataset=False)
    alone.train(), mixed.train()
    a, b = steps(alone)[0], steps(mixed)[0]
    assert a["reward"] == b["reward/t2i"] and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    after = weights(mixed)
    for name, p in weights(alone).items():
        torch.testing.assert_close(p, after[name])


def test_a_resumed_mixed_run_equals_a_straight_one(mixed_trainer, tmp_path):
    runs = []
    for checkpoint in (None, str(tmp_path / "checkpoint-3")):  # in the second epoch of two batches
        trainer = mixed_trainer(
            dataset=both(["one"], (1,)), max_steps=5, save_strategy="steps", save_steps=3, image_temperature=2.0
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append(steps(trainer))
    for a, b in zip(runs[0][3:], runs[1][3:], strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
        assert all(a[name] == b[name] for name in a if name.startswith("reward"))
    assert ["reward/t2i" in log for log in runs[0]] == [True, False, True, False, True]


def test_evaluation_is_split_by_task_and_counts_every_row_once(mixed_trainer, trainer_of):
    def by_row(completions, value, **_):
        return value

    held_out = {task: rows.add_column("value", [1.0, 2.0, 3.0, 10.0]) for task, rows in both().items()}
    held_out["i2t"] = held_out["i2t"].select(range(3))
    trainer = trainer_of(by_row, held_out | {"i2t": held_out["i2t"].add_column("x", [1, 2, 3])}, **{
        **MIXED, "num_generations": 2, "per_device_train_batch_size": 2,
    }, eval_dataset=held_out, per_device_eval_batch_size=3)  # fmt: skip
    metrics = trainer.evaluate()
    assert metrics["eval_reward/t2i"] == pytest.approx(4.0) and metrics["eval_reward/i2t"] == pytest.approx(2.0)
    assert "eval_reward" not in metrics and "eval_reward_standard_error/t2i" in metrics
    assert trainer.evaluations == [(0, {0: 1.0, 1: 2.0, 2: 3.0, 3: 10.0, 4: 1.0, 5: 2.0, 6: 3.0})]
    assert not any(name.endswith(("/t2i/t2i", "/i2t/i2t")) for name in metrics)
    rows = trainer.sample_rows(2)
    assert [row["prompt"] for row in rows] == PROMPTS[:2] and [row["reward"] for row in rows] == [1.0, 2.0]


def test_group_filtering_draws_prompts_of_the_batchs_task(mixed_trainer):
    calls = []

    def flat(prompts, completions, task, **_):
        calls.append((task[0], [isinstance(prompt, str) for prompt in prompts]))
        return [0.5] * len(completions)

    trainer = mixed_trainer(flat, max_steps=2, dynamic_sampling=True, dynamic_sampling_max_rounds=2)
    trainer.train()
    assert [task for task, _ in calls] == ["t2i"] * 3 + ["i2t"] * 3
    assert all(all(texts) == (task == "t2i") for task, texts in calls)
    assert "dynamic_sampling/flat_groups_left/i2t" in steps(trainer)[1]


# Rewards and refusals -------------------------------------------------------------------------------------------------

COLUMNS = {"t2i": ["prompt", "demands"], "i2t": ["prompt", "images", "answer"]}


def pictures_only(completions, generated_images, **_):
    return [1.0] * len(completions)


async def answers_only(completions, answer, **_):
    return [2.0] * len(completions)


def any_text(completions, **_):
    return [3.0] * len(completions)


def test_rewards_score_the_tasks_that_they_fit(mixed_trainer):
    specs = [pictures_only, answers_only, any_text, {"name": any_text, "task": "i2t", "weight": 0.5}]
    rewards, by_task = get_rewards_by_task(specs, COLUMNS)
    assert [[spec.name for spec in by_task[task]] for task in COLUMNS] == [
        [pictures_only, any_text], [answers_only, any_text, any_text]
    ]  # fmt: skip
    assert rewards.weights == [1.0, 1.0, 1.0, 0.5] and rewards.names[2:] == ["any_text", "any_text_2"]
    trainer = mixed_trainer(rewards.funcs, max_steps=2, reward_weights=rewards.weights)
    trainer.train()
    first, second = steps(trainer)
    assert first["reward/t2i"] == pytest.approx(1 + 3) and second["reward/i2t"] == pytest.approx(2 + 3 + 0.5 * 3)
    assert first["rewards/answers_only/mean"] is None and second["rewards/pictures_only/mean"] is None


@pytest.mark.parametrize(("specs", "message"), [
    (["tiny_world"], "no reward for task 'i2t'; add one of: .*multiple_choice"),
    (["multiple_choice"], "no reward for task 't2i'; add one of: .*tiny_world"),
    ([{"name": "tiny_world", "task": "i2t"}, "format"], "'tiny_world' does not fit task 'i2t'"),
    ([{"name": "format", "task": "i2tt"}], "task of 'format' is 'i2tt'; valid: i2t, t2i; did you mean 'i2t'"),
    ([lambda gold, **_: [], "format"], "needs the column 'gold'"),
])  # fmt: skip
def test_rewards_that_do_not_fit_are_refused(specs, message):
    with pytest.raises(ValueError, match=message):
        get_rewards_by_task(specs, COLUMNS)


@pytest.mark.parametrize(("given", "message"), [
    ({"t2i": 0.7, "i2t": 0.7}, "sum to 1.4, not to 1"),
    ({"t2i": 1.0, "i2t": 0.0}, "share of 'i2t' is 0.0, but must be a number above 0"),
    ({"t2i": 1.5, "i2t": -0.5}, "share of 'i2t' is -0.5"),
    ({"t2i": 1.0}, "share of 'i2t' is None"),
    ({"t2i": "half", "i2t": 0.5}, "share of 't2i' is 'half'"),
    ({"t2i": float("nan"), "i2t": 0.5}, "share of 't2i' is nan"),
    ({"t2i": 0.5, "i2tt": 0.5}, "names 'i2tt'; tasks are: t2i, i2t. Did you mean 'i2t'"),
    ("{t2i: 1", "is not valid JSON"),
    ("[1, 2]", "must map each task to its share"),
])  # fmt: skip
def test_bad_proportions_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        JanusGRPOConfig(output_dir="x", task="both", task_proportions=given, report_to="none")


def test_proportions_are_numbers_that_sum_to_one_and_belong_to_both():
    def config(**given):
        return JanusGRPOConfig(output_dir="x", report_to="none", **given).task_proportions

    assert config(task="both") == {"t2i": 0.5, "i2t": 0.5} and config(task="t2i") is None
    assert config(task="both", task_proportions='{"i2t": 0.25, "t2i": "7.5e-1"}') == {"t2i": 0.75, "i2t": 0.25}
    with pytest.raises(ValueError, match="needs task: both, but task = 'i2t'"):
        config(task="i2t", task_proportions={"t2i": 0.5, "i2t": 0.5})


@pytest.mark.parametrize(("dataset", "message"), [
    (prompts_dataset(), "needs train_dataset = .* but it is a Dataset"),
    ({"t2i": prompts_dataset()}, r"the keys \['t2i'\]"),
    (both(["one"]), "1 training rows of t2i are fewer than the 2 prompts of a rollout"),
    ({**both(), "t2i": IterableDataset.from_generator(lambda: iter([{"prompt": "a"}]))}, "streaming data sets"),
])  # fmt: skip
def test_data_that_is_not_of_both_tasks_is_refused(mixed_trainer, dataset, message):
    with pytest.raises(ValueError, match=message):
        mixed_trainer(dataset=dataset, per_device_train_batch_size=8)


def test_streams_are_refused_for_one_task_too(trainer_of):
    with pytest.raises(ValueError, match="streaming data sets"):
        trainer_of(dataset=IterableDataset.from_generator(lambda: iter([{"prompt": "a"}])))


@pytest.mark.parametrize("argument", ["dataset", "eval_dataset"])
def test_several_data_sets_are_refused_for_one_task(trainer_of, argument):
    name = {"dataset": "train_dataset"}.get(argument, argument)
    with pytest.raises(ValueError, match=rf"{name} has the keys \['easy', 'hard'\], but task = 't2i' takes one"):
        trainer_of(**{argument: {"easy": prompts_dataset(), "hard": prompts_dataset()}})


def test_joined_rows_keep_their_columns_and_pictures():
    joined = join_tasks({"t2i": prompts_dataset(), "i2t": pictures_dataset()})
    assert joined["task"] == ["t2i"] * 4 + ["i2t"] * 4
    assert joined[0]["answer"] is None and joined[5]["images"][1].getpixel((0, 0)) == (10, 250, 10)


@pytest.mark.parametrize("more", [0, 1])
def test_supervised_rows_of_both_tasks_read_the_pictures_of_their_own_folder(tmp_path, janus_folder, more):
    entries = []
    for task, color, row in (
        ("t2i", "red", {"prompt": "draw", "image": "p.png", "reasoning": "r"}),
        ("i2t", "blue", {"prompt": "what", "images": ["p.png"], "completion": "blue"}),
        ("t2i", "lime", {"prompt": "draw more", "image": "p.png", "reasoning": "r"}),
    )[: 2 + more]:
        folder = tmp_path / color
        folder.mkdir()
        Image.new("RGB", (16, 16), color).save(folder / "p.png")
        (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
        splits = {"train_split": "train", "test_split": "train"}
        entries.append(json.dumps({"name": str(folder / "rows.jsonl"), "task": task, **splits}))
    argv = ["--model_name_or_path", janus_folder, "--task", "both", "--output_dir", str(tmp_path / "out")]
    run = sft.configure([*argv, "--report_to", "none", "--dataset_mixture", *entries])
    for rows in (run.train, run.test):
        pictures = {row["prompt"]: row["image"] or row["images"][0] for row in rows}
        colors = {prompt: picture.getpixel((0, 0)) for prompt, picture in pictures.items()}
        expected = {"draw": (255, 0, 0), "what": (0, 0, 255), "draw more": (0, 255, 0)}
        assert colors == {prompt: expected[prompt] for prompt in list(expected)[: 2 + more]}
        assert [row["images"] for row in rows if row["image"]] == [[]] * (1 + more)
