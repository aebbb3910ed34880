"""The evaluation script: its figures are those of a computation by hand, for models and for adapters."""

import json
import os
import statistics

import pytest
import torch
from peft import get_peft_model
from PIL import Image
from trl import ModelConfig

from janus_trl.evaluation import difference, weighted_totals
from janus_trl.modeling import JanusForInterleavedGeneration, bind_special_ids
from janus_trl.recipe import resolve_model
from janus_trl.rewards import RewardSet, Scores
from janus_trl.rewards.multiple_choice import multiple_choice_reward
from janus_trl.sampling import SamplingSettings, rollout, row_seed
from janus_trl.script_arguments import lora_config
from janus_trl.scripts import evaluate
from janus_trl.tiny import grade, read_picture, tiny_dataset

T2I = ["--model_name_or_path", "tiny", "--task", "t2i", "--dataset_name", "tiny", "--reward_funcs", "tiny_world"]
I2T = ["--model_name_or_path", "tiny", "--task", "i2t", "--dataset_name", "tiny", "--reward_funcs", "multiple_choice"]
ROWS = 16


@pytest.fixture
def evaluated(capsys):
    """Runs the script on the first rows and returns its one line."""

    def call(*argv: str, rows: int = ROWS) -> dict:
        capsys.readouterr()
        evaluate.main([*argv, "--max_test_rows", str(rows)])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        return json.loads(lines[0])

    return call


def by_hand(task: str, text_length: int, seed: int = 0, **settings) -> list[float]:
    """The reward of each of the first rows."""
    from transformers import JanusProcessor

    folder = resolve_model("tiny")
    processor = JanusProcessor.from_pretrained(folder)
    model = JanusForInterleavedGeneration.from_pretrained(folder, dtype=torch.float32)
    bind_special_ids(model, processor)
    rows = tiny_dataset(task, "test").select(range(ROWS))
    images = list(rows["images"]) if task == "i2t" else None
    seeds = [row_seed(seed, "eval", i) for i in range(ROWS)]
    result = rollout(
        model, processor, list(rows["prompt"]), SamplingSettings(task, text_length, **settings), seeds, images
    )
    if task == "t2i":
        return [grade(*pair) for pair in zip(rows["demands"], read_picture(result.images))]
    texts = processor.batch_decode(result.completion_ids, skip_special_tokens=True)
    return multiple_choice_reward(completions=texts, answer=rows["answer"], choices=rows["choices"])


def test_t2i_figures_equal_a_computation_by_hand(evaluated):
    line, rewards = evaluated(*T2I), by_hand("t2i", 24)
    assert line["rows"] == ROWS and line["task"] == "t2i" and line["seconds"] > 0
    assert 0 < line["reward"]["mean"] < 1
    error = statistics.stdev(rewards) / ROWS**0.5
    expected = {"mean": pytest.approx(statistics.fmean(rewards)), "standard_error": pytest.approx(error), "rows": ROWS}
    assert line["reward"] == expected and line["rewards"] == {"tiny_world": expected}
    categories = tiny_dataset("t2i", "test")["category"][:ROWS]
    assert set(line["category"]) == set(categories)
    for name, figures in line["category"].items():
        group = [reward for reward, category in zip(rewards, categories) if category == name]
        assert figures["mean"] == pytest.approx(statistics.fmean(group)) and figures["rows"] == len(group)


def test_i2t_greedy_figures_equal_a_computation_by_hand(evaluated):
    line = evaluated(*I2T, "--greedy", "true")
    assert line["greedy"] is True
    assert line["reward"]["mean"] == pytest.approx(statistics.fmean(by_hand("i2t", 40, greedy=True)))


def test_options_reach_the_sampler(evaluated):
    line = evaluated(*T2I, "--seed", "3", "--guidance_scale", "2", "--temperature", "0.5", "--max_text_length", "12")
    expected = by_hand("t2i", 12, seed=3, guidance_scale=2.0, temperature=0.5)
    assert line["reward"]["mean"] == pytest.approx(statistics.fmean(expected))


def test_figures_repeat_and_do_not_depend_on_the_batch(evaluated):
    first, second = evaluated(*T2I), evaluated(*T2I, "--batch_size", "5")
    assert first["reward"] == second["reward"] and first["category"] == second["category"]


def test_total_is_the_weighted_sum_and_unscorable_rows_are_counted_out(evaluated, tmp_path, monkeypatch):
    (tmp_path / "evaluated_rewards.py").write_text(
        "def every_other(completions, **columns):\n"
        "    return [4.0 if i % 2 == 0 else None for i in range(len(completions))]\n"
        "async def two(completions, trainer_state, log_metric):\n"
        "    return [2.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    weighted = json.dumps({"name": "evaluated_rewards:every_other", "weight": 0.5})
    argv = [*T2I[:-1], weighted, "evaluated_rewards:two", "--max_text_length", "0"]
    line = evaluated(*argv, rows=4)
    assert line["rewards"]["every_other"] == {"mean": 4.0, "standard_error": 0.0, "rows": 2}
    assert line["rewards"]["two"]["mean"] == 2.0
    assert line["reward"]["mean"] == pytest.approx((0.5 * 4 + 2 + 2) / 2)


def test_rows_that_no_trained_reward_scores_are_left_out_of_the_total_as_in_training():
    def named(name):
        function = lambda **_: None  # noqa: E731
        function.__name__ = name
        return function

    rewards = RewardSet([named("judge"), named("style"), named("watch")], [1.0, 2.0, 0.0])
    judge, style = Scores([1.0, None, None, None], failed=[3]), [0.5, None, 0.5, 0.5]
    assert weighted_totals(rewards, [judge, style, [9.0] * 4]) == [2.0, None, 1.0, None]
    assert difference([2.0, None, 1.0], [1.0, 5.0, None]) == {"mean": 1.0, "standard_error": None, "rows": 1}


def test_an_adapter_is_applied_to_its_base(evaluated, tmp_path):
    base = resolve_model("tiny")
    model = JanusForInterleavedGeneration.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(model, lora_config(ModelConfig(use_peft=True, lora_r=4)))
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(str(tmp_path / "fresh"))  # B is zero: the adapter changes nothing yet
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    model.save_pretrained(str(tmp_path / "loud"))
    plain = evaluated(*T2I)
    fresh, loud = (evaluated("--model_name_or_path", str(tmp_path / n), *T2I[2:]) for n in ("fresh", "loud"))
    assert fresh["reward"] == plain["reward"]
    assert loud["reward"]["mean"] < plain["reward"]["mean"] - 0.2  # large random weights destroy the pictures


def test_a_saved_folder_scores_as_the_checkpoint_it_was_loaded_from(evaluated, tmp_path):
    from transformers import JanusForConditionalGeneration, JanusProcessor

    base = resolve_model("tiny")
    JanusForConditionalGeneration.from_pretrained(base, dtype=torch.float32).save_pretrained(str(tmp_path))
    JanusProcessor.from_pretrained(base).save_pretrained(str(tmp_path))
    assert (
        evaluated("--model_name_or_path", str(tmp_path), *T2I[2:], rows=4)["reward"]
        == evaluated(*T2I, rows=4)["reward"]
    )


@pytest.mark.parametrize("argv", [T2I, I2T], ids=["t2i", "i2t"])
def test_samples_are_drawn(evaluated, tmp_path, argv):
    evaluated(*argv, "--samples_png", str(tmp_path / "deep" / "samples.png"), rows=3)
    picture = Image.open(tmp_path / "deep" / "samples.png")
    assert picture.width == 3 * (192 + 8) + 8  # three cells


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--greddy", "true"], "there is no option 'greddy'. Did you mean 'greedy'?"),
        (["--guidance_scale", "0.5"], "guidance_scale = 0.5 must be >= 1"),
        (["--task", "t2x"], "task = 't2x' must be one of: t2i, i2t"),
        (["--dataset_test_split", "tets"], "dataset_test_split is 'tets'; valid: train, validation, test"),
        (["--reward_funcs", "multiple_choice"], "does not fit task 't2i'"),
        (["--model_name_or_path", "no/such/folder/of_mine"], "no checkpoint found"),
        (["--temperature", "0"], "temperature = 0.0 must be >= 0.01"),
        (["--max_test_rows", "0"], "max_test_rows = 0 must be >= 1"),
    ],
)
def test_bad_input_is_one_message_before_weights_load(capsys, monkeypatch, argv, message):
    monkeypatch.setattr(JanusForInterleavedGeneration, "from_pretrained", None)
    with pytest.raises(SystemExit) as stop:
        evaluate.main([*T2I, *argv])
    assert stop.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line


def test_an_adapter_whose_base_is_gone_is_refused(capsys, tmp_path):
    base = {"peft_type": "LORA", "base_model_name_or_path": os.path.join(tmp_path, "gone", "base", "x")}
    (tmp_path / "adapter_config.json").write_text(json.dumps(base))
    with pytest.raises(SystemExit):
        evaluate.main(["--model_name_or_path", str(tmp_path), *T2I[2:]])
    assert "gone/base/x: no checkpoint found" in capsys.readouterr().err


def test_several_processes_are_refused_where_each_would_score_all_rows(capsys, monkeypatch):
    monkeypatch.setattr(JanusForInterleavedGeneration, "from_pretrained", None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stop:
        evaluate.main(T2I)
    assert stop.value.code == 2
    assert "2 processes were started, and each would score all rows" in capsys.readouterr().err


def test_a_dry_run_loads_no_weights(capsys, monkeypatch):
    monkeypatch.setattr(JanusForInterleavedGeneration, "from_pretrained", None)
    evaluate.main([*T2I, "--dry_run", "true"])
    assert capsys.readouterr().out == "t2i: 512 rows of tiny, rewards: tiny_world\n"
