"""Joint ids: embeddings, and log-probs, entropies and gradients against a plain computation on full logits."""

import math

import pytest
import torch
from transformers import JanusForConditionalGeneration

import janus_trl
from janus_trl.modeling import guide
from tests.joint import PROMPT, TEXT, joint_batch, score


def positions(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


def plain_hidden(model, ids, mask):
    """Last hidden states `[B, L, H]`, each id looked up by hand in its own table."""
    v, janus = model.vocab_size, model.model
    codes = janus.generation_aligner(janus.generation_embeddings((ids - v).clamp(min=0)))
    embeds = torch.where((ids >= v).unsqueeze(-1), codes, janus.language_model.embed_tokens(ids.clamp(max=v - 1)))
    return janus.language_model(
        inputs_embeds=embeds, attention_mask=mask, position_ids=positions(mask), use_cache=False
    ).last_hidden_state


def plain_scores(model, ids, mask, labels, scale=1.0, temperature=1.0, image_temperature=1.0, detach=False):
    """Log-probs and entropies `[B, L-1]` from full logits of both heads at every position."""
    special, v = model.special_ids, model.vocab_size
    hidden, targets = plain_hidden(model, ids, mask)[:, :-1], labels[:, 1:]
    forbidden = torch.tensor([special.pad, special.bos, special.image_placeholder, special.end_of_image])
    logits = model.lm_head(hidden).index_fill(-1, forbidden, -math.inf) / temperature
    keep = (ids == special.bos) | (ids == special.begin_of_image) | (ids >= v)
    blank = torch.where(keep, ids, torch.tensor(special.pad))
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):  # the backbone; the head stays attached
        other = plain_hidden(model, blank, mask)[:, :-1]
    other = model.model.generation_head(other)
    image_logits = model.model.generation_head(hidden)
    image_logits = (other + scale * (image_logits - other)) / image_temperature
    is_code, at_text = targets >= v, (targets >= 0) & (targets < v) & ~torch.isin(targets, forbidden)
    text = logits.log_softmax(-1).gather(-1, targets.clamp(0, v - 1).unsqueeze(-1)).squeeze(-1)
    image = image_logits.log_softmax(-1).gather(-1, (targets - v).clamp(min=0).unsqueeze(-1)).squeeze(-1)
    zero = torch.zeros_like(text)
    log_probs = torch.where(is_code, image, torch.where(at_text, text, zero))
    entropies = [torch.distributions.Categorical(logits=x).entropy() for x in (logits, image_logits)]
    return log_probs, torch.where(is_code, entropies[1], torch.where(at_text, entropies[0], zero))


def gradients(model):
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 5.0])
@pytest.mark.parametrize(("temperature", "image_temperature"), [(1.0, 1.0), (0.7, 1.3)])
def test_log_probs_and_entropies_equal_a_computation_on_full_logits(model, scale, temperature, image_temperature):
    ids, mask, labels = joint_batch(model)
    settings = {"temperature": temperature, "image_temperature": image_temperature}
    with torch.no_grad():
        out = score(model, ids, mask, labels, guidance_scale=scale, **settings)
        log_probs, entropies = plain_scores(model, ids, mask, labels, scale, **settings)
    torch.testing.assert_close(out.log_probs, log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.entropy, entropies, atol=1e-5, rtol=0)
    assert (out.label_mask == (labels[:, 1:] != -100)).all()


def test_temperatures_act_on_their_own_modality_only(model):
    ids, mask, labels = joint_batch(model)
    is_code = labels[:, 1:] >= model.vocab_size
    with torch.no_grad():
        base = score(model, ids, mask, labels).log_probs
        text = score(model, ids, mask, labels, temperature=0.5).log_probs
        image = score(model, ids, mask, labels, image_temperature=0.5).log_probs
    assert torch.equal(base[is_code], text[is_code]) and not torch.equal(base, text)
    assert torch.equal(base[~is_code], image[~is_code]) and not torch.equal(base, image)


def test_conditional_log_probs_are_those_without_guidance(model):
    ids, mask, labels = joint_batch(model)
    with torch.no_grad():
        conditional = score(model, ids, mask, labels, guidance_scale=5.0, logp_guidance="conditional")
        plain, _ = plain_scores(model, ids, mask, labels)
        guided = score(model, ids, mask, labels, guidance_scale=5.0)
    torch.testing.assert_close(conditional.log_probs, plain, atol=1e-5, rtol=0)
    assert (guided.log_probs - conditional.log_probs).abs().max() > 0.1


def test_guidance_in_hidden_space_equals_guidance_on_logits(model):
    head, (c, u) = model.model.generation_head.vision_head, torch.randn(2, 7, 32)
    with torch.no_grad():
        expected = head(u) + 5.0 * (head(c) - head(u))
        torch.testing.assert_close(head(guide(c, u, 5.0)), expected, atol=1e-4, rtol=0)
        assert torch.equal(guide(c, u, 0.0), u)


def test_top_1_is_one_exactly_where_the_label_is_the_likeliest_id(model):
    ids, mask, labels = joint_batch(model)
    v = model.vocab_size
    with torch.no_grad():
        hidden = plain_hidden(model, ids, mask)[:, :-1]
        best = model.model.generation_head(hidden).argmax(-1) + v
        likeliest = torch.where(labels[:, 1:] >= v, best, labels[:, 1:])
        right = torch.cat([labels[:, :1], likeliest], 1)
        is_code = right[:, 1:] >= v
        assert (score(model, ids, mask, right).is_top1[is_code] == 1).all()
        wrong = torch.where(right >= v, v + (right - v + 1) % model.config.vq_config.num_embeddings, right)
        assert (score(model, ids, mask, wrong).is_top1[is_code] == 0).all()


def test_entropy_of_uniform_logits_is_the_log_of_the_number_of_allowed_ids(model):
    ids, mask, labels = joint_batch(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.generation_head.vision_head.weight.zero_()
        model.model.generation_head.vision_head.bias.zero_()
        out = score(model, ids, mask, labels, guidance_scale=5.0)
    targets = labels[:, 1:]
    is_code, is_eoi = targets >= model.vocab_size, targets == model.special_ids.end_of_image
    is_text = (targets >= 0) & ~is_code & ~is_eoi
    allowed = model.vocab_size - len(model.special_ids.forbidden_in_text(True))
    assert allowed == model.vocab_size - 4
    for where, count in ((is_code, model.config.vq_config.num_embeddings), (is_text, allowed)):
        torch.testing.assert_close(out.entropy[where], torch.full_like(out.entropy[where], math.log(count)))
        torch.testing.assert_close(out.log_probs[where], torch.full_like(out.entropy[where], -math.log(count)))


def test_loss_is_the_mean_over_labels_or_the_sum_over_num_items(model):
    ids, mask, labels = joint_batch(model)
    out = score(model, ids, mask, labels)
    total, count = -out.log_probs.sum(), (labels[:, 1:] != -100).sum()
    torch.testing.assert_close(out.loss, total / count)
    torch.testing.assert_close(score(model, ids, mask, labels, num_items_in_batch=10).loss, total / 10)


def test_padding_changes_nothing(model):
    ids, mask, labels = joint_batch(model)
    left = PROMPT - 2  # row 1 has two prompt ids and no reasoning
    end = int(mask[1].nonzero().max()) + 1
    alone = [x[1:2, left:end] for x in (ids, mask, labels)]
    with torch.no_grad():
        batched = score(model, ids, mask, labels, guidance_scale=5.0).log_probs[1, left : end - 1]
        torch.testing.assert_close(score(model, *alone, guidance_scale=5.0).log_probs[0], batched, atol=1e-5, rtol=0)


def test_without_fused_head_the_forward_is_stock(model, janus_folder):
    stock = JanusForConditionalGeneration.from_pretrained(janus_folder, dtype=torch.float32).eval()
    ids = torch.randint(10, model.vocab_size, (2, 7))
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, stock(input_ids=ids).logits)


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "logp_guidance", "detach"),
    [(1.0, "guided", False), (5.0, "guided", False), (5.0, "guided", True), (5.0, "conditional", False)],
)
def test_loss_and_gradients_equal_a_plain_implementation(model, scale, logp_guidance, detach):
    ids, mask, labels = joint_batch(model)
    labels[2] = -100  # a row without labels
    settings = {"temperature": 0.7, "image_temperature": 1.3}
    out = score(
        model, ids, mask, labels, guidance_scale=scale, logp_guidance=logp_guidance, detach_unconditional=detach,
        **settings,
    )  # fmt: skip
    out.loss.backward()
    ours = gradients(model)
    used = scale if logp_guidance == "guided" else 1.0
    log_probs, _ = plain_scores(model, ids, mask, labels, used, detach=detach, **settings)
    loss = -log_probs.sum() / (labels[:, 1:] != -100).sum()
    loss.backward()
    plain = gradients(model)
    torch.testing.assert_close(out.loss, loss, atol=1e-5, rtol=0)
    norms = {name: gradient.abs().max().item() for name, gradient in plain.items()}
    for name in ("lm_head.weight", "model.generation_head.proj_out.weight", "model.generation_head.vision_head.bias"):
        assert norms[name] > 1e-3  # both heads do learn
    for name, gradient in plain.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-5 * max(1.0, norms[name]), rtol=0, msg=name)
    assert set(ours) == set(plain)


def test_detach_unconditional_keeps_values_and_changes_gradients(model):
    ids, mask, labels = joint_batch(model)
    losses, found = [], []
    for detach in (False, True):
        out = score(model, ids, mask, labels, guidance_scale=5.0, detach_unconditional=detach)
        out.loss.backward()
        losses.append(out.log_probs.detach())
        found.append(gradients(model))
    torch.testing.assert_close(*losses, atol=1e-5, rtol=0)
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    assert (found[0][name] - found[1][name]).abs().max() > 1e-3


@pytest.mark.parametrize("forced", ["end_of_image", "image_placeholder", "pad", "bos"])
def test_a_forced_id_that_is_no_text_scores_zero_and_leaves_gradients_finite(model, forced):
    ids, mask, labels = joint_batch(model)
    special, at = model.special_ids, PROMPT + 1
    ids[0, at] = labels[0, at] = special.bos if forced == "image_placeholder" else getattr(special, forced)
    if forced == "image_placeholder":
        labels[0, at] = special.image_placeholder  # as a label only: as an input it would want a picture
    out = score(model, ids, mask, labels, guidance_scale=5.0)
    assert out.log_probs[0, at - 1] == 0 and out.entropy[0, at - 1] == 0
    # The mask of a rollout multiplies the scores: 0 * -inf would be NaN.
    (out.log_probs * (labels[:, 1:] != labels[0, at])).sum().backward()
    assert all(torch.isfinite(g).all() for g in gradients(model).values())


def test_forced_ids_add_nothing_to_the_loss(model):
    ids, mask, labels = joint_batch(model)
    count = (labels[:, 1:] != -100).sum()
    loss = score(model, ids, mask, labels, num_items_in_batch=count).loss
    loss.backward()
    with_forced = gradients(model)
    labels[labels == model.special_ids.end_of_image] = -100
    other = score(model, ids, mask, labels, num_items_in_batch=count).loss
    other.backward()
    torch.testing.assert_close(loss, other)
    torch.testing.assert_close(with_forced, gradients(model))


def test_all_modalities_gives_the_same_scores_and_a_gradient_to_every_part_it_runs(model):
    ids, mask, labels = joint_batch(model)
    text_only = torch.randint(10, model.vocab_size, (2, 8))
    for batch in ((ids, mask, labels), (text_only, torch.ones_like(text_only), text_only)):
        plain = score(model, *batch)
        out = score(model, *batch, all_modalities=True)
        if batch[0] is ids:
            assert torch.equal(plain.log_probs, out.log_probs)
        out.loss.backward()
        found = gradients(model)
        for part in ("vision_model", "aligner", "generation_embeddings", "generation_aligner", "generation_head"):
            assert any(name.startswith(f"model.{part}.") for name in found), part
        assert all(torch.isfinite(g).all() for g in found.values())
        assert all((g == 0).all() for name, g in found.items() if name.startswith("model.vision_model."))


def test_in_a_mixed_run_every_text_is_scored_over_the_same_ids(model):
    """`<begin_of_image>` stays in the softmax of a batch without pictures, as it does beside rows that draw one."""
    ids, mask, labels = joint_batch(model)
    text = ids[:1, :PROMPT].masked_fill(ids[:1, :PROMPT] >= model.vocab_size, 20)
    alone = score(model, text, torch.ones_like(text), text, all_modalities=True).log_probs
    hidden = plain_hidden(model, text, torch.ones_like(text))[:, :-1]
    forbidden = torch.tensor(model.special_ids.forbidden_in_text(True))
    expected = model.lm_head(hidden).index_fill(-1, forbidden, -math.inf).log_softmax(-1)
    expected = expected.gather(-1, text[:, 1:].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(alone, expected.clamp(min=-1e9), atol=1e-5, rtol=0)
    without = score(model, text, torch.ones_like(text), text).log_probs
    assert (without > alone).all()  # there it is no text: the same logits share the probability of fewer ids


# ---- what each head sees --------------------------------------------------------------------------------------------


def test_each_head_sees_its_own_labelled_positions_only(model, monkeypatch):
    ids, mask, labels = joint_batch(model)
    rows = {"proj_out": [], "lm_head_module": [], "kernel": []}
    head = model.model.generation_head
    head.proj_out.register_forward_hook(lambda _m, args, _out: rows["proj_out"].append(len(args[0])))
    model.lm_head.register_forward_hook(lambda *_: rows["lm_head_module"].append(1))
    kernel = janus_trl.modeling.ChunkedLogProbFunction
    apply = kernel.apply

    def counted(hidden, weight, *args):
        rows["kernel"].append((len(hidden), len(weight)))
        return apply(hidden, weight, *args)

    monkeypatch.setattr(kernel, "apply", counted)
    with torch.no_grad():
        score(model, ids, mask, labels, guidance_scale=5.0)
    codes = int((labels[:, 1:] >= model.vocab_size).sum())
    texts = int((labels[:, 1:] != -100).sum()) - codes
    assert codes == 3 * model.num_image_codes
    assert rows["proj_out"] == [codes, codes]  # conditional and unconditional stream
    assert rows["kernel"] == [(texts, model.vocab_size), (codes, model.config.vq_config.num_embeddings)]
    assert rows["lm_head_module"] == []  # the module call would project every position


@pytest.mark.parametrize(
    ("scale", "logp_guidance", "rows"), [(1.0, "guided", 3), (5.0, "guided", 6), (5.0, "conditional", 3)]
)
def test_unconditional_stream_is_run_only_where_it_is_needed(model, scale, logp_guidance, rows):
    seen = []
    backbone = model.model.language_model
    backbone.register_forward_hook(lambda _m, _a, kw, _o: seen.append(len(kw["inputs_embeds"])), with_kwargs=True)
    with torch.no_grad():
        score(model, *joint_batch(model), guidance_scale=scale, logp_guidance=logp_guidance)
    assert sum(seen) == rows


def test_unconditional_ids_keep_bos_begin_of_image_and_codes(model):
    ids, mask, _ = joint_batch(model)
    special, v = model.special_ids, model.vocab_size
    blank = model.unconditional_ids(ids)
    row = blank[0].tolist()
    codes = [i for i in ids[0].tolist() if i >= v]
    before = [special.bos] + [special.pad] * (PROMPT - 1 + TEXT)
    assert row[: len(before)] == before
    assert row[len(before)] == special.begin_of_image
    assert row[len(before) + 1 : len(before) + 1 + len(codes)] == codes
    assert set(row[len(before) + 1 + len(codes) :]) == {special.pad}
    assert torch.equal(model.unconditional_ids(blank), blank)


def test_pictures_enter_at_their_placeholders_as_in_stock_janus(model, janus_folder):
    stock = JanusForConditionalGeneration.from_pretrained(janus_folder, dtype=torch.float32).eval()
    special = model.special_ids
    ids = torch.randint(10, model.vocab_size, (2, 20))
    ids[:, 1:17] = special.image_placeholder
    pixels = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        logits = stock(input_ids=ids, pixel_values=pixels).logits
        logits = logits.index_fill(-1, torch.tensor(special.forbidden_in_text(False)), -math.inf)
        expected = logits[:, 16:-1].log_softmax(-1).gather(-1, ids[:, 17:].unsqueeze(-1)).squeeze(-1)
        out = score(model, ids, torch.ones_like(ids), ids, pixel_values=pixels)
        swapped = score(model, ids, torch.ones_like(ids), ids, pixel_values=pixels.flip(0))
    torch.testing.assert_close(out.log_probs[:, 16:], expected, atol=1e-5, rtol=0)
    assert not torch.allclose(out.log_probs, swapped.log_probs)
