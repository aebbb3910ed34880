"""What a run trains, and whether its steps can move it."""

import logging

import pytest
import torch
from torch import nn

from janus_trl.trainable import lost_updates
from tests.grpo import lora, steps, weights


@pytest.mark.parametrize(("dtype", "half_gap"), [(torch.bfloat16, 0.02 * 2**-9), (torch.float16, 0.02 * 2**-12)])
def test_steps_below_half_the_gap_between_weights_are_named(dtype, half_gap):
    model = nn.Linear(64, 64, bias=False).to(dtype)
    nn.init.constant_(model.weight, 0.02)
    assert lost_updates(model, 1.1 * half_gap) is None
    message = lost_updates(model, 0.9 * half_gap)
    assert str(dtype).removeprefix("torch.") in message and "0.02 in the mean" in message and "zero3.yaml" in message
    # It is true: so small a step moves nothing, and one of twice half the gap does.
    for step, moves in ((0.9 * half_gap, False), (4.1 * half_gap, True)):
        before = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.sub_(step)
        assert torch.equal(before, model.weight) is not moves
    assert lost_updates(model.float(), 1e-9) is None
    assert lost_updates(model.to(dtype).requires_grad_(False), 1e-9) is None


@pytest.mark.parametrize("adapter", [False, True])
def test_a_run_of_bf16_weights_says_that_it_will_not_learn(trainer_of, adapter, caplog):
    settings = {"model_init_kwargs": {"dtype": "bfloat16"}, "learning_rate": 1e-6, "peft": lora() if adapter else None}
    with caplog.at_level(logging.WARNING, logger="janus_trl.trainable"):
        trainer = trainer_of(**settings)
    said = [record.message for record in caplog.records if "rounded away" in record.message]
    assert len(said) == (0 if adapter else 1)  # adapters are float32
    if adapter:
        return
    assert "learning_rate = 1e-06" in said[0] and "bfloat16" in said[0] and "use_peft: true" in said[0]
    before = weights(trainer)
    trainer.train()
    assert len(steps(trainer)) == 1
    moved = [(before[name] != p).float().mean().item() for name, p in trainer.model.named_parameters()]
    assert sum(moved) / len(moved) < 0.05
