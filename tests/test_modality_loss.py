"""Weights and clip ranges by modality: with all of them at their defaults, TRL's loss bit for bit."""

import math

import pytest
import torch

from janus_trl.modality_loss import scale_gradient
from tests.loss_batches import build_trainer, changed_options, first_batch, loss_and_gradients, scores

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"]


@pytest.fixture(scope="module")
def trainer(janus_folder, tmp_path_factory):
    return build_trainer(janus_folder, tmp_path_factory.mktemp("loss"))


@pytest.fixture(scope="module")
def batch(trainer):
    """A rollout with old and reference log-probs that are off by some tenths, as after an update."""
    inputs = first_batch(trainer)
    now, noise = scores(trainer, inputs), torch.Generator().manual_seed(0)
    inputs["old_per_token_logps"] = now + 0.3 * torch.randn(now.shape, generator=noise)
    inputs["ref_per_token_logps"] = now + 0.5 * torch.randn(now.shape, generator=noise)
    return inputs


@pytest.fixture
def options():
    with changed_options() as set_:
        yield set_


def masks(trainer, inputs):
    sampled = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    is_code = inputs["completion_ids"] >= trainer.model.vocab_size
    return sampled & ~is_code, sampled & is_code


def largest_difference(a: dict, b: dict) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss_type", "level"), [*((loss, "token") for loss in LOSSES), ("luspo", "sequence"),
                                                  ("grpo", "sequence")])  # fmt: skip
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_weights_of_1_are_the_loss_and_gradients_of_trl_bit_for_bit(trainer, batch, options, loss_type, level, beta):
    options(trainer, loss_type=loss_type, importance_sampling_level=level, beta=beta)
    stock, stock_gradients, stock_metrics = loss_and_gradients(trainer, batch, stock=True)
    loss, gradients, metrics = loss_and_gradients(trainer, batch)
    assert torch.equal(loss, stock) and max(g.abs().max() for g in gradients.values()) > 1e-4
    assert all(torch.equal(gradients[name], stock_gradients[name]) for name in stock_gradients)
    assert {name: metrics[name] for name in stock_metrics} == pytest.approx(stock_metrics, nan_ok=True)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_gradient_is_the_weighted_sum_of_those_of_text_and_image(trainer, batch, options, loss_type):
    options(trainer, loss_type=loss_type, beta=0.1)
    loss, whole, metrics = loss_and_gradients(trainer, batch)
    parts = []
    for weights in ((1.0, 0.0), (0.0, 1.0), (2.0, 0.5)):
        options(trainer, text_loss_weight=weights[0], image_loss_weight=weights[1])
        value, gradients, weighted = loss_and_gradients(trainer, batch)
        assert torch.equal(value, loss) and weighted == pytest.approx(metrics)  # both stay as in TRL
        parts.append(gradients)
    text, image, mixed = parts
    assert largest_difference({n: text[n] + image[n] for n in whole}, whole) < 1e-5
    assert largest_difference({n: 2 * text[n] + 0.5 * image[n] for n in whole}, mixed) < 1e-5
    head = [name for name in whole if "generation_head" in name]
    assert all((text[name] == 0).all() for name in head) and (image["lm_head.weight"] == 0).all()
    assert text["lm_head.weight"].abs().max() > 1e-4 and all(image[name].abs().max() > 1e-5 for name in head)


def test_the_weights_apply_to_the_kl_term_too(trainer, batch, options):
    inputs = {**batch, "advantages": torch.zeros(4)}
    options(trainer, beta=0.1, image_loss_weight=0.0)
    _, gradients, _ = loss_and_gradients(trainer, inputs)
    assert gradients["lm_head.weight"].abs().max() > 1e-5
    assert (gradients["model.generation_head.vision_head.weight"] == 0).all()


def test_scale_gradient_leaves_the_value():
    x, weights = torch.tensor([0.1, -3.7], requires_grad=True), torch.tensor([2.0, 0.0])
    y = scale_gradient(x, weights)
    y.square().sum().backward()
    assert torch.equal(y, x) and x.grad.tolist() == pytest.approx([2 * 2 * 0.1, 0.0])


# ---- clip ranges ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epsilons", "text", "image"), [
    ({"epsilon_text": 0.1, "epsilon_image": 0.5}, 1.1, 1.3),
    ({"epsilon_image": 0.1}, 1.2, 1.1),  # text: TRL's 0.2
    ({"epsilon_high_image": 0.25}, 1.2, 1.25),
    ({"epsilon_text": 0.1, "epsilon_high_text": 0.15, "epsilon_image": 0.4}, 1.15, 1.3),
])  # fmt: skip
def test_every_modality_is_clipped_at_its_own_epsilon(trainer, batch, options, epsilons, text, image):
    options(trainer, **epsilons)
    where_text, where_image = masks(trainer, batch)
    old = scores(trainer, batch) - math.log(1.3)  # every ratio is 1.3
    inputs = {**batch, "old_per_token_logps": old, "advantages": torch.ones(4)}
    loss, gradients, metrics = loss_and_gradients(trainer, inputs)
    n_text, n_image = where_text.sum().item(), where_image.sum().item()
    assert loss.item() == pytest.approx(-(text * n_text + image * n_image) / (n_text + n_image), rel=1e-5)
    assert (gradients["lm_head.weight"].abs().max() > 0) == (text == 1.3)
    assert (gradients["model.generation_head.vision_head.weight"].abs().max() > 0) == (image == 1.3)
    clipped_text, clipped_image = float(text < 1.3), float(image < 1.3)
    assert metrics["clip_ratio/text_high_mean"] == clipped_text and metrics["clip_ratio/text_low_mean"] == 0
    assert metrics["clip_ratio/image_region_mean"] == metrics["clip_ratio/image_high_mean"] == clipped_image
    share = (clipped_text * n_text + clipped_image * n_image) / (n_text + n_image)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(share)  # TRL's own metric sees the same ranges
    assert (trainer.epsilon_low, trainer.epsilon_high) == (0.2, 0.2)


def test_ratios_below_the_range_are_clipped_for_negative_advantages(trainer, batch, options):
    options(trainer, epsilon_text=0.3, epsilon_image=0.1)
    inputs = {**batch, "old_per_token_logps": scores(trainer, batch) + math.log(1.25), "advantages": -torch.ones(4)}
    _, gradients, metrics = loss_and_gradients(trainer, inputs)  # every ratio is 0.8
    assert metrics["clip_ratio/text_low_mean"] == 0 and metrics["clip_ratio/image_low_mean"] == 1
    assert (gradients["model.generation_head.vision_head.weight"] == 0).all()
    assert gradients["lm_head.weight"].abs().max() > 0


def test_cispo_caps_each_modality_at_its_own_epsilon(trainer, batch, options):
    options(trainer, loss_type="cispo", epsilon_high_text=1.1, epsilon_high_image=2.0)
    inputs = {**batch, "old_per_token_logps": scores(trainer, batch) - math.log(1.3), "advantages": torch.ones(4)}
    _, capped, metrics = loss_and_gradients(trainer, inputs)
    assert (metrics["cispo_clip_ratio/text"], metrics["cispo_clip_ratio/image"]) == (1, 0)
    options(trainer, epsilon_high_text=2.0)
    _, free, _ = loss_and_gradients(trainer, inputs)
    ratio = capped["lm_head.weight"].abs().sum() / free["lm_head.weight"].abs().sum()
    assert ratio.item() == pytest.approx(1.1 / 1.3, rel=1e-4)


# ---- finite whatever old and reference say --------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize(("field", "poison"), [
    ("old_per_token_logps", -1000.0), ("ref_per_token_logps", 1000.0), ("old_per_token_logps", math.nan),
    ("ref_per_token_logps", math.nan),
])  # fmt: skip
def test_log_probs_of_ids_that_do_not_count_do_not_reach_the_loss(trainer, batch, options, loss_type, field, poison):
    options(trainer, loss_type=loss_type, beta=0.1)
    text, image = masks(trainer, batch)
    assert not (text | image).all()
    poisoned = {**batch, field: batch[field].where(text | image, torch.tensor(poison))}
    loss, gradients, _ = loss_and_gradients(trainer, batch)
    same, others, _ = loss_and_gradients(trainer, poisoned)
    assert torch.equal(loss, same) and math.isfinite(loss) and largest_difference(gradients, others) == 0


def test_a_log_ratio_that_would_overflow_is_bounded_and_shown(trainer, batch, options):
    options(trainer, beta=0.1)
    text, image = masks(trainer, batch)
    now = scores(trainer, batch)
    old, ref = now.clone(), now.clone()
    row, column = image.nonzero()[0].tolist()
    old[row, column] -= 100
    ref[row, column] += 100
    inputs = {**batch, "old_per_token_logps": old, "ref_per_token_logps": ref}
    loss, gradients, metrics = loss_and_gradients(trainer, inputs)
    assert math.isfinite(loss) and all(g.isfinite().all() for g in gradients.values())
    assert metrics["ratio/max"] == pytest.approx(math.exp(20), rel=1e-3)
    assert metrics["kl/image_log_ratio_max"] == pytest.approx(20, rel=1e-4) and metrics["kl/text_log_ratio_max"] == 0


def test_a_reference_that_is_100_nats_below_shows_in_the_metrics_of_its_modality(trainer, batch, options):
    options(trainer, beta=0.1, use_bias_correction_kl=False)
    text, _ = masks(trainer, batch)
    now = scores(trainer, batch)
    ref = now.clone()
    row, column = text.nonzero()[0].tolist()
    ref[row, column] -= 100
    inputs = {**batch, "old_per_token_logps": now, "ref_per_token_logps": ref}
    loss, _, metrics = loss_and_gradients(trainer, inputs)
    assert math.isfinite(loss)
    assert metrics["kl/text_log_ratio_max"] == pytest.approx(100, rel=1e-4)
    assert metrics["kl/text_log_ratio_mean"] == pytest.approx(100 / text.sum().item(), rel=1e-4)
    assert metrics["kl/text"] == pytest.approx(99 / text.sum().item(), rel=1e-4)  # e^-100 + 100 - 1
    assert metrics["kl/image"] == metrics["kl/image_log_ratio_max"] == 0


# ---- metrics by modality --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("delta", [None, 1.1])
def test_metrics_of_the_modalities_are_parts_of_those_of_trl(trainer, batch, options, bias_correction, delta):
    options(trainer, beta=0.1, use_bias_correction_kl=bias_correction, delta=delta)
    _, _, metrics = loss_and_gradients(trainer, batch)
    n_text, n_image = (mask.sum().item() for mask in masks(trainer, batch))
    parts = {"kl": "kl/{}", "entropy": "entropy/{}"}
    parts |= {f"clip_ratio/{side}_mean": f"clip_ratio/{{}}_{side}_mean" for side in ("low", "high", "region")}
    for whole, part in parts.items():
        text, image = metrics[part.format("text")], metrics[part.format("image")]
        assert (n_text * text + n_image * image) / (n_text + n_image) == pytest.approx(metrics[whole], rel=1e-5)
        assert text != image or whole == "clip_ratio/high_mean"
    assert metrics["clip_ratio/region_mean"] > 0


def test_without_reference_there_is_no_kl(trainer, batch):
    inputs = {name: value for name, value in batch.items() if name != "ref_per_token_logps"}
    _, _, metrics = loss_and_gradients(trainer, inputs)
    assert not any(name.startswith("kl") for name in metrics) and "entropy/image" in metrics
