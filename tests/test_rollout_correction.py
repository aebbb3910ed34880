"""A sampler that is off on purpose: the bias it puts into the gradient, and what is left of it after the correction."""

import math

import pytest
import torch

from janus_trl.rollout_correction import importance_sampling_ratio
from tests.loss_batches import build_trainer, changed_options, first_batch, loss_and_gradients, scores

TEMPERATURE = 1.3  # of the sampler; the policy is trained at 1.0
BIAS = "model.generation_head.vision_head.bias"  # adds to the logits of the codes, so its gradient is theirs


@pytest.fixture(scope="module")
def trainer(janus_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("correction")
    settings = {"max_reasoning_length": 0, "guidance_scale": 1.0, "loss_type": "dr_grpo"}
    return build_trainer(janus_folder, output, **settings)


@pytest.fixture
def options():
    with changed_options() as set_:
        yield set_


@pytest.fixture(scope="module")
def every_code(trainer):
    """One rollout 16 times, each with another first code, the only id that counts; `pi`, `q` `[16]`, rewards.

    Row c stands for all rollouts that drew code c: its advantage is q(c) r(c), so that the loss of the batch is the
    expectation under the sampler, with no noise of sampling.
    """
    inputs = first_batch(trainer)
    rows = {k: v[:1].repeat(16, 1) for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.dim() == 2}
    first = (rows["completion_ids"][0] >= trainer.model.vocab_size).nonzero()[0].item()
    rows["completion_ids"][:, first] = trainer.model.vocab_size + torch.arange(16)
    rows["tool_mask"] = torch.zeros_like(rows["completion_mask"])
    rows["tool_mask"][:, first] = 1
    log_pi = scores(trainer, rows)[:, first]
    log_q = (log_pi / TEMPERATURE).log_softmax(0)
    rows["sampling_per_token_logps"] = torch.full(rows["completion_ids"].shape, -7.0)
    rows["sampling_per_token_logps"][:, first] = log_q
    rewards = torch.linspace(-1, 2, 16)
    rows["advantages"] = log_q.exp() * rewards
    rows["num_items_in_batch"] = torch.tensor(16)
    return rows, log_pi.exp(), log_q.exp(), rewards


def policy_gradient(weights: torch.Tensor, pi: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """By hand: -sum_c weight(c) r(c) d log pi(c) / d logits, with d log pi(c) / d logit k = [c = k] - pi(k)."""
    return -(weights * rewards - pi * (weights * rewards).sum())


def gradient_of(trainer, rows) -> tuple[torch.Tensor, dict]:
    _, gradients, metrics = loss_and_gradients(trainer, rows)
    return gradients[BIAS] * len(rows["advantages"]) * trainer.max_completion_length, metrics  # dr_grpo divides by both


def test_a_hot_sampler_biases_the_gradient_and_the_correction_removes_the_bias(trainer, every_code, options):
    rows, pi, q, rewards = every_code
    assert pi.sum().item() == pytest.approx(1, abs=1e-5) and (pi / q).max() < 3
    right = policy_gradient(pi, pi, rewards)  # the gradient of the expected reward
    biased, _ = gradient_of(trainer, rows)
    torch.testing.assert_close(biased, policy_gradient(q, pi, rewards), atol=1e-5, rtol=1e-4)
    bias = (biased - right).norm() / right.norm()
    assert bias > 0.05  # 7.7 % of the gradient, however many rollouts are averaged
    for mode in ("truncate", "mask"):
        options(trainer, rollout_correction=mode)
        corrected, metrics = gradient_of(trainer, rows)
        assert (corrected - right).norm() < 1e-4 * right.norm()
        ratio, name = pi / q, "sampling/importance_sampling_ratio"
        assert metrics[f"{name}/max"] == pytest.approx(ratio.max().item(), rel=1e-4)
        assert metrics[f"{name}/min"] == pytest.approx(ratio.min().item(), rel=1e-4)
        assert metrics[f"{name}/mean"] == pytest.approx(ratio.mean().item(), rel=1e-4)
        drift = (pi / q).log().abs()
        assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(drift.mean().item(), rel=1e-4)
        assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(drift.max().item(), rel=1e-4)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_bounds_trade_bias_for_bounded_weights(trainer, every_code, options, mode):
    rows, pi, q, rewards = every_code
    ratio = pi / q
    high, low = ratio.sort().values[-3].item() * 1.0001, ratio.sort().values[2].item() * 0.9999
    options(trainer, rollout_correction=mode, rollout_correction_max=high, rollout_correction_min=low)
    found, metrics = gradient_of(trainer, rows)
    inside = (ratio <= high) & (ratio >= low)
    assert inside.sum() == 12
    weights = q * (ratio.clamp(low, high) if mode == "truncate" else ratio * inside)
    torch.testing.assert_close(found, policy_gradient(weights, pi, rewards), atol=1e-5, rtol=1e-4)
    top = metrics["sampling/importance_sampling_ratio/max"]
    assert top == pytest.approx(high if mode == "truncate" else ratio[inside].max().item(), rel=1e-4)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "cispo", "sapo", "luspo"])
def test_the_correction_multiplies_the_policy_term_of_every_id_and_leaves_the_kl(
    trainer, every_code, options, loss_type
):
    """As TRL does for vLLM: the same loss type with the weights in the advantages and none in the correction."""
    rows, pi, q, _ = every_code
    rows = {**rows, "ref_per_token_logps": rows["sampling_per_token_logps"] - 0.3}
    options(trainer, loss_type=loss_type, beta=0.1)
    _, expected, _ = loss_and_gradients(trainer, {**rows, "advantages": rows["advantages"] * pi / q})
    options(trainer, rollout_correction="truncate")
    _, found, _ = loss_and_gradients(trainer, rows)
    torch.testing.assert_close(found[BIAS], expected[BIAS], atol=1e-6, rtol=1e-4)


def test_vespo_gets_the_ratio_where_trl_looks_for_it(trainer, every_code, options):
    rows, pi, q, _ = every_code
    options(trainer, loss_type="vespo")
    ratio = torch.ones_like(rows["sampling_per_token_logps"]).where(rows["tool_mask"] == 0, (pi / q).unsqueeze(1))
    loss, expected, _ = loss_and_gradients(trainer, {**rows, "importance_sampling_ratio": ratio}, stock=True)
    options(trainer, rollout_correction="truncate")
    same, found, _ = loss_and_gradients(trainer, rows)
    assert same.item() == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(found[BIAS], expected[BIAS], atol=1e-6, rtol=1e-4)


def test_the_correction_is_against_the_policy_of_the_rollout_not_the_present_one(trainer, every_code, options):
    rows, pi, q, _ = every_code
    options(trainer, rollout_correction="truncate")
    old = rows["sampling_per_token_logps"] + math.log(2)
    _, _, metrics = loss_and_gradients(trainer, {**rows, "old_per_token_logps": old})
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(2, rel=1e-4)


def test_a_sampler_at_another_temperature_shows_in_the_metrics_of_a_run(janus_folder, tmp_path):
    trainer = build_trainer(janus_folder, tmp_path, rollout_correction="truncate", learning_rate=1e-3)
    settings = trainer.sampling_settings
    trainer.sampling_settings = lambda *args, **kwargs: type(s := settings(*args, **kwargs))(
        **{**vars(s), "image_temperature": TEMPERATURE}
    )
    trainer.train()
    (log,) = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert log["sampling/sampling_logp_difference/max"] == log["logps/drift_max"] > 0.1
    assert log["sampling/importance_sampling_ratio/min"] < 0.9 < 1.1 < log["sampling/importance_sampling_ratio/max"]
    assert log["sampling/importance_sampling_ratio/max"] <= 3 and log["grad_norm"] > 0


def test_ids_that_do_not_count_have_the_ratio_1():
    replayed, sampled = torch.tensor([[-1.0, 900.0, -2.0]]), torch.tensor([[-2.0, -900.0, -1.0]])
    mask = torch.tensor([[True, False, True]])
    for mode, first in (("truncate", 2.0), ("mask", 0.0)):
        ratio = importance_sampling_ratio(replayed, sampled, mask, mode, None, 2.0)
        torch.testing.assert_close(ratio, torch.tensor([[first, 1.0, math.exp(-1)]]))
    low = importance_sampling_ratio(replayed, sampled, mask, "truncate", 0.5, 3.0)
    torch.testing.assert_close(low, torch.tensor([[math.e, 1.0, 0.5]]))
