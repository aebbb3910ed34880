"""What a conversion refuses, and that training on an original checkpoint points to it."""

import json

import pytest
import torch

from janus_trl.modeling import JanusForInterleavedGeneration
from janus_trl.scripts import convert, evaluate, grpo, sft
from tests.original_janus import save_original


@pytest.fixture
def refused(tmp_path, capsys):
    """Runs the script on `original`, which it has to refuse; returns its message."""

    def call(*argv: str) -> str:
        with pytest.raises(SystemExit) as stop:
            convert.main(["--input", str(tmp_path / "original"), "--output", str(tmp_path / "out"), *argv])
        assert stop.value.code == 2 and not (tmp_path / "out").exists()
        return capsys.readouterr().err

    return call


def drop(name):
    return lambda names: names.pop(name)


def add(name, *shape):
    return lambda names: names.update({name: torch.zeros(*shape)})


@pytest.mark.parametrize(
    "change, message",
    [
        (drop("gen_head.vision_head.bias"), "1 missing, the first: model.generation_head.vision_head.bias."),
        (drop("aligner.layers.2.weight"), "1 missing, the first: model.aligner.hidden_layers.0.weight."),
        (drop("vision_model.vision_tower.blocks.0.attn.qkv.bias"), "3 missing, the first: model.vision_model.encoder"),
        (add("gen_head.extra.weight", 3, 3), "1 unexpected, the first: model.generation_head.extra.weight."),
        (add("flow.weight", 2), "1 unexpected, the first: flow.weight."),
        (add("gen_embed.weight", 24, 4), "1 misshapen, the first: model.generation_embeddings.weight [24, 4] instead"),
        (drop("gen_vision_model.encoder.conv_in.weight"), "lacks gen_vision_model.encoder.conv_in.weight"),
    ],
)
def test_weights_that_do_not_fit_are_named_before_anything_is_written(tmp_path, refused, change, message):
    save_original(tmp_path / "original", "1b", change=change)
    assert message in refused()


@pytest.mark.parametrize(
    "file, key, value, message",
    [
        ("config.json", "model_type", "janus", "in the layout of transformers already"),
        ("config.json", "model_type", "llama", "has model_type 'llama'; an original Janus has 'multi_modality'"),
        ("config.json", "gen_head_config", None, "config.json lacks gen_head_config: it is no Janus"),
        ("special_tokens_map.json", "bos_token", "<s>", "lacks <s>: it is no tokenizer of Janus"),
        ("vision", "model_name", "siglip_large_patch16_385", "Did you mean 'siglip_large_patch16_384'?"),
    ],
)
def test_other_models_are_refused(tmp_path, refused, file, key, value, message):
    save_original(tmp_path / "original", "1b")
    path = tmp_path / "original" / ("config.json" if file == "vision" else file)
    content = json.loads(path.read_text())
    where = content["vision_config"]["params"] if file == "vision" else content
    where[key] = value
    if value is None:
        del content[key]
    path.write_text(json.dumps(content))
    assert message in refused()


def test_missing_files_and_options_are_named(tmp_path, refused, capsys):
    save_original(tmp_path / "original", "1b", "bin_shards")
    assert "template = 'janus_por' must be one of: auto, janus_pro, janus. Did you mean 'janus_pro'?" in refused(
        "--template", "janus_por"
    )
    (tmp_path / "original" / "pytorch_model-00002-of-00003.bin").unlink()
    assert "lacks pytorch_model-00002-of-00003.bin" in refused()
    for path in (tmp_path / "original").glob("pytorch_model*"):
        path.unlink()
    assert "has no weights; looked for model.safetensors and pytorch_model.bin" in refused()
    (tmp_path / "original" / "config.json").unlink()
    assert "has no config.json" in refused()
    with pytest.raises(SystemExit):
        convert.main(["--input", "no-such-owner/no-such-model", "--output", str(tmp_path / "out")])
    assert "neither a folder nor a checkpoint of the Hub" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        convert.main(["--input", "x"])
    assert "output is not set" in capsys.readouterr().err


def test_a_folder_that_exists_is_left_alone(tmp_path, capsys):
    save_original(tmp_path / "original", "1b")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(SystemExit):
        convert.main(["--input", str(tmp_path / "original"), "--output", str(tmp_path / "out")])
    assert "exists already" in capsys.readouterr().err and (tmp_path / "out" / "mine").read_text() == "kept"


def test_training_on_an_original_points_to_the_conversion(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(JanusForInterleavedGeneration, "from_pretrained", None)
    save_original(tmp_path / "original", "1b")
    for script, rewards in ((grpo, ["tiny_world"]), (sft, None), (evaluate, ["tiny_world"])):
        argv = ["--model_name_or_path", str(tmp_path / "original"), "--dataset_name", "tiny"]
        argv += ["--reward_funcs", *rewards] if rewards else []
        argv += ["--output_dir", str(tmp_path / "run"), "--bf16", "false"] if script is not evaluate else []
        with pytest.raises(SystemExit) as stop:
            script.main(argv)
        message = capsys.readouterr().err
        assert stop.value.code == 2 and "deepseek-community/Janus-Pro-1B" in message
        assert f"python -m janus_trl.scripts.convert --input {tmp_path / 'original'} --output" in message
