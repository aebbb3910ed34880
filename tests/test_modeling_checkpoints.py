"""Special ids and saved folders: what the model takes from its checkpoint and what it writes."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import JanusForConditionalGeneration, JanusProcessor

import janus_trl
from janus_trl.modeling import FORBIDDEN_LOGIT, JanusForInterleavedGeneration, bind_special_ids
from tests.joint import joint_batch, score
from tests.tiny import BOI, BOS, EOI, EOS, PAD, PLACEHOLDER, build_processor, build_random_janus

# ---- special ids ----------------------------------------------------------------------------------------------------


SHUFFLED = (EOI, PLACEHOLDER, PAD, EOS, BOI, BOS)


def test_shuffled_special_ids_give_the_same_scores(model, tmp_path):
    """The tables of the same model, rows moved to where a tokenizer with another order of special tokens has them."""
    other_processor = build_processor(SHUFFLED)
    build_random_janus(str(tmp_path), processor=other_processor)
    other = JanusForInterleavedGeneration.from_pretrained(str(tmp_path), dtype=torch.float32).eval()
    bind_special_ids(other, other_processor)
    ours = build_processor().tokenizer.convert_tokens_to_ids([EOI, PLACEHOLDER, PAD, EOS, BOI, BOS])
    moved = torch.arange(model.vocab_size)
    moved[torch.tensor(ours)] = torch.arange(6)  # our id -> its id
    state = {k: v.clone() for k, v in model.state_dict().items()}
    for name in ("lm_head.weight", "model.language_model.embed_tokens.weight"):
        state[name] = torch.empty_like(state[name]).index_copy(0, moved, state[name])
    other.load_state_dict(state)
    assert other.special_ids != model.special_ids and other.special_ids.pad == 2

    ids, mask, labels = joint_batch(model)

    def move(x):
        return torch.where((x >= 0) & (x < model.vocab_size), moved[x.clamp(0, model.vocab_size - 1)], x)

    with torch.no_grad():
        a = score(model, ids, mask, labels, guidance_scale=5.0)
        b = score(other, move(ids), mask, move(labels), guidance_scale=5.0)
    torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(a.loss, b.loss)


def test_a_tokenizer_that_disagrees_with_the_checkpoint_is_refused(model):
    with pytest.raises(ValueError, match=r"boi_token_id = 4, but its tokenizer maps '<begin_of_image>' to 5"):
        bind_special_ids(model, build_processor((PAD, BOS, EOS, PLACEHOLDER, EOI, BOI)))
    with pytest.raises(ValueError, match=r"same folder or Hub id"):
        bind_special_ids(model, build_processor((PAD, BOS, PLACEHOLDER, EOS, BOI, EOI)))


def test_binding_twice_changes_nothing(model, processor):
    before = model.special_ids
    bind_special_ids(model, processor)
    assert model.special_ids == before and before.eos == (processor.tokenizer.eos_token_id,)


def test_the_text_mask_follows_the_task(model):
    special = model.special_ids
    assert set(special.forbidden_in_text(True)) == {
        special.pad, special.bos, special.image_placeholder, special.end_of_image
    }  # fmt: skip
    assert set(special.forbidden_in_text(False)) == {*special.forbidden_in_text(True), special.begin_of_image}
    bias = model.text_bias(True, model.lm_head.weight)
    assert (bias == FORBIDDEN_LOGIT).sum() == 4 and (bias == 0).sum() == model.vocab_size - 4


def test_no_special_id_or_size_is_written_into_the_code():
    for path in Path(janus_trl.__file__).parent.rglob("*.py"):
        source = re.sub(r'""".*?"""', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        code = "\n".join(re.sub(r"#.*", "", line) for line in source.splitlines())
        assert not re.search(r"\b1000\d\d\b|\b576\b", code), path.name


# ---- save and load --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_folder_is_stock_janus_with_equal_weights(tmp_path, tied):
    build_random_janus(str(tmp_path / "start"), tied=tied)
    processor = JanusProcessor.from_pretrained(tmp_path / "start")
    model = JanusForInterleavedGeneration.from_pretrained(str(tmp_path / "start"), dtype=torch.float32)
    bind_special_ids(model, processor)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    model.save_pretrained(tmp_path / "saved")
    stock, info = JanusForConditionalGeneration.from_pretrained(
        str(tmp_path / "saved"), dtype=torch.float32, output_loading_info=True
    )
    assert type(stock) is JanusForConditionalGeneration
    assert stock.config.architectures == ["JanusForConditionalGeneration"]
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = stock.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert "JanusForInterleavedGeneration" not in (tmp_path / "saved" / "config.json").read_text()
    reloaded = JanusForInterleavedGeneration.from_pretrained(str(tmp_path / "saved"), dtype=torch.float32)
    assert reloaded.special_ids == model.special_ids  # without a second bind


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path, change):
    build_random_janus(str(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    key = "model.generation_head.vision_head.bias"
    if change == "missing":
        del weights[key]
    else:
        key, weights["model.surplus.weight"] = "model.surplus.weight", torch.zeros(2)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"1 {change} keys, the first: \['{re.escape(key)}'\]"):
        JanusForInterleavedGeneration.from_pretrained(str(tmp_path))


def test_loading_info_is_still_returned_on_request(janus_folder):
    model, info = JanusForInterleavedGeneration.from_pretrained(janus_folder, output_loading_info=True)
    assert isinstance(model, JanusForInterleavedGeneration) and not info["missing_keys"]
