"""Merging: base + adapter in float32, measured, and refused where the adapter does not belong to the base."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import JanusForConditionalGeneration, JanusProcessor

from janus_trl.merging import compare, load_adapter, merge_into_base, probe
from janus_trl.modeling import JanusForInterleavedGeneration, bind_special_ids
from janus_trl.scripts import merge
from janus_trl.weight_files import ADAPTER
from tests.grpo import lora


@pytest.fixture
def adapter(janus_folder, processor, tmp_path) -> Path:
    """A saved adapter whose `lora_B` are random, with a processor beside it."""
    folder = tmp_path / "adapter"
    model = JanusForInterleavedGeneration.from_pretrained(janus_folder, dtype=torch.float32)
    tuned = get_peft_model(model, lora())
    torch.manual_seed(0)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    tuned.save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "recipe.yaml").write_text("task: t2i\n")
    return folder


def run(adapter: Path, output: Path, *argv: str) -> None:
    merge.main(["--adapter", str(adapter), "--output_dir", str(output), *argv])


def test_the_merged_folder_is_stock_janus_equal_to_base_and_adapter(adapter, janus_folder, tmp_path, capsys):
    run(adapter, tmp_path / "out", "--dtype", "float32")
    stock, info = JanusForConditionalGeneration.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(stock) is JanusForConditionalGeneration and not any("lora" in n for n in stock.state_dict())
    base = JanusForConditionalGeneration.from_pretrained(janus_folder, dtype=torch.float32)
    with_adapter = PeftModel.from_pretrained(base, adapter).eval()
    ids = torch.randint(10, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (stock.eval()(ids).logits - with_adapter(input_ids=ids).logits).abs().max()
    assert difference < 1e-4
    out = capsys.readouterr().out
    assert out.count("greedy image codes equal, greedy text equal") == 2
    assert JanusProcessor.from_pretrained(tmp_path / "out").num_image_tokens == 16
    card = (tmp_path / "out" / "README.md").read_text()
    assert "merged in float32: max logit difference" in card and "task: t2i" in card
    assert "JanusForConditionalGeneration.from_pretrained" in card and "PeftModel" not in card


def test_bfloat16_is_rounded_once_and_its_difference_is_told(adapter, tmp_path, capsys):
    run(adapter, tmp_path / "out")
    lines = {line.split(",")[1].split(":")[0].strip(): line for line in capsys.readouterr().out.splitlines()[:2]}
    exact, rounded = (
        float(lines[name].split("difference ")[1].split(" ")[0]) for name in ("merged in float32", "saved in bfloat16")
    )
    assert exact < 1e-4 < rounded
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {w.dtype for w in weights.values() if w.is_floating_point()} == {torch.bfloat16}


def test_a_renamed_key_is_refused(adapter, model):
    tensors = load_file(adapter / ADAPTER)
    first = next(iter(tensors))
    tensors[first.replace("layers.0", "layer.0")] = tensors.pop(first)
    save_file(tensors, adapter / ADAPTER, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="1 keys of the adapter are missing .* and 1 are unknown"):
        load_adapter(model, adapter)


def test_a_merge_that_yields_the_base_is_refused(adapter, model, monkeypatch):
    tuned = load_adapter(model, adapter)
    base = tuned.get_base_model()

    def unload(**kwargs):
        return tuned.unload()

    monkeypatch.setattr(tuned, "merge_and_unload", unload)
    with pytest.raises(ValueError, match="14 of 14 modules did not change by merging"):
        merge_into_base(tuned)
    assert base is not None


def test_a_probe_tells_two_models_apart(adapter, model, processor, janus_folder):
    before = probe(model, processor)
    tuned = load_adapter(model, adapter).eval()
    after = probe(tuned.get_base_model(), processor, before.codes)
    apart, equal = compare(before, after), compare(before, before)
    assert apart.text > 0.1 and apart.image > 0.1
    assert equal.text == equal.image == 0 and equal.same_codes and equal.same_text
    stock = JanusForInterleavedGeneration.from_pretrained(janus_folder, dtype=torch.float32).eval()
    bind_special_ids(stock, processor)
    assert compare(before, probe(stock, processor)).text == 0


@pytest.mark.parametrize(("argv", "message"), [
    ([], "adapter is not set"),
    (["--adapter", "nowhere", "--output_dir", "out"], "has no adapter_model.safetensors"),
    (["--adapter", "{adapter}", "--output_dir", "{adapter}"], "is the folder of the adapter"),
    (["--adapter", "{adapter}", "--output_dir", "out", "--dtype", "bfloat"], "Did you mean 'bfloat16'"),
    (["--adapter", "{adapter}", "--output_dir", "out", "--base", "nowhere"], "no checkpoint found"),
])  # fmt: skip
def test_bad_arguments_are_refused_before_weights_load(adapter, capsys, argv, message):
    with pytest.raises(SystemExit) as stop:
        merge.main([word.format(adapter=adapter) for word in argv])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_the_base_that_the_adapter_names_is_the_default(adapter, janus_folder):
    named = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert merge.configure(["--adapter", str(adapter), "--output_dir", "out"]).base == named == janus_folder
