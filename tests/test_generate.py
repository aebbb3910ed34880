"""The generation script: official layouts file by file, restarts that change nothing, one set of seeds for all."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from janus_trl import generation
from janus_trl.engine import DecodeEngine
from janus_trl.modeling import JanusForInterleavedGeneration
from janus_trl.picture_decoder import PictureDecoder
from janus_trl.sampling import SamplingSettings, rollout, row_seed
from janus_trl.scripts import generate
from tests.distributed_launch import environment, free_port

PROMPTS = ["a cat", "two red dogs", "the sea at night, in oil", "x"]
GENEVAL = [
    {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"},
    {"tag": "counting", "include": [{"class": "cow", "count": 2}], "exclude": [{"class": "cow", "count": 3}],
     "prompt": "a photo of two cows"},
    {"tag": "position", "include": [{"class": "cow", "count": 1}, {"class": "bed", "count": 1,
     "position": ["left of", 0]}], "prompt": "a photo of a bed left of a cow"},
]  # fmt: skip
OFFICIAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "prompts" / "geneval_official.jsonl"


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


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def geneval_file(folder: Path, rows: list[dict]) -> str:
    path = folder / "evaluation_metadata.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def scorer_reads(folder: Path) -> dict[int, tuple[dict, list[str]]]:
    """What GenEval's `evaluate_images.py` finds: folders named by digits, one JSON object, names of digits."""
    found = {}
    for name in os.listdir(folder):
        if (folder / name).is_dir() and name.isdigit():
            with open(folder / name / "metadata.jsonl") as opened:
                metadata = json.load(opened)
            pictures = [n for n in os.listdir(folder / name / "samples") if re.match(r"\d+\.png", n)]
            assert sorted(os.listdir(folder / name / "samples")) == sorted(pictures)
            found[int(name)] = metadata, sorted(pictures)
    return found


def check_geneval(folder: Path, rows: list[dict], size: int) -> None:
    """File by file: names, metadata, sizes, and the grid."""
    found = scorer_reads(folder)
    assert sorted(found) == list(range(len(rows)))
    for index, row in enumerate(rows):
        assert found[index] == (row, ["0000.png", "0001.png", "0002.png", "0003.png"])
        place = folder / f"{index:05d}"
        assert sorted(p.name for p in place.iterdir()) == ["grid.png", "metadata.jsonl", "samples"]
        pictures = [Image.open(place / "samples" / f"{i:04d}.png") for i in range(4)]
        assert {(p.mode, p.size) for p in pictures} == {("RGB", (size, size))}
        grid = Image.open(place / "grid.png")
        assert grid.size == (2 * size, 2 * size)
        assert grid.crop((size, 0, 2 * size, size)).tobytes() == pictures[1].tobytes()
        assert grid.crop((0, size, size, 2 * size)).tobytes() == pictures[2].tobytes()


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


@pytest.mark.skipif(not OFFICIAL.is_file(), reason="the official prompts are not here")
def test_official_geneval_prompts_killed_half_way(run, tmp_path):
    """Forty of them: killed in the middle and started again, the folder is that of a straight run, byte by byte."""
    rows = [json.loads(line) for line in OFFICIAL.read_text().splitlines()][::14]
    argv = ["--prompts", geneval_file(tmp_path, rows), "--layout", "geneval", "--batch_size", "16"]
    straight = run(*argv, name="straight")
    check_geneval(straight, rows, 16)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 210)
        with pytest.raises(KeyboardInterrupt):
            run(*argv, name="killed")
    there = files(tmp_path / "killed")
    pictures = [name for name in there if "/samples/" in name]
    assert 0 < len(pictures) < len(rows) * 4
    changed = {name: (tmp_path / "killed" / name).stat().st_mtime_ns for name in there if not name.startswith(".part")}
    run(*argv, name="killed")
    for name, when in changed.items():
        assert (tmp_path / "killed" / name).stat().st_mtime_ns == when, name
    assert files(tmp_path / "killed") == files(straight)


def stop_after(patch: pytest.MonkeyPatch, count: int) -> None:
    """The process ends when it is about to rename its `count`-th file."""
    replace, calls = os.replace, []

    def counted(*args):
        calls.append(args)
        if len(calls) == count:
            raise KeyboardInterrupt
        replace(*args)

    patch.setattr(generation.os, "replace", counted)


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


def test_only_what_is_missing_is_made(run, monkeypatch):
    argv = ["--prompt", *PROMPTS, "--num_images", "3", "--batch_size", "2"]
    out = run(*argv)
    before = files(out)
    for name in ("images/00001-0001.png", "records/00003-0002.json"):
        (out / name).unlink()
    sampled, original = [], generation.rollout
    monkeypatch.setattr(generation, "rollout", lambda *a, **k: sampled.append(a[2]) or original(*a, **k))
    run(*argv)
    assert sampled == [["two red dogs", "two red dogs"], ["x", "x"]]  # the batches of the two rows, whole
    assert files(out) == before


def test_a_whole_folder_loads_no_weights(run, monkeypatch, capsys):
    argv = ["--prompt", "a cat"]
    run(*argv)
    monkeypatch.setattr(JanusForInterleavedGeneration, "from_pretrained", None)
    run(*argv)
    assert "all 1 are there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, message",
    [
        (["--seed", "1"], "seed is 0 there and 1 here"),
        (["--guidance_scale", "2"], "guidance_scale is 5.0 there and 2.0 here"),
        (["--batch_size", "4"], "batch_size is 32 there and 4 here"),
        (["--prompt", "a dog"], "prompts_digest is"),
    ],
)
def test_a_folder_of_another_run_is_refused(run, capsys, change, message):
    run("--prompt", "a cat")
    with pytest.raises(SystemExit):
        run(*(change if "--prompt" in change else ["--prompt", "a cat", *change]))
    assert message in capsys.readouterr().err


def test_a_model_that_was_trained_further_is_another_one(run, janus_folder, tmp_path, capsys):
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(janus_folder, tmp_path / "model")
    run("--prompt", "a cat", model=str(tmp_path / "model"))
    weights = load_file(tmp_path / "model" / "model.safetensors")
    save_file({k: v + 1e-3 for k, v in weights.items()}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit):
        run("--prompt", "a cat", model=str(tmp_path / "model"))
    assert "weights is" in capsys.readouterr().err


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


def start(script: str, argv: list[str], log: Path, **extra: str) -> subprocess.Popen:
    """A script as a process of its own; stdout goes to `log`, stderr to `log.err`."""
    command = [sys.executable, "-m", f"janus_trl.scripts.{script}", *argv]
    with open(log, "w") as out, open(f"{log}.err", "w") as err:
        return subprocess.Popen(command, env=environment(**extra), stdout=out, stderr=err, start_new_session=True)


def test_two_processes_make_the_pictures_of_one(run, janus_folder, tmp_path):
    """Each makes its share, neither waits for the other, and the first alone reports: here on a benchmark."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    shared = ["--prompts", str(tmp_path / "prompts.txt"), "--num_images", "3", "--batch_size", "2"]
    straight, out = run(*shared, name="one"), tmp_path / "two"
    argv = ["--model_name_or_path", janus_folder, "--output_dir", str(out), *shared, "--benchmark", "prompts"]
    argv += ["--reward_funcs", "tests.test_generate.whiteness"]
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    logs = [tmp_path / f"log{rank}" for rank in range(2)]
    processes = [
        start("evaluate", argv, log, RANK=str(rank), LOCAL_RANK=str(rank), **address) for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    errors = [Path(f"{log}.err").read_text() for log in logs]
    assert codes == [0, 0], errors
    for rank in range(2):
        assert f"made 6 of 12 (process {rank} of 2)" in errors[rank]
    there = {name: content for name, content in files(out).items() if not name.startswith(".partial")}
    assert there == files(straight)
    line = json.loads(logs[0].read_text())
    assert line["reward"]["rows"] == 12 and logs[1].read_text() == ""


def whiteness(generated_images, **columns) -> list[float]:
    """A reward of the test's own: the largest value of each picture."""
    return [max(picture.convert("L").getextrema()) / 255 for picture in generated_images]


@pytest.mark.slow
@pytest.mark.skipif(not OFFICIAL.is_file(), reason="the official prompts are not here")
def test_all_geneval_prompts_after_sigkill(tmp_path):
    """The 553 prompts with the embedded model: killed at a random moment, started again, equal to a straight run."""
    rows = [json.loads(line) for line in OFFICIAL.read_text().splitlines()]
    assert len(rows) == 553
    argv = ["--model", "tiny", "--prompts", str(OFFICIAL), "--layout", "geneval", "--max_text_length", "0"]
    argv += ["--batch_size", "64"]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    generate.main([*argv, "--output_dir", str(straight)])
    check_geneval(straight, rows, 32)
    process = start("generate", [*argv, "--output_dir", str(killed)], tmp_path / "log")
    while len(list(killed.glob("*/samples/*.png"))) < 553 * 2:
        assert process.poll() is None, (tmp_path / "log.err").read_text()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (killed / "samples.jsonl").exists()
    generate.main([*argv, "--output_dir", str(killed)])
    assert files(killed) == files(straight)
