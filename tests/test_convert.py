"""Original DeepSeek checkpoints become stock transformers folders: equal weights, equal codes, clear refusals."""

import json

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import GenerationConfig, JanusConfig, JanusForConditionalGeneration, JanusProcessor

from janus_trl.conversion import convert_checkpoint
from janus_trl.conversion_keys import check_weights, converted_config, converted_name, converted_tensors
from janus_trl.modeling import JanusForInterleavedGeneration, bind_special_ids
from janus_trl.prompts import encode_prompts
from janus_trl.sampling import SamplingSettings, rollout
from janus_trl.scripts import convert
from tests.original_janus import (
    PublishedModel,
    original_config,
    original_names,
    pad_id,
    prompt_ids,
    published_config,
    save_original,
    stock_model,
)
from tests.tiny import build_processor

FORMS = [("1b", "bin"), ("7b", "bin_shards"), ("1b", "safetensors_shards"), ("7b", "safetensors")]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Both shapes: the converted folder and the model it has to equal."""
    found = {}
    for shape, form in FORMS[:2]:
        folder = tmp_path_factory.mktemp(shape)
        model = save_original(folder / "original", shape, form)
        convert.main(["--input", str(folder / "original"), "--output", str(folder / "out"), "--max_shard_gb", "2e-4"])
        found[shape] = folder / "out", model
    return found


@pytest.mark.parametrize("shape, form", FORMS)
def test_weights_equal_those_of_the_source(tmp_path, shape, form):
    source = save_original(tmp_path / "original", shape, form).state_dict()
    done = convert_checkpoint(tmp_path / "original", tmp_path / "out", shard_bytes=200_000)
    assert done.shards > 2 and done.dtype == torch.bfloat16 and not done.tied
    model, info = JanusForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = model.state_dict()
    assert state.keys() == source.keys() and sum(t.numel() for t in source.values()) == done.parameters
    for name, tensor in source.items():
        assert tensor.dtype == state[name].dtype == torch.bfloat16 and torch.equal(tensor, state[name]), name
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{done.shards:05d}.safetensors" for i in range(done.shards)]
    assert all((tmp_path / "out" / name).stat().st_size < 300_000 for name in files)
    assert list(tmp_path.glob(".out*")) == []


@pytest.mark.parametrize(
    "language, width, layers",
    [
        (
            {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16}
            | {"num_hidden_layers": 24},
            2048,
            24,
        ),
        ({"num_hidden_layers": 30}, 4096, 30),  # 7B: what equals the defaults of Llama is left out
    ],
    ids=["1b", "7b"],
)
def test_the_published_sizes_are_found(language, width, layers):
    """Shapes alone (meta tensors): Janus-Pro 1B and 7B as transformers has them convert to themselves."""
    text = {"model_type": "llama", "vocab_size": 102400, "hidden_size": width, "num_hidden_layers": layers}
    text |= {"intermediate_size": language.get("intermediate_size", 11008)}
    text |= {"num_attention_heads": width // 128, "num_key_value_heads": width // 128}
    config = JanusConfig(
        text_config=text,
        vision_config={"projection_dim": width},
        vq_config={"projection_dim": width, "image_token_embed_dim": width},
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        state = original_names(JanusForConditionalGeneration(config))
    ids = {"pad": 100002, "bos": 100000, "eos": 100001, "image": 100581}
    found = converted_config(published_config(language, width), state, ids)
    check_weights(found, {k: v for name, t in state.items() for k, v in converted_tensors(name, t).items()})
    assert found.vq_config.channel_multiplier == [1, 1, 2, 2, 4] and found.vq_config.num_res_blocks == 2
    assert (found.vq_config.base_channels, found.vq_config.latent_channels) == (128, 256)
    vision = found.vision_config
    assert (vision.num_hidden_layers, vision.num_attention_heads, vision.hidden_size) == (24, 16, 1024)
    assert (vision.patch_size, vision.num_image_tokens, vision.mlp_ratio) == (16, 576, 4.0)
    assert (found.text_config.hidden_size, found.text_config.num_attention_heads) == (width, width // 128)


@pytest.mark.parametrize("shape", ["1b", "7b"])
def test_the_configuration_is_that_of_the_model(converted, shape):
    folder, model = converted[shape]
    ours = JanusForConditionalGeneration.from_pretrained(folder).config
    for part in ("text_config", "vision_config", "vq_config"):
        expected, found = getattr(model.config, part).to_dict(), getattr(ours, part).to_dict()
        ignored = {"dtype", "transformers_version", "_name_or_path", "num_patches"}
        assert {k: v for k, v in found.items() if k not in ignored} == {
            k: list(v) if isinstance(v, tuple) else v for k, v in expected.items() if k not in ignored
        }
    assert ours.architectures == ["JanusForConditionalGeneration"] and ours.tie_word_embeddings is False
    assert ours.image_token_id == model.config.image_token_id


@pytest.mark.parametrize("shape", ["1b", "7b"])
def test_greedy_codes_are_those_of_the_published_loop(converted, shape):
    folder, source = converted[shape]
    processor = JanusProcessor.from_pretrained(folder)
    model = JanusForInterleavedGeneration.from_pretrained(folder, dtype=torch.float32)
    bind_special_ids(model, processor)
    published = PublishedModel(original_config(shape, len(processor.tokenizer))).load(original_names(source))
    prompts = ["a cat", "two red dogs on a boat"]
    result = rollout(model, processor, prompts, SamplingSettings(guidance_scale=5.0, greedy=True), [0, 1])
    for prompt, ids in zip(prompts, result.completion_ids, strict=True):
        codes = [i - model.vocab_size for i in ids if i >= model.vocab_size]
        expected = published.greedy_codes(prompt_ids(prompt), pad_id(), model.num_image_codes, 5.0)
        assert codes == expected and len(set(codes)) > 1
    assert result.completion_ids[0] != result.completion_ids[1]


def test_the_processor_is_that_of_janus_pro(converted):
    folder, _ = converted["1b"]
    processor, reference = JanusProcessor.from_pretrained(folder), build_processor()
    assert processor.use_default_system_prompt is True and processor.num_image_tokens == 16
    assert processor.image_processor.size["height"] == 16
    text = "<|User|>: a cat\n\n<|Assistant|>:"
    assert (
        encode_prompts(processor, ["a cat"], draws=True)["input_ids"][0].tolist() == reference.tokenizer(text).input_ids
    )
    picture = Image.new("RGB", (16, 16))
    rendered = processor.tokenizer.decode(encode_prompts(processor, ["what?"], [[picture]])["input_ids"][0])
    marks = "<begin_of_image>" + "<image_placeholder>" * 16 + "<end_of_image>\nwhat?\n\n<|Assistant|>:"
    assert rendered.replace(" ", "").endswith(marks)
    assert processor.tokenizer.pad_token == "<｜▁pad▁｜>" and processor.tokenizer.padding_side == "left"
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.guidance_scale == 5.0 and generation.temperature == 1.0
    boi = reference.tokenizer.convert_tokens_to_ids("<begin_of_image>")
    assert generation.generation_kwargs["boi_token_id"] == boi


def test_plain_words_for_the_older_models(tmp_path):
    save_original(tmp_path / "original", "1b")
    convert_checkpoint(tmp_path / "original", tmp_path / "out", template="janus")
    processor = JanusProcessor.from_pretrained(tmp_path / "out")
    message = [{"role": "user", "content": [{"type": "text", "text": "a cat"}]}]
    rendered = processor.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert rendered == "User: a cat\n\nAssistant:"


def test_a_checkpoint_without_its_own_head_is_tied(tmp_path):
    save_original(tmp_path / "original", "1b", change=lambda names: names.pop("language_model.lm_head.weight"))
    assert convert_checkpoint(tmp_path / "original", tmp_path / "out").tied
    model = JanusForInterleavedGeneration.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_an_interrupted_conversion_leaves_nothing_that_loads(tmp_path, monkeypatch):
    save_original(tmp_path / "original", "1b", "bin_shards")
    from janus_trl import conversion

    written, write = [], conversion.save_file

    def failing(buffer, path, **kwargs):
        if len(written) == 2:
            raise OSError("No space left on device")
        written.append(path)
        write(buffer, path, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "save_file", failing)
        with pytest.raises(OSError):
            convert_checkpoint(tmp_path / "original", tmp_path / "out", shard_bytes=100_000)
    assert not (tmp_path / "out").exists()
    convert_checkpoint(tmp_path / "original", tmp_path / "out", shard_bytes=100_000)
    JanusForInterleavedGeneration.from_pretrained(tmp_path / "out")
    assert list(tmp_path.glob(".out*")) == []


def test_memory_holds_one_output_file_and_no_code_is_run(tmp_path, monkeypatch):
    """Everything that is cloned stands in the buffer of one file; pickles are read with weights_only."""
    from janus_trl import conversion

    sizes, write, read, flags = [], conversion.save_file, torch.load, []

    def measured(buffer, path, **kwargs):
        sizes.append(sum(t.numel() * t.element_size() for t in buffer.values()))
        write(buffer, path, **kwargs)

    monkeypatch.setattr(conversion, "save_file", measured)
    monkeypatch.setattr(
        torch, "load", lambda *a, **k: flags.append((k["weights_only"], k.get("mmap"))) or read(*a, **k)
    )
    save_original(tmp_path / "original", "7b", "bin")
    largest = max(t.numel() * 2 for t in stock_model("7b", 109).state_dict().values())
    convert_checkpoint(tmp_path / "original", tmp_path / "out", shard_bytes=largest)
    assert max(sizes) <= largest and len(sizes) > 5
    assert set(flags) == {(True, True)}


def test_aligner_places_without_weights_are_not_renamed():
    assert converted_name("aligner.layers.4.bias") == "model.aligner.hidden_layers.1.bias"
    assert converted_name("aligner.layers.1.bias") == "model.aligner.layers.1.bias"  # unexpected, and named so


def test_every_weight_file_can_be_opened_by_itself(converted):
    folder, model = converted["7b"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = {}
    for file in set(index["weight_map"].values()):
        with safe_open(folder / file, framework="pt") as opened:
            names |= dict.fromkeys(opened.keys(), file)
    assert names == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(2 * t.numel() for t in model.state_dict().values())
