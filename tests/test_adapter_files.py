"""Adapters by Hub id, out of the cache: generate and merge use them, training refuses them with what to do."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from peft import get_peft_model
from safetensors.torch import load_file

from janus_trl.adapter_files import adapter_base, adapter_folder, is_adapter
from janus_trl.inference import base_checkpoint, load, trained_length
from janus_trl.recipe import resolve_model
from janus_trl.scripts import generate, merge
from tests.grpo import lora

NAME = "owner/adapter"


@pytest.fixture
def cached(model, processor, janus_folder, tmp_path, monkeypatch) -> Path:
    """The folder of an adapter in a cache of the Hub; the Hub itself is out of reach."""
    repo = tmp_path / "cache" / "models--owner--adapter"
    folder = repo / "snapshots" / ("0" * 40)
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(folder.name)
    adapted = get_peft_model(model, lora())
    adapted.peft_config["default"].base_model_name_or_path = janus_folder
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    adapted.save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "janus_trl.json").write_text(json.dumps({"sampling": {"max_reasoning_length": 3}}))
    (folder / "recipe.yaml").write_text("task: t2i\n")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return folder


def test_a_hub_id_is_told_to_be_an_adapter_with_its_base_and_length(cached, janus_folder):
    assert is_adapter(NAME) and is_adapter(str(cached)) and not is_adapter(janus_folder)
    assert not any(is_adapter(name) for name in ("owner/other", "tiny", "gone/base/x", "", None))
    assert adapter_base(NAME) == base_checkpoint(NAME) == janus_folder
    assert adapter_folder(NAME) == str(cached) and adapter_folder(janus_folder) is None
    assert trained_length(NAME, "t2i") == trained_length(str(cached), "t2i") == 3


def test_generate_draws_with_an_adapter_named_by_its_hub_id(cached, janus_folder, tmp_path):
    tuned, _ = load(NAME, janus_folder)
    (base, _), (local, _) = load(janus_folder, janus_folder), load(str(cached), janus_folder)
    weights = [dict(model.named_parameters()) for model in (tuned, local, base)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert any(not torch.equal(value, weights[2][name]) for name, value in weights[0].items())
    generate.main(["--model", NAME, "--prompt", "a cat", "--output_dir", str(tmp_path / "out")])
    assert (tmp_path / "out" / "images" / "00000-0000.png").is_file()


def test_merge_takes_a_hub_id(cached, tmp_path):
    merge.main(["--adapter", NAME, "--output_dir", str(tmp_path / "hub"), "--dtype", "float32"])
    merge.main(["--adapter", str(cached), "--output_dir", str(tmp_path / "local"), "--dtype", "float32"])
    merged, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("hub", "local"))
    assert all(torch.equal(value, expected[name]) for name, value in merged.items())
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "with the adapter adapter merged" in card and "task: t2i" in card and "max_new_tokens=3" in card


@pytest.mark.parametrize("by_id", [True, False])
def test_training_from_an_adapter_says_to_merge_it_first(cached, tmp_path, by_id):
    shutil.copytree(cached, tmp_path / "run")
    name = NAME if by_id else str(tmp_path / "run")
    with pytest.raises(ValueError, match=r"is an adapter.*janus_trl.scripts.merge --adapter") as refusal:
        resolve_model(name)
    assert f"--adapter {name} --output_dir {Path(name).name}-merged" in str(refusal.value)
