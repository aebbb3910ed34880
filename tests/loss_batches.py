"""Micro-batches of a real rollout, and the loss and gradients that a trainer computes of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from trl import GRPOTrainer

from janus_trl.configs import JanusGRPOConfig
from janus_trl.grpo_trainer import JanusGRPOTrainer
from tests.grpo import ascending, prompts_dataset


def build_trainer(folder: str, output: Path, **settings) -> JanusGRPOTrainer:
    """A trainer on the random Janus whose steps change nothing (learning rate 0)."""
    defaults = {
        "output_dir": str(output), "report_to": "none", "per_device_train_batch_size": 4, "num_generations": 4,
        "max_steps": 1, "learning_rate": 0.0, "gradient_checkpointing": False, "logging_steps": 1,
        "save_strategy": "no", "disable_tqdm": True, "guidance_scale": 2.0, "max_reasoning_length": 3, "bf16": False,
    }  # fmt: skip
    args = JanusGRPOConfig(**{**defaults, **settings})
    return JanusGRPOTrainer(folder, ascending, args, prompts_dataset())


def first_batch(trainer: JanusGRPOTrainer) -> dict:
    """The inputs of the first loss, after one step of training."""
    batches, compute = [], trainer._compute_loss

    def keep(model, inputs):
        batches.append(inputs)
        return compute(model, inputs)

    trainer._compute_loss = keep
    trainer.train()
    del trainer._compute_loss
    trainer._metrics["train"].clear()
    return batches[0]


def scores(trainer: JanusGRPOTrainer, inputs: dict) -> torch.Tensor:
    """Log-probs of the completions under the policy, `[B, C]`."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    width = inputs["completion_ids"].shape[1]
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]


def loss_and_gradients(trainer: JanusGRPOTrainer, inputs: dict, stock: bool = False):
    """Loss, gradients by parameter name and metrics; `stock`: of TRL's method as it is."""
    trainer._metrics["train"].clear()
    trainer.model.train()
    compute = GRPOTrainer._compute_loss.__get__(trainer) if stock else trainer._compute_loss
    loss = compute(trainer.model, dict(inputs))
    named = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    found = {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named, gradients, strict=True)}
    return loss.detach(), found, {name: values[-1] for name, values in trainer._metrics["train"].items()}


@contextmanager
def changed_options() -> Iterator[Callable]:
    """Gives `set_(trainer, **fields)`, which sets fields of a trainer and of its arguments until the end."""
    before = []

    def set_(trainer, **fields):
        for name, value in fields.items():
            for owner in (trainer, trainer.args):
                if hasattr(owner, name):
                    before.append((owner, name, getattr(owner, name)))
                    setattr(owner, name, value)

    try:
        yield set_
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
