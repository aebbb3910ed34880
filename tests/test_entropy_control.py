"""Entropy control: the rule, its sign, what it adds to the loss, and where it takes a model."""

import json
import math

import pytest
import torch

from janus_trl.entropy_control import AdaptiveCoefficient
from tests.grpo import prompts_dataset, steps
from tests.loss_batches import build_trainer, changed_options, first_batch, loss_and_gradients


def constant(completions, **_):
    """No advantage: only the entropy terms move the policy."""
    return [1.0] * len(completions)


# ---- the rule -------------------------------------------------------------------------------------------------------


def test_the_coefficient_is_sinh_of_psi_under_adam(target=2.0, rate=0.3, limit=0.8):
    entropies = [2.5, 3.0, 2.2, 1.0, 0.5, 1.9, 2.0, 4.0, 4.0, 4.0]
    rule = AdaptiveCoefficient(0.1, target, rate, limit)
    psi = torch.tensor(math.asinh(0.1), dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([psi], lr=rate)
    for entropy in entropies:
        adam.zero_grad()
        (torch.sinh(psi) * (entropy - target)).backward()
        adam.step()
        with torch.no_grad():
            psi.copy_(torch.asinh(torch.sinh(psi).clamp(-limit, limit)))
        rule.update(entropy)
        assert rule.value == pytest.approx(math.sinh(psi.item()), rel=1e-12)
    assert rule.value < 0


@pytest.mark.parametrize(("entropy", "sign"), [(3.0, -1), (1.0, 1)])
def test_entropy_above_the_target_is_penalised_and_below_it_rewarded(entropy, sign):
    rule = AdaptiveCoefficient(0.0, 2.0, 5e-5, 5e-3)
    rule.update(entropy)
    assert rule.value == pytest.approx(sign * 5e-5, rel=1e-4)  # Adam's first step is the learning rate
    for _ in range(200):
        rule.update(entropy)
    assert rule.value == sign * 5e-3  # the limit
    for _ in range(400):
        rule.update(4.0 - entropy)  # the other side of the target
    assert rule.value == -sign * 5e-3  # it comes back from the limit


def test_without_target_the_coefficient_stays():
    rule = AdaptiveCoefficient(0.02, None, 5e-5, 5e-3)
    rule.update(9.0)
    assert rule.value == 0.02


def test_state_goes_through_json_exactly():
    first, second = (AdaptiveCoefficient(0.0, 2.0, 1e-2, 1.0) for _ in range(2))
    for entropy in (2.3, 1.7, 2.9):
        first.update(entropy)
    second.load(json.loads(json.dumps(first.state())))
    for entropy in (2.1, 0.4):
        first.update(entropy)
        second.update(entropy)
        assert first.value == second.value


# ---- the term of the loss -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer(janus_folder, tmp_path_factory):
    settings = {"entropy_coef_text": 0.03, "entropy_coef_image": -0.02}
    return build_trainer(janus_folder, tmp_path_factory.mktemp("entropy"), **settings)


def test_the_loss_is_that_of_trl_minus_coefficient_times_entropy(trainer):
    inputs = first_batch(trainer)
    stock, stock_gradients, _ = loss_and_gradients(trainer, inputs, stock=True)
    loss, gradients, metrics = loss_and_gradients(trainer, inputs)
    term = 0.03 * metrics["entropy/text"] - 0.02 * metrics["entropy/image"]
    assert loss.item() == pytest.approx(stock.item() - term, abs=1e-6)
    assert (metrics["entropy_coef/text"], metrics["entropy_coef/image"]) == (0.03, -0.02)
    # The gradient on a head is that of the entropy of its modality: by finite differences along itself.
    for name, part in (("lm_head.weight", "text"), ("model.generation_head.vision_head.weight", "image")):
        direction = gradients[name] - stock_gradients[name]
        slope = direction.square().sum().item()
        assert slope > 1e-8
        weight, size = dict(trainer.model.named_parameters())[name], 1e-2 / math.sqrt(slope)
        values = []
        for side in (1, -1):
            with torch.no_grad():
                weight.add_(direction, alpha=side * size)
            values.append(loss_and_gradients(trainer, inputs)[2][f"entropy/{part}"])
            with torch.no_grad():
                weight.sub_(direction, alpha=side * size)
        coefficient = {"text": 0.03, "image": -0.02}[part]
        assert -coefficient * (values[0] - values[1]) / (2 * size) == pytest.approx(slope, rel=0.02)


def test_weights_of_the_loss_do_not_scale_the_entropy_terms(trainer):
    inputs = {**first_batch(trainer), "advantages": torch.zeros(4)}
    _, gradients, _ = loss_and_gradients(trainer, inputs)
    with changed_options() as set_:
        set_(trainer, text_loss_weight=0.5, image_loss_weight=3.0)
        _, same, _ = loss_and_gradients(trainer, inputs)
    assert all(torch.equal(gradients[name], same[name]) for name in gradients)


def test_evaluation_neither_adds_a_term_nor_moves_a_coefficient(janus_folder, tmp_path):
    trainer = build_trainer(janus_folder, tmp_path, entropy_target_image=1.0)
    trainer.eval_dataset = prompts_dataset()
    trainer.evaluate()
    assert trainer.entropy_control.state()["image"]["updates"] == 0
    assert not any(name.startswith("eval_entropy_coef") for name in trainer.state.log_history[-1])


# ---- what it does to a model ----------------------------------------------------------------------------------------


def run(trainer_of, **settings) -> list[dict]:
    """The log of a run without advantage; the entropy of image codes starts at 2.54 of ln 16 = 2.77 nats."""
    defaults = {"num_generations": 8, "per_device_train_batch_size": 8, "guidance_scale": 1.0}
    trainer = trainer_of(constant, **{**defaults, **settings})
    trainer.train()
    return steps(trainer)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("name", "other"), [("text", "image"), ("image", "text")])
def test_a_fixed_coefficient_moves_the_entropy_of_its_modality(trainer_of, sign, name, other):
    settings = {f"entropy_coef_{name}": sign * 0.3, "max_steps": 6, "optim": "sgd", "learning_rate": 0.3}
    logs = run(trainer_of, max_reasoning_length=4, **settings)
    assert sign * (logs[-1][f"entropy/{name}"] - logs[0][f"entropy/{name}"]) > 0.05
    assert all(log[f"entropy_coef/{name}"] == sign * 0.3 and f"entropy_coef/{other}" not in log for log in logs)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "sign"), [(2.35, -1), (2.65, 1)])
def test_the_control_brings_the_entropy_to_its_target_from_both_sides(trainer_of, target, sign):
    """With a KL against which the terms settle; on their own they swing about the target."""
    settings = {"entropy_coef_lr": 0.003, "entropy_coef_limit": 0.2, "beta": 0.3, "learning_rate": 3e-3}
    logs = run(trainer_of, entropy_target_image=target, max_steps=100, **settings)
    entropies = [log["entropy/image"] for log in logs]
    assert sign * (target - entropies[0]) > 0.1
    assert sum(entropies[-40:]) / 40 == pytest.approx(target, abs=0.07), entropies[::5]
    assert all(sign * log["entropy_coef/image"] > 0 for log in logs[1:6])
