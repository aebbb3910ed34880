"""Entropy of text and of image codes held near a target, each by a coefficient of its own.

The rule is that of ReasonGen-R1 (arXiv 2505.24875), with the sign of TRL's `entropy_coef`: the loss is
`L - coefficient * H`, so a positive coefficient rewards entropy and a negative one penalises it. Unlike there, the
entropy is that of all ranks and micro-batches of a step, and the state is part of a checkpoint.
"""

import math

import torch
from accelerate import Accelerator

from .configs import JanusGRPOConfig
from .modality_loss import LossBatch

BETAS, EPSILON = (0.9, 0.999), 1e-8  # Adam's defaults


class AdaptiveCoefficient:
    """The coefficient `sinh(psi)`: one step of Adam on `coefficient * (H - target)`, then the bound.

    Entropy above the target lowers the coefficient, entropy below it raises it. sinh resolves finely around 0 and
    lets the sign change. In Python floats (float64): equal on all ranks, and exact in JSON.

    Args:
        initial: coefficient before the first update.
        target: nats; None keeps the coefficient fixed.
        learning_rate: Adam's, in units of psi (of the coefficient, while it is small).
        limit: the coefficient stays in `-limit … limit`.
    """

    def __init__(self, initial: float, target: float | None, learning_rate: float, limit: float):
        self.value, self.target, self.learning_rate, self.limit = initial, target, learning_rate, limit
        self._mean = self._square = 0.0
        self._updates = 0

    def update(self, entropy: float) -> None:
        """One step with the entropy (nats) that was measured under the present coefficient."""
        if self.target is None:
            return
        psi = math.asinh(self.value)
        gradient = math.cosh(psi) * (entropy - self.target)
        self._updates += 1
        self._mean += (1 - BETAS[0]) * (gradient - self._mean)
        self._square += (1 - BETAS[1]) * (gradient**2 - self._square)
        mean = self._mean / (1 - BETAS[0] ** self._updates)
        square = self._square / (1 - BETAS[1] ** self._updates)
        psi -= self.learning_rate * mean / (math.sqrt(square) + EPSILON)
        self.value = min(max(math.sinh(psi), -self.limit), self.limit)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"value": self.value, "mean": self._mean, "square": self._square, "updates": self._updates}

    def load(self, state: dict[str, float]) -> None:
        """Go on from `state()`."""
        self.value, self._updates = state["value"], int(state["updates"])
        self._mean, self._square = state["mean"], state["square"]


class EntropyControl:
    """The entropy terms of the loss; does nothing (and is false) unless the config asks for one."""

    def __init__(self, args: JanusGRPOConfig, accelerator: Accelerator):
        self.accelerator = accelerator
        self.coefficients: dict[str, AdaptiveCoefficient] = {}
        for name in ("text", "image"):
            initial, target = getattr(args, f"entropy_coef_{name}"), getattr(args, f"entropy_target_{name}")
            if initial != 0 or target is not None:
                rule = AdaptiveCoefficient(initial, target, args.entropy_coef_lr, args.entropy_coef_limit)
                self.coefficients[name] = rule
        self._window = {name: (0.0, 0.0) for name in self.coefficients}

    def __bool__(self) -> bool:
        return bool(self.coefficients)

    def loss(self, batch: LossBatch, accumulation: int) -> torch.Tensor:
        """`-sum_m coefficient_m * H_m` of a micro-batch, a scalar with gradient; collective.

        H_m is the mean over the sampled ids of modality m on all ranks: each rank returns its share of it times the
        number of ranks, because gradients are averaged over ranks afterwards.

        Args:
            batch: a micro-batch with scores.
            accumulation: number of micro-batches in a step.
        """
        where = {name: mask for name, mask in batch.segments() if name in self.coefficients}
        sums = {name: (batch.entropies * mask).sum() for name, mask in where.items()}
        local = torch.stack([v.detach().double() for name in where for v in (sums[name], where[name].sum())])
        totals = self.accelerator.gather(local).view(-1, len(local)).sum(0).tolist()
        loss = batch.entropies.new_zeros(())
        for name, total, count in zip(where, totals[::2], totals[1::2], strict=True):
            before = self._window[name]
            self._window[name] = before[0] + total, before[1] + count
            share = self.accelerator.num_processes / max(count, 1.0) / accumulation
            loss = loss - self.coefficients[name].value * share * sums[name]
        return loss

    def step(self) -> dict[str, float]:
        """At the end of a step: the coefficients that it used, by metric name; then their update."""
        used = {f"entropy_coef/{name}": rule.value for name, rule in self.coefficients.items()}
        for name, (total, count) in self._window.items():
            if count:  # a step of the other task has no ids of this modality
                self.coefficients[name].update(total / count)
            self._window[name] = 0.0, 0.0
        return used

    def state(self) -> dict[str, dict[str, float]]:
        """What a checkpoint keeps."""
        return {name: rule.state() for name, rule in self.coefficients.items()}

    def load(self, state: dict[str, dict[str, float]]) -> None:
        """Go on from `state()`; a modality that was not controlled then starts afresh, a fixed value is not read."""
        for name, rule in self.coefficients.items():
            if name in state and rule.target is not None:
                rule.load(state[name])
