"""What a training forward and backward allocate: no vocabulary-wide tensor, no second stream, no repeated picture."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import JanusProcessor

import janus_trl.modeling as modeling
from janus_trl.modeling import JanusForInterleavedGeneration, bind_special_ids
from janus_trl.repeats import distinct_rows
from janus_trl.trainable import freeze_for_task
from tests.grpo import lora, pictures_dataset, steps
from tests.joint import joint_batch, score
from tests.tiny import build_config, build_processor, build_random_janus

CODEBOOK = 16384  # that of Janus-Pro: the chunks are those of real runs
VOCABULARY = 20000
ROWS, PROMPT = 8, 64


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        self.elements = max(self.elements, *sizes, 0)
        return out


@pytest.fixture(scope="module")
def wide():
    """A small Janus with the codebook of Janus-Pro and a wide vocabulary."""
    processor = build_processor()
    config = build_config(processor, CODEBOOK)
    config.text_config.vocab_size = VOCABULARY
    torch.manual_seed(0)
    model = JanusForInterleavedGeneration(config)
    ids = processor.tokenizer
    model.generation_config.pad_token_id, model.generation_config.bos_token_id = ids.pad_token_id, ids.bos_token_id
    model.generation_config.eos_token_id = ids.eos_token_id
    bind_special_ids(model, processor)
    return model.eval()


def t2i_batch(model, text: int):
    """`ROWS` rows of a long prompt, `text` ids of reasoning and the codes; `input_ids`, mask, labels."""
    special, v = model.special_ids, model.vocab_size
    prompt = torch.randint(10, v, (ROWS, PROMPT))
    reasoning = torch.randint(10, v, (ROWS, text))
    opener = torch.full((ROWS, 1), special.begin_of_image)
    codes = v + torch.randint(0, CODEBOOK, (ROWS, model.num_image_codes))
    ids = torch.cat([prompt, reasoning, opener, codes], 1)
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    labels[-1] = -100  # a row that is masked
    return ids, torch.ones_like(ids), labels


def i2t_batch(model, answer: int):
    """`ROWS` rows of a picture in a long prompt and an answer, and the pictures."""
    special = model.special_ids
    ids = torch.randint(10, model.vocab_size, (ROWS, PROMPT + answer))
    ids[:, 1:17] = special.image_placeholder
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    return ids, torch.ones_like(ids), labels, torch.rand(ROWS, 3, 16, 16)


def largest_of(model, ids, mask, labels, **kwargs) -> int:
    with Largest() as seen:
        score(model, ids, mask, labels, **kwargs).loss.backward()
    model.zero_grad()
    return seen.elements


def allowed(model, scored: int) -> int:
    """A tile of the scored positions, or a weight."""
    return max(scored * modeling.VOCABULARY_CHUNK, *(p.numel() for p in model.parameters()))


# ---- heads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logp_guidance", ["guided", "conditional"])
@pytest.mark.parametrize("text", [0, 3])
def test_no_tensor_of_positions_times_codes_exists_in_forward_or_backward(wide, logp_guidance, text):
    ids, mask, labels = t2i_batch(wide, text)
    codes = (ROWS - 1) * wide.num_image_codes
    largest = largest_of(wide, ids, mask, labels, guidance_scale=5.0, logp_guidance=logp_guidance)
    assert codes * modeling.VOCABULARY_CHUNK <= largest <= allowed(wide, codes)
    assert largest < codes * CODEBOOK
    assert largest < ids.numel() * VOCABULARY / 8


def test_no_tensor_of_prompt_positions_times_vocabulary_exists_in_an_answer(wide):
    *batch, pixels = i2t_batch(wide, answer=12)
    largest = largest_of(wide, *batch, pixel_values=pixels)
    assert ROWS * 12 * modeling.VOCABULARY_CHUNK <= largest <= allowed(wide, ROWS * 12)
    assert largest < ROWS * 12 * VOCABULARY < batch[0].numel() * VOCABULARY / 6


def test_the_watch_would_see_full_logits(wide):
    ids, _, _ = t2i_batch(wide, 0)
    with Largest() as seen, torch.no_grad():
        wide.lm_head(torch.zeros(2, ids.shape[1], 32))
    assert seen.elements == 2 * ids.shape[1] * VOCABULARY


# ---- the unconditional stream ---------------------------------------------------------------------------------------


def saved_elements(model, batch, **kwargs) -> int:
    """Elements that autograd keeps for the backward, each storage once, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive: its address is not given away again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        score(model, *batch, **kwargs).loss.backward()
    model.zero_grad()
    return sum(t.untyped_storage().nbytes() // t.element_size() for t in kept.values())


def test_a_detached_unconditional_stream_keeps_half_of_the_activations(model):
    batch = joint_batch(model)
    alone = saved_elements(model, batch, guidance_scale=1.0)
    both = saved_elements(model, batch, guidance_scale=5.0)
    detached = saved_elements(model, batch, guidance_scale=5.0, detach_unconditional=True)
    assert 1.8 * alone < both < 2.2 * alone
    assert alone <= detached < 1.2 * alone


# ---- gradient checkpointing -----------------------------------------------------------------------------------------


def layer_inputs_kept(model, batch) -> int:
    """Tensors of a hidden state's shape (`[rows of both streams, positions, hidden]`) that the backward waits for."""
    kept = []

    def pack(tensor):
        if tensor.shape == (6, batch[0].shape[1], 32):
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = score(model, *batch, guidance_scale=5.0).loss
    loss.backward()
    return len({tensor.data_ptr() for tensor in kept})


def test_checkpoints_keep_one_hidden_state_of_each_layer(model):
    batch, layers = joint_batch(model), model.config.text_config.num_hidden_layers
    model.train()
    assert layer_inputs_kept(model, batch) > 4 * layers
    model.gradient_checkpointing_enable()
    assert layer_inputs_kept(model, batch) <= layers + 3  # and around the last norm


@pytest.mark.parametrize("peft", [False, True])
def test_training_checkpoints_every_layer_without_reentering(trainer_of, peft):
    trainer, seen = trainer_of(gradient_checkpointing=True, peft=lora() if peft else None), []

    layers = trainer.base_model.model.language_model.layers

    def look(layer):
        if layer.training and torch.is_grad_enabled():
            seen.append((layer.gradient_checkpointing, layer._gradient_checkpointing_func.keywords["use_reentrant"]))

    for layer in layers:
        layer.mlp.register_forward_pre_hook(lambda *_, layer=layer: look(layer))
    trainer.train()
    assert len(seen) == 2 * len(layers)  # in the forward, and again in the backward
    assert set(seen) == {(True, False)}


# ---- pictures -------------------------------------------------------------------------------------------------------


def test_distinct_rows_come_in_order_and_say_which_they_equal():
    a, b, c = torch.rand(3, 2, 4)
    c = b.flip(-1)  # the same sum
    values, which = distinct_rows(torch.stack([b, a, b, c, a, c]))
    assert torch.equal(values, torch.stack([b, a, c])) and which.tolist() == [0, 1, 0, 2, 1, 2]
    values, which = distinct_rows(torch.rand(0, 2, 4))
    assert values.shape == (0, 2, 4) and which.tolist() == []


def test_a_picture_that_a_micro_batch_repeats_goes_through_the_vision_tower_once(model, monkeypatch):
    torch.manual_seed(0)
    ids = torch.randint(10, model.vocab_size, (6, 24))
    ids[:, 1:17] = model.special_ids.image_placeholder
    pixels = torch.rand(2, 3, 16, 16)[torch.tensor([0, 0, 1, 0, 1, 1])]  # two groups of three
    rows, found = [], []
    model.model.vision_model.register_forward_hook(lambda _m, args, kw, _o: rows.append(
        len(args[0] if args else kw["pixel_values"])), with_kwargs=True)  # fmt: skip
    for distinct in (distinct_rows, lambda values: (values, torch.arange(len(values)))):
        monkeypatch.setattr(modeling, "distinct_rows", distinct)
        out = score(model, ids, torch.ones_like(ids), ids, pixel_values=pixels)
        out.loss.backward()
        found.append(
            (out.log_probs.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        )
        model.zero_grad()
    assert rows == [2, 6]
    (ours, gradients), (plain, expected) = found
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=0)
    assert set(gradients) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-4, msg=name)
    tower = [name for name in expected if name.startswith("model.vision_model.")]
    assert tower and any(expected[name].abs().max() > 1e-6 for name in tower)


def test_a_group_passes_the_vision_tower_once_in_rollout_and_replay(trainer_of):
    trainer = trainer_of(task="i2t", dataset=pictures_dataset((1, 1, 1, 1)))
    rows = []
    trainer.model.model.vision_model.register_forward_hook(lambda _m, args, kw, _o: rows.append(
        len(args[0] if args else kw["pixel_values"])), with_kwargs=True)  # fmt: skip
    trainer.train()
    assert rows == [1, 1]  # one group of four answers about one picture
    assert steps(trainer)[0]["logps/drift_max"] < 1e-5


# ---- what the optimizer holds ---------------------------------------------------------------------------------------


def test_the_text_head_is_frozen_where_no_text_is_sampled(trainer_of):
    trainer = trainer_of()
    before = trainer.model.lm_head.weight.clone()
    trainer.train()
    in_optimizer = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert torch.equal(trainer.model.lm_head.weight, before)
    assert in_optimizer == {id(p) for p in trainer.model.parameters() if p.requires_grad}
    assert id(trainer.model.lm_head.weight) not in in_optimizer
    assert trainer_of(max_reasoning_length=2).model.lm_head.weight.requires_grad


def test_a_text_head_that_is_tied_to_the_embeddings_stays_trained(tmp_path):
    build_random_janus(str(tmp_path), tied=True)
    model = JanusForInterleavedGeneration.from_pretrained(tmp_path)
    bind_special_ids(model, JanusProcessor.from_pretrained(tmp_path))
    freeze_for_task(model, "t2i", text=False)
    assert model.lm_head.weight.requires_grad and model.lm_head.weight is model.get_input_embeddings().weight
