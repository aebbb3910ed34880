"""Weight files are checked after writing: missing, empty, misshaped and untrained tensors are refused."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from janus_trl.checkpoints import CheckpointError
from janus_trl.modeling import JanusForInterleavedGeneration
from janus_trl.weight_files import ADAPTER, check_moved, check_weights, hub_id, mend_adapter_config, uses_lora
from tests.grpo import lora
from tests.tiny import build_random_janus


@pytest.fixture
def adapter(model, tmp_path):
    """A PEFT model with a `lora_B` that moved, saved."""
    model = get_peft_model(model, lora())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    return model


def rewrite(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_model_passes_tied_or_not(tmp_path, tied):
    build_random_janus(str(tmp_path), tied=tied)
    check_weights(tmp_path, JanusForInterleavedGeneration.from_pretrained(str(tmp_path), dtype=torch.float32))


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.update({next(iter(t)): torch.zeros(0)}), "1 tensors are empty.*ZeRO-3"),
    (lambda t: t.pop(next(iter(t))), "was not written.*ZeRO-3"),
    (lambda t: t.update({next(iter(t)): torch.zeros(3)}), r"with shape \(3,\) instead of"),
    (lambda t: t.clear(), "no tensor"),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_a_file_that_is_not_whole_is_refused(request, tmp_path, kind, change, message):
    model = request.getfixturevalue("model" if kind == "full" else "adapter")
    if kind == "full":
        model.save_pretrained(tmp_path)
    check_weights(tmp_path, model)
    rewrite(next(tmp_path.glob("*.safetensors")), change)
    with pytest.raises(CheckpointError, match=message):
        check_weights(tmp_path, model)


def test_a_file_that_was_cut_short_is_refused(model, tmp_path):
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_weights(tmp_path, model)


@pytest.mark.parametrize("config", [
    {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "lora_only"},
])  # fmt: skip
def test_other_kinds_of_adapters_pass(model, tmp_path, config):
    model = get_peft_model(model, LoraConfig(r=2, target_modules=r".*language_model.*q_proj", **config))
    model.save_pretrained(tmp_path)
    check_weights(tmp_path, model)


def test_an_adapter_that_did_not_move_is_refused_and_a_part_of_it_is_named(adapter, tmp_path):
    assert check_moved(tmp_path) is None
    rewrite(tmp_path / ADAPTER, lambda t: t.update({n: w * ("layers.0" in n) for n, w in t.items()}))
    assert "7 of 14 lora_B" in check_moved(tmp_path)
    rewrite(tmp_path / ADAPTER, lambda t: t.update({n: w * ("lora_B" not in n) for n, w in t.items()}))
    with pytest.raises(CheckpointError, match="all 14 lora_B are still 0"):
        check_moved(tmp_path)


def test_only_an_adapter_that_starts_at_zero_has_to_move(model):
    assert not uses_lora(model)
    assert uses_lora(get_peft_model(model, lora()))


def test_an_adapter_names_the_hub_id_of_its_base_and_no_class_of_ours(model, tmp_path):
    get_peft_model(model, LoraConfig(r=2, target_modules=r".*language_model.*q_proj")).save_pretrained(tmp_path)
    mend_adapter_config(tmp_path, "org/janus")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/janus"
    assert config["auto_mapping"]["base_model_class"] == "JanusForConditionalGeneration"
    assert config["auto_mapping"]["parent_library"] == "transformers.models.janus.modeling_janus"


def test_the_hub_id_is_found_in_the_cache_of_the_hub(model, tmp_path):
    assert hub_id(model) is None  # a local folder
    assert hub_id(model, "org/name") == "org/name"
    snapshot = tmp_path / "models--org--janus-1b" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    model.config._name_or_path = str(snapshot)
    assert hub_id(model) == "org/janus-1b"
