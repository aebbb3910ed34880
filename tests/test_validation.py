"""The look at the rows before weights load: what is reported, refused, skipped and neutralised."""

import json
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
import yaml
from PIL import Image
from transformers import JanusConfig

from janus_trl.data import load_dataset_splits
from janus_trl.data_report import first_prompt_lines, prompt_room, report_on, validated
from janus_trl.data_text import control_tokens, count_control_strings, neutralise
from janus_trl.prompts import encode_prompts
from janus_trl.scripts import grpo
from tests.tiny import BOI, BOS, EOI, EOS, PAD, PLACEHOLDER

ROOT = Path(__file__).parent.parent
CONTROL = (BOI, EOI, BOS, EOS, PAD, PLACEHOLDER)


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(name, task="t2i", **options) -> datasets.Dataset:
    return load_dataset_splits(str(name), task=task, **options)["train"]


@pytest.fixture
def pictures(tmp_path) -> Path:
    """A folder with a good, a cut and an empty picture, and rows about them."""
    Image.new("RGB", (40, 40), (1, 2, 3)).save(tmp_path / "good.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:60])
    (tmp_path / "empty.png").write_bytes(b"")
    names = ["good", "cut", "good", "empty", "good", "missing"]
    rows = [{"prompt": f"q {i}", "images": [f"{name}.png"], "answer": "A"} for i, name in enumerate(names)]
    write(tmp_path / "rows.jsonl", rows)
    return tmp_path


# ---- control strings ------------------------------------------------------------------------------------------------


def test_control_tokens_are_those_of_the_tokenizer(processor):
    assert set(CONTROL) <= set(control_tokens(processor.tokenizer))
    processor.tokenizer.add_tokens(["ö", "word"])  # as in DeepSeek's tokenizers: added, and plain text all the same
    processor.tokenizer.add_tokens(["<|User|>"])  # a role mark, which need not be flagged as special
    names = set(control_tokens(processor.tokenizer))
    assert "<|User|>" in names and not {"ö", "word"} & names


def test_no_control_id_comes_out_of_a_users_text(tmp_path, processor):
    texts = [f"a {token} cat{token}{token}" for token in CONTROL] + [f"<{BOI}>", "".join(CONTROL), "plain < text >"]
    write(tmp_path / "d.jsonl", [{"prompt": text} for text in texts])
    ids = set(control_tokens(processor.tokenizer).values()) - {processor.tokenizer.unk_token_id}  # unknown letters
    in_template = [i for i in encode_prompts(processor, ["q"])["input_ids"][0].tolist() if i in ids]
    before = load(tmp_path / "d.jsonl")
    assert set(processor.tokenizer(texts[0])["input_ids"]) & ids  # they would be control tokens
    dataset, report = validated(before, "t2i", processor)
    assert report.control_rows == len(CONTROL) + 2
    assert "  control strings: neutralised in 8 rows" in report.lines()
    assert dataset[0]["prompt"] == "a < begin_of_image> cat< begin_of_image>< begin_of_image>"
    assert dataset[-1]["prompt"] == "plain < text >"
    for prompt in dataset["prompt"]:
        encoded = encode_prompts(processor, [prompt])["input_ids"][0].tolist()
        assert [i for i in encoded if i in ids] == in_template


def test_reasoning_and_answers_are_neutralised_too(tmp_path, processor):
    write(tmp_path / "d.jsonl", [{"prompt": "q", "completion": f"x {EOI}", "reasoning": f"{BOI} y"}] * 3)
    dataset, report = validated(load(tmp_path / "d.jsonl", task="i2t", stage="sft"), "i2t", processor, stage="sft")
    assert (dataset[2]["completion"], dataset[2]["reasoning"]) == ("x < end_of_image>", "< begin_of_image> y")
    assert report.control_rows == 3  # rows, not strings


def test_neutralising_leaves_all_other_text_alone():
    assert neutralise("a < b > c <begin_of_imag> 🦊", CONTROL) == "a < b > c <begin_of_imag> 🦊"
    assert neutralise("anything", ()) == "anything"


def test_control_strings_are_counted_in_every_row_with_a_pattern_of_their_own():
    rows = datasets.Dataset.from_dict({"prompt": ["a(b", "a.b", None, "<|x|>", "<|x|> a(b"]})
    assert count_control_strings(rows, ("a(b", "<|x|>")) == 3
    assert count_control_strings(rows, ()) == 0


# ---- lengths --------------------------------------------------------------------------------------------------------


def test_lengths_are_those_of_the_rendered_prompts(tmp_path, processor):
    prompts = ["q", "a longer prompt", "two"]
    write(tmp_path / "d.jsonl", [{"prompt": prompt} for prompt in prompts])
    report = report_on(load(tmp_path / "d.jsonl"), "t2i", processor, room=99)
    expected = [len(encode_prompts(processor, [prompt])["input_ids"][0]) for prompt in prompts]
    assert report.lengths == expected
    mean = sum(expected) / 3
    assert report.lines()[1] == f"  prompt tokens: {expected[0]} to {expected[1]}, mean {mean:.1f}, room for 99"


def test_a_prompt_without_room_is_refused_with_its_row_and_never_cut(tmp_path, processor):
    write(tmp_path / "d.jsonl", [{"prompt": "x" * n} for n in (5, 80, 5, 90)])
    dataset = load(tmp_path / "d.jsonl")
    long = len(encode_prompts(processor, ["x" * 80])["input_ids"][0])
    with pytest.raises(ValueError, match=f"2 of 4 checked.*row 1: its prompt has {long} tokens.*room for 60; row 3"):
        validated(dataset, "t2i", processor, room=60)
    fitting = dataset.select([0, 1, 2])  # the second one just fits
    assert list(validated(fitting, "t2i", processor, room=long)[0]["prompt"]) == ["x" * 5, "x" * 80, "x" * 5]
    assert report_on(fitting, "t2i", processor, room=long).bad_rows == []
    kept, report = validated(dataset, "t2i", processor, room=60, bad_rows="skip")
    assert [len(prompt) for prompt in kept["prompt"]] == [5, 5]
    assert report.bad_rows == [1, 3]


def test_pictures_count_as_their_tokens(pictures, processor):
    dataset = load(pictures / "rows.jsonl", task="i2t").select([0])
    report = report_on(dataset, "i2t", processor)
    encoded = encode_prompts(processor, ["q 0"], [dataset[0]["images"]])
    assert report.lengths == [encoded["input_ids"].shape[1]] and report.pictures == 1


def test_supervised_rows_count_reasoning_and_answer(tmp_path, processor):
    rows = [{"prompt": "q", "completion": "yes", "reasoning": "why so"}, {"prompt": "q", "completion": "no"}]
    write(tmp_path / "d.jsonl", rows)
    report = report_on(load(tmp_path / "d.jsonl", task="i2t", stage="sft"), "i2t", processor, stage="sft")
    assert report.lengths[0] - report.lengths[1] == len("why so yes") - len("no")
    assert report.lines()[2] == "  of these reasoning: 0 to 6, mean 3.0" and report.reasoning_lengths == [6, 0]
    without = report_on(load(tmp_path / "d.jsonl", task="i2t", stage="sft").select([1]), "i2t", processor, stage="sft")
    assert not any("reasoning" in line for line in without.lines())


def test_the_room_of_a_prompt_is_the_context_less_the_completion(janus_folder):
    config = JanusConfig.from_pretrained(janus_folder)
    codes = config.vq_config.num_patches**2
    assert prompt_room(config, "i2t", 100) == 512 - 100
    assert prompt_room(config, "t2i", 100) == 512 - 100 - codes - 3
    with pytest.raises(ValueError, match="a completion of 600 tokens leaves no room.*context of 512"):
        prompt_room(config, "i2t", 600)


# ---- rows that cannot be trained on ---------------------------------------------------------------------------------


def test_broken_pictures_are_refused_with_their_rows(pictures, processor):
    dataset = load(pictures / "rows.jsonl", task="i2t")
    with pytest.raises(ValueError) as error:
        validated(dataset, "i2t", processor, name="train")
    message = str(error.value)
    assert message.startswith("data (train): 3 of 6 checked rows cannot be trained on (numbers from 0): row 1: image ")
    assert "row 3: " in message and "row 5: image 'missing.png': there is no such file" in message
    assert "set bad_rows: skip" in message and "\n" not in message


def test_broken_pictures_are_skipped_whole_with_a_count(pictures, processor):
    dataset = load(pictures / "rows.jsonl", task="i2t", bad_rows="skip")
    kept, report = validated(dataset, "i2t", processor, bad_rows="skip", rows=1)  # a sample would miss some
    assert list(kept["prompt"]) == ["q 0", "q 2", "q 4"]
    assert report.checked == 6 and report.lines()[-1].startswith("  skipped: 3 rows, such as row 1: image ")
    assert [row["images"][0].getpixel((0, 0)) for row in kept] == [(1, 2, 3)] * 3


def test_nothing_left_to_train_on_is_refused(pictures, processor):
    dataset = load(pictures / "rows.jsonl", task="i2t", bad_rows="skip").select([1, 3])
    with pytest.raises(ValueError, match="none of the 2 rows can be trained on: row 0"):
        validated(dataset, "i2t", processor, bad_rows="skip")


def test_a_picture_that_breaks_after_the_check_is_blank_with_one_warning(pictures, processor, caplog):
    dataset, _ = validated(load(pictures / "rows.jsonl", task="i2t").select([0, 2]), "i2t", processor)
    (pictures / "good.png").write_bytes(b"")
    for _ in range(3):
        blank = dataset[1]["images"][0]
        assert blank.mode == "RGB" and blank.getextrema() == ((255, 255),) * 3
    warnings = [record.message for record in caplog.records if "blank picture" in record.message]
    assert len(warnings) == 1 and "good.png" in warnings[0] and "the row with prompt 'q 2'" in warnings[0]


def test_training_goes_on_when_a_picture_breaks_after_the_check(pictures, processor, trainer_of):
    dataset = load(pictures / "rows.jsonl", task="i2t", bad_rows="skip")
    dataset, _ = validated(dataset, "i2t", processor, bad_rows="skip")
    (pictures / "good.png").unlink()
    trainer = trainer_of(dataset=dataset, task="i2t", max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("answer", ["E", "purple", "", None, "A or B"])
def test_an_answer_that_is_no_option_is_refused_with_its_row(tmp_path, processor, answer):
    rows = [{"prompt": "q", "answer": "red", "choices": ["red", "blue"]}, {"prompt": "q", "answer": "B"}]
    rows.append({"prompt": "q", "answer": answer, "choices": ["red", "blue"]})
    write(tmp_path / "d.jsonl", rows)
    with pytest.raises(ValueError, match=r"1 of 3.*row 2: answer .* is none of the options \(red, blue\)"):
        validated(load(tmp_path / "d.jsonl", task="i2t"), "i2t", processor)


def test_a_supervised_row_needs_no_answer_beside_its_options(tmp_path, processor):
    write(tmp_path / "d.jsonl", [{"prompt": "q", "completion": "c", "answer": "", "choices": ["red"]}])
    dataset = load(tmp_path / "d.jsonl", task="i2t", stage="sft")
    assert validated(dataset, "i2t", processor, stage="sft")[1].bad_rows == []


def test_a_sample_is_evenly_spaced_and_always_the_same(pictures, processor):
    dataset = load(pictures / "rows.jsonl", task="i2t")
    assert report_on(dataset, "i2t", processor, rows=3).bad_rows == []  # rows 0, 2, 4
    assert report_on(dataset, "i2t", processor, rows=2).bad_rows == [3]  # rows 0, 3
    assert report_on(dataset, "i2t", processor, rows=-1).bad_rows == [1, 3, 5]
    nothing = report_on(dataset, "i2t", processor, rows=0)
    assert nothing.checked == 0 and nothing.lines()[0] == "data (train): 6 rows, 0 of them checked"
    with pytest.raises(ValueError, match="validate_rows is -2"):
        validated(dataset, "i2t", processor, rows=-2)


def test_the_first_process_decides_for_all(pictures, processor, monkeypatch):
    # A second process that reads other bytes (here: nothing broken) still keeps the rows of the first.
    dataset = load(pictures / "rows.jsonl", task="i2t", bad_rows="skip")
    first = report_on(dataset, "i2t", processor, rows=-1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda box, src: box.__setitem__(0, first))
    for name in ("cut", "empty", "missing"):
        (pictures / f"{name}.png").write_bytes((pictures / "good.png").read_bytes())
    kept, report = validated(dataset, "i2t", processor, bad_rows="skip")
    assert list(kept["prompt"]) == ["q 0", "q 2", "q 4"] and report.bad_rows == [1, 3, 5]
    with pytest.raises(ValueError, match="3 of 6 checked rows"):
        validated(dataset, "i2t", processor)


# ---- the dry run ----------------------------------------------------------------------------------------------------


def test_the_first_prompt_is_shown_token_by_token_around_control_tokens(pictures, processor):
    row = load(pictures / "rows.jsonl", task="i2t").select([0])
    lines = first_prompt_lines(row, processor)
    ids = encode_prompts(processor, ["q 0"], [row[0]["images"]])["input_ids"][0].tolist()
    assert lines[0] == f"first prompt, {len(ids)} tokens: 'q 0'"
    shown = {int(parts[0]): (int(parts[1]), parts[2]) for parts in (line.split(None, 2) for line in lines[1:])
             if parts[0].isdigit()}  # fmt: skip
    for i, token in enumerate(ids):
        if token in control_tokens(processor.tokenizer).values() and (i == 0 or ids[i - 1] != token):
            assert shown[i][0] == token
    placeholders = ids.count(processor.tokenizer.convert_tokens_to_ids(PLACEHOLDER))
    assert any(text == f"'{PLACEHOLDER}'  x {placeholders}" for _, text in shown.values())
    assert max(shown) < len(ids)


def test_a_dry_run_prints_report_prompt_and_summary(tmp_path, capsys):
    prompts = tmp_path / "p.txt"
    prompts.write_text("a red circle\n" * 30 + "a <begin_of_image> blue square\n" * 10)
    recipe = yaml.safe_load((ROOT / "recipes" / "tiny" / "t2i.yaml").read_text())
    mixture = [{"name": str(prompts), "weight": 2}, {"name": "tiny", "weight": 1}]
    recipe |= {"dataset_name": None, "dataset_mixture": mixture, "dataset_test_split": None}
    recipe |= {"eval_strategy": "no", "eval_on_start": False, "output_dir": str(tmp_path), "max_train_rows": 64}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({k: v for k, v in recipe.items() if v is not None}))
    reward = ["--reward_funcs", "tests.test_validation.no_reward", "--validate_rows", "50"]
    grpo.main(["--config", str(tmp_path / "r.yaml"), "--dry_run", "true", *reward])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "data (train): 64 rows, 50 of them checked"
    assert lines[1].startswith("  prompt tokens: ") and "room for " in lines[1]
    assert lines[2].startswith("  control strings: neutralised in ")
    assert lines[3].startswith("first prompt, ") and any("<|Assistant|>" in line for line in lines[4:])
    assert "64 training rows" in lines[-2] and lines[-1].startswith("The recipe is fine")


def no_reward(completions, **_):
    return [0.0] * len(completions)


# ---- size -----------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, threading, time
from transformers import JanusProcessor
from janus_trl.data import load_dataset_splits
from janus_trl.data_report import validated

def memory():  # without the pages of files, which the system takes back when it needs them
    (line,) = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1024

def watch():
    while not done.wait(0.01):
        peak.append(memory())

processor = JanusProcessor.from_pretrained(sys.argv[2])
done, peak, start, before = threading.Event(), [], time.perf_counter(), memory()
thread = threading.Thread(target=watch)
thread.start()
dataset = load_dataset_splits(sys.argv[1], task="t2i", dataset_format=sys.argv[3] or None)["train"]
dataset, report = validated(dataset, "t2i", processor, room=400)
seconds = time.perf_counter() - start
done.set()
thread.join()
print(len(dataset), report.checked, report.control_rows, seconds, max(peak) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("layout", [None, "geneval"])
def test_a_hundred_thousand_rows_take_seconds_and_no_memory_of_their_own(tmp_path, janus_folder, layout):
    filler = "a long tail of words about cats " * 20  # 640 bytes a row
    figures = {}
    for rows in (10_000, 100_000):
        path = tmp_path / f"{rows}.jsonl"
        with path.open("w") as file:
            for i in range(rows):
                text = json.dumps(f"{i} {'<begin_of_image>' if i % 1000 == 0 else ''} {filler[: 300 + i % 30]}")
                file.write(
                    f'{{"prompt": {text}, "include": [{{"class": "cat", "count": {i % 7}}}], "note": "{filler}"}}\n'
                )
        argv = [sys.executable, "-c", MEASURE, str(path), janus_folder, layout or ""]
        result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr[-2000:]
        *counts, seconds, mib = map(float, result.stdout.split()[-5:])
        assert counts == [rows, 1000, rows // 1000]
        figures[rows] = (seconds, mib)
        print(f"{layout}: {rows} rows, {seconds:.1f} s, {mib:.0f} MiB more at the peak")
    assert figures[100_000][0] < 30
    assert figures[100_000][1] - figures[10_000][1] < 45  # the larger file holds 90 MB more
