"""The generation script: official layouts file by file, restarts that change nothing, one set of seeds for all."""

import json
import os
import socket
from pathlib import Path

import pytest
import torch
from PIL import Image

from janus_trl import generation
from janus_trl.engine import DecodeEngine
from janus_trl.inference import usual_text_length
from janus_trl.modeling import JanusForInterleavedGeneration
from janus_trl.picture_decoder import PictureDecoder
from janus_trl.sampling import SamplingSettings, rollout, row_seed
from janus_trl.scripts import generate
from janus_trl.scripts.evaluate import EvaluateArguments
from tests.generation_files import GENEVAL, PROMPTS, check_geneval, files, geneval_file


@pytest.fixture
def run(janus_folder, tmp_path):
    """Runs the script on the random Janus; returns the output folder."""

    def call(*argv: str, name: str = "out", model: str = janus_folder) -> Path:
        generate.main(["--model", model, "--output_dir", str(tmp_path / name), *argv])
        return tmp_path / name

    return call


@pytest.fixture
def refused(janus_folder, tmp_path, capsys, monkeypatch):
    """Runs the script, which has to stop with one message before weights load."""
    monkeypatch.setattr(JanusForInterleavedGeneration, "from_pretrained", None)

    def call(*argv: str) -> str:
        with pytest.raises(SystemExit) as stop:
            generate.main(["--model", janus_folder, "--output_dir", str(tmp_path / "out"), *argv])
        assert stop.value.code == 2
        return capsys.readouterr().err

    return call


def test_pictures_are_those_of_the_training_sampler(run, model, processor):
    out = run("--prompt", *PROMPTS, "--num_images", "2", "--max_text_length", "6", "--seed", "3", "--batch_size", "3")
    settings = SamplingSettings("t2i", 6, guidance_scale=5.0)  # the guidance of the checkpoint
    seeds = [row_seed(3, "generate", i, s) for i in range(4) for s in range(2)]
    result = rollout(model, processor, [p for p in PROMPTS for _ in range(2)], settings, seeds)
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    for k, row in enumerate(rows):
        assert (row["index"], row["sample"], row["prompt"], row["seed"]) == (k // 2, k % 2, PROMPTS[k // 2], seeds[k])
        assert Image.open(out / row["image"]).tobytes() == result.images[k].tobytes()
        assert row["text"] == generation.texts_of(processor, result)[k]
    assert len(rows) == 8 and len({row["text"] for row in rows}) > 1
    record = json.loads((out / "records" / "00001-0001.json").read_text())
    codes = [i - model.vocab_size for i in record["completion_ids"] if i >= model.vocab_size]
    (decoded,) = PictureDecoder(model, torch.float32)(torch.tensor([codes]))
    assert Image.open(out / record["image"]).tobytes() == decoded.tobytes()
    assert Image.open(out / "contact_sheet.png").width > 2 * 192
    assert sorted(p.name for p in out.iterdir()) == [
        "contact_sheet.png", "generation.json", "images", "records", "samples.jsonl",
    ]  # fmt: skip


def test_geneval_layout(run, tmp_path):
    out = run("--prompts", geneval_file(tmp_path, GENEVAL), "--layout", "geneval")
    check_geneval(out, GENEVAL, 16)


def test_the_engine_of_training_makes_the_same_pictures(run, monkeypatch):
    """On a GPU the script samples with the decode engine; uncaptured it runs on CPU too."""
    argv = ["--prompt", *PROMPTS, "--num_images", "3", "--max_text_length", "4", "--batch_size", "5"]
    plain, used = run(*argv, name="plain"), []

    def engine_of(model, use_cuda_graphs):
        used.append(DecodeEngine(torch.float32, use_cuda_graphs=False))
        used[-1].load_weights(model)
        return used[-1]

    monkeypatch.setattr(generate, "decode_engine", engine_of)
    assert files(run(*argv, name="engine")) == files(plain) and used[0].state is not None


@pytest.mark.parametrize("count, width", [("1", 4), ("3", 6), ("4", 8)])
def test_the_samples_of_a_prompt_stay_together_on_the_sheet(run, count, width):
    out = run("--prompt", *PROMPTS, "--num_images", count)
    assert Image.open(out / "contact_sheet.png").width == width * (192 + 8) + 8


def test_compbench_layout(run, tmp_path):
    (tmp_path / "color_val.txt").write_text("a green bench and a red car\ta note\nThe sun, and a blue bowl.\n\n")
    out = run("--prompts", str(tmp_path / "color_val.txt"), "--layout", "t2i_compbench", "--num_images", "3")
    names = os.listdir(out / "samples")
    names.sort(key=lambda name: int(name.split("_")[-1].split(".")[0]))  # as its scorers do
    assert [name.split("_")[0] for name in names] == ["a green bench and a red car"] * 3 + [
        "The sun, and a blue bowl."
    ] * 3
    assert names[4] == "The sun, and a blue bowl._000004.png"


def test_dpg_layout(run, tmp_path):
    (tmp_path / "prompts").mkdir()
    for stem, text in (("1", "a cat\n"), ("partiprompts12", "a very long prompt about a dog")):
        (tmp_path / "prompts" / f"{stem}.txt").write_text(text)
    out = run("--prompts", str(tmp_path / "prompts"), "--layout", "dpg")
    assert sorted(os.listdir(out / "images")) == ["1.png", "partiprompts12.png"]
    grid = Image.open(out / "images" / "1.png")
    assert grid.size == (32, 32)
    for sample, corner in enumerate([(0, 0), (16, 0), (0, 16), (16, 16)]):
        crop = grid.crop((*corner, corner[0] + 16, corner[1] + 16))
        assert crop.tobytes() == Image.open(out / "parts" / f"1-{sample}.png").tobytes()


def test_answers_about_pictures_of_every_mode(run, tmp_path, model, processor):
    modes = ["RGB", "L", "LA", "RGBA", "P", "CMYK", "1", "I;16"]
    for mode in modes:
        Image.new(mode, (20, 10)).save(tmp_path / f"{mode.replace(';', '')}.{'tif' if mode == 'CMYK' else 'png'}")
    pictures = sorted(str(p) for p in tmp_path.iterdir() if p.suffix in (".png", ".tif"))
    assert len(pictures) == len(modes)
    out = run("--image", *pictures, "--prompt", "What is it?", "--max_text_length", "5")
    rows = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert [row["images"] for row in rows] == [[picture] for picture in pictures]
    from janus_trl.images import load_image

    settings = SamplingSettings("i2t", 5, guidance_scale=5.0)
    seeds = [row_seed(0, "generate", i, 0) for i in range(len(pictures))]
    result = rollout(
        model, processor, ["What is it?"] * len(pictures), settings, seeds, [[load_image(p)] for p in pictures]
    )
    assert [row["answer"] for row in rows] == processor.batch_decode(result.completion_ids, skip_special_tokens=True)
    assert not (out / "images").exists() and (out / "contact_sheet.png").is_file()


def test_questions_from_a_file_may_have_several_pictures_or_none(run, tmp_path):
    Image.new("RGB", (16, 16), "red").save(tmp_path / "red.png")
    rows = [{"prompt": "one?", "image": "red.png"}, {"prompt": "two?", "images": ["red.png"] * 2}, {"prompt": "no?"}]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv = ["--prompts", str(tmp_path / "questions.jsonl"), "--task", "i2t", "--max_text_length", "3"]
    answers = (run(*argv, "--num_images", "2") / "answers.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["images"]) for line in answers] == [1, 1, 2, 2, 0, 0]


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "Give either prompts (a file) or prompt (a text)"),
        (["--prompt", " "], "prompt 0 is empty"),
        (["--prompt", "a", "--layout", "genevall"], "layout = 'genevall' must be one of: prompts, geneval"),
        (["--prompt", "a", "--layout", "geneval"], "prompt 0 ('a') lacks tag, include"),
        (["--prompt", "a/b", "--layout", "t2i_compbench"], "cannot be a name (it holds '/')"),
        (["--prompt", "a" * 300, "--layout", "t2i_compbench"], "315 bytes, 255 are the most".replace("315", "311")),
        (["--prompt", "a", "--layout", "dpg", "--num_images", "3"], "num_images = 3 must be 4"),
        (["--prompt", "a", "--num_images", "0"], "num_images = 0 must be >= 1"),
        (["--prompt", "a", "--guidance_scale", "0.9"], "guidance_scale = 0.9 must be >= 1"),
        (["--prompt", "a", "--image_size", "512"], "there is no option 'image_size'"),
        (["--prompts", "no/such.txt"], "prompts = no/such.txt: there is no such file"),
        (["--prompt", "a", "--image", "no/such.png"], "no/such.png"),
        (["--prompt", "a", "--task", "i2t", "--layout", "geneval"], "layout = 'geneval' is one of pictures"),
        (["--prompt", "a", "--image", "x.png", "--task", "t2i"], "input pictures do not condition drawing"),
        (["--prompt", "a", "--prompt_template", "Draw"], "must contain {prompt}"),
        (["--prompt", "a", "--model", "no/such/model"], "no checkpoint found"),
    ],
)
def test_bad_input_is_one_message_before_weights_load(refused, argv, message):
    assert message in refused(*argv)


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": "a"}', 'line 2 needs a "prompt" that is a text; found: text.'),
        ("{", "line 2 is not valid JSON"),
        ('{"prompt": "a", "image": "x.png"}', "prompt 1 has input pictures"),
    ],
)
def test_bad_lines_are_named(refused, tmp_path, line, message):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "fine"}\n' + line + "\n")
    assert message in refused("--prompts", str(tmp_path / "prompts.jsonl"))


def test_a_recipe_gives_the_options(run, tmp_path):
    (tmp_path / "generate.yaml").write_text("prompt: [a cat, a dog]\nnum_images: 2\nseed: 4\n")
    out = run("--config", str(tmp_path / "generate.yaml"), "--num_images", "1")
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [row["seed"] for row in rows] == [row_seed(4, "generate", i, 0) for i in range(2)]


def test_control_strings_in_a_prompt_stay_text(run, model):
    out = run("--prompt", "a <begin_of_image> cat", "a cat")
    rows = [json.loads((out / "records" / f"0000{i}-0000.json").read_text()) for i in range(2)]
    assert rows[0]["prompt"] == "a <begin_of_image> cat"
    assert sum(i >= model.vocab_size for i in rows[0]["completion_ids"]) == model.num_image_codes


def test_no_network_is_needed(run, monkeypatch):
    def blocked(*args):
        raise AssertionError(f"a connection was tried: {args}")

    monkeypatch.setattr(socket.socket, "connect", blocked)
    monkeypatch.setattr(socket, "create_connection", blocked)
    assert (run("--prompt", "a cat") / "images" / "00000-0000.png").is_file()


def test_an_adapter_draws_with_its_base(run, model, janus_folder, tmp_path):
    from peft import get_peft_model
    from trl import ModelConfig

    from janus_trl.script_arguments import lora_config

    adapted = get_peft_model(model, lora_config(ModelConfig(use_peft=True, lora_r=2)))
    adapted.peft_config["default"].base_model_name_or_path = janus_folder
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.5)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    plain = run("--prompt", "a cat", name="plain")
    other = run("--prompt", "a cat", name="other", model=str(tmp_path / "adapter"))
    name = "images/00000-0000.png"
    assert (plain / name).read_bytes() != (other / name).read_bytes()


def test_the_usual_text_lengths_are_the_same_for_generation_and_evaluation(janus_folder, tmp_path):
    for task, usual, tiny in (("t2i", 0, 24), ("i2t", 256, 40)):
        output = {"output_dir": str(tmp_path), "task": task}
        assert generate.GenerateArguments(model_name_or_path="tiny", **output).max_text_length == tiny
        assert generate.GenerateArguments(model_name_or_path=janus_folder, **output).max_text_length == usual
        evaluated = {"model_name_or_path": janus_folder, "task": task}
        assert EvaluateArguments(dataset_name="tiny", **evaluated).max_text_length == tiny
        assert EvaluateArguments(dataset_name="rows.jsonl", **evaluated).max_text_length == usual


def test_a_checkpoint_trained_without_text_is_sampled_without(tmp_path):
    (tmp_path / "janus_trl.json").write_text(json.dumps({"sampling": {"max_reasoning_length": 0}}))
    assert usual_text_length(str(tmp_path), "t2i", tiny=True) == 0
    assert usual_text_length(str(tmp_path), "i2t", tiny=True) == 40  # which it was not trained for
