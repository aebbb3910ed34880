"""Dynamic sampling: prompts whose group has no reward spread are replaced by new prompts, and the step keeps its size.

DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.2) samples on until the batch is full of groups with a gradient. Here
the number of rounds is bounded, and what is still flat at the bound is used with advantage 0.

All ranks decide from the gathered rewards, so they draw the same prompts and run the same forwards. A group may span
ranks, hence rows travel: a replacement is sampled where it balances the work and used where the flat group was.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from trl.trainer.utils import nanstd, pad

from .rollouts import row_seed

logger = logging.getLogger(__name__)

ROW_NUMBER = "_janus_trl_row"  # column of the training set, of a name that no data set has
TOLERANCE = 1e-6  # spread of rewards, relative to their size, that is float rounding
EPSILON = 1e-4  # what TRL adds to a standard deviation before it divides by it
PADDING = {"tool_mask": 1}  # of a tensor's positions behind the completion; ids have the pad id, all else 0


def _adds_up(metric: str) -> bool:
    """Whether a metric of one round is a part of that of all: seconds, and counts of faults and the like."""
    counted = metric.startswith("rewards/") and not metric.endswith(("/mean", "/std"))
    return counted or metric.startswith(("time/rollout_s", "time/reward_s"))


def total_rewards(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of `rewards` `[N, F]`, `[N]`; NaN where no reward could score the row."""
    totals = (rewards * weights.to(rewards.device)).nansum(1)
    return totals.masked_fill(rewards.isnan().all(1), torch.nan)


def flat_groups(values: torch.Tensor, num_generations: int) -> torch.BoolTensor:
    """Which groups have no spread in any column of `values` `[N, K]`, `[N / num_generations]`.

    A group with fewer than two rows that could be scored is flat: there is nothing to compare.
    """
    grouped = values.view(-1, num_generations, values.shape[-1])  # [groups, G, K]
    missing = grouped.isnan()
    highest = grouped.masked_fill(missing, -torch.inf).amax(1)
    lowest = grouped.masked_fill(missing, torch.inf).amin(1)
    size = torch.maximum(highest.abs(), lowest.abs())
    spread = (highest - lowest > TOLERANCE * size) & ((~missing).sum(1) > 1)
    return ~spread.any(-1)


def candidate_groups(needed: int, num_generations: int, processes: int, images_per_reasoning: int = 1) -> int:
    """The least number of groups, at least `needed`, whose rows all ranks share evenly, in blocks of one reasoning."""
    unit = processes * images_per_reasoning
    multiple = unit // math.gcd(unit, num_generations)
    return math.ceil(needed / multiple) * multiple


def split_rows(batch: dict) -> list[dict]:
    """A batch of TRL's trainer as one dictionary per row, on CPU; `pixel_values` only where a row has pictures."""
    count = len(batch["prompt_ids"])
    pictures = batch.get("num_images") or [0] * count
    fields = {
        name: value.cpu()
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and value.ndim > 0 and name != "pixel_values"
    }
    rows = [{name: value[i].clone() for name, value in fields.items()} for i in range(count)]
    if "pixel_values" in batch:
        for row, own in zip(rows, batch["pixel_values"].cpu().split(pictures), strict=True):
            if len(own):
                row["pixel_values"] = own.clone()
    return rows


def join_rows(rows: list[dict], pad_token_id: int, device: torch.device) -> dict:
    """The inverse of `split_rows`: prompts padded on the left, completions on the right, to the longest of the rows."""
    batch: dict = {}
    for name in rows[0]:
        if name == "pixel_values":
            continue
        side = "left" if name.startswith("prompt_") else "right"
        value = pad_token_id if name.endswith("_ids") else PADDING.get(name, 0)
        values = [row[name] for row in rows]
        joined = pad(values, padding_value=value, padding_side=side) if values[0].ndim else torch.stack(values)
        batch[name] = joined.to(device)
    pictures = [row["pixel_values"] for row in rows if "pixel_values" in row]
    if pictures:  # TRL has neither entry for a batch without pictures
        batch["pixel_values"] = torch.cat(pictures).to(device)
        batch["num_images"] = [len(row.get("pixel_values", ())) for row in rows]
    return batch


@dataclass
class _Step:
    """The rows of this rank with the rewards of all, as rounds replace them."""

    rows: list[dict]
    rewards: torch.Tensor  # [N, F], of the rows that are kept
    flat: torch.Tensor  # [groups]
    taken: int = 0  # prompts drawn so far


class GroupFilter:
    """Replaces flat groups of a generation batch.

    Args:
        trainer: a `JanusGRPOTrainer`.
        generate: samples and scores rows of this rank, `list[dict] -> batch`; collective.
    """

    def __init__(self, trainer, generate: Callable[[list[dict]], dict]):
        self.trainer, self.generate = trainer, generate
        self.accelerator, self.group = trainer.accelerator, trainer.num_generations

    def fill(self, batch: dict, inputs: list[dict], pool: list[int], seed_parts: tuple) -> dict:
        """The batch with flat groups replaced by groups of other prompts. Collective.

        Args:
            batch: of this rank; the rewards of its rows are in `trainer.round_rewards`.
            inputs: the training rows of `batch`.
            pool: numbers of the training rows that may be drawn; those of the batch come last.
            seed_parts: what identifies the batch; the prompts drawn depend on it and on the seed of the run.
        """
        start, metrics = time.perf_counter(), self.trainer._metrics["train"]
        rewards = self.trainer.round_rewards
        step = _Step([], rewards, self._flat(rewards))
        metrics["dynamic_sampling/flat_groups_0"].append(step.flat.float().mean().item())
        rounds = 0
        if step.flat.any():
            drawn = self._order(inputs, pool, seed_parts)
            step.rows = split_rows(batch)
            self._unscale(step.rows, rewards)
            while step.flat.any() and rounds < self.trainer.args.dynamic_sampling_max_rounds:
                rounds += 1
                share = self._round(step, rounds, drawn)
                metrics[f"dynamic_sampling/flat_groups_{rounds}"].append(share)
            batch = self._finished(step, batch)
            self.trainer.round_rewards = step.rewards
        metrics["dynamic_sampling/rounds"].append(float(rounds))
        metrics["dynamic_sampling/flat_groups_left"].append(step.flat.float().mean().item())
        metrics["dynamic_sampling/reward"].append(self._totals(step.rewards).nanmean().item())
        metrics["time/dynamic_sampling_s"].append(time.perf_counter() - start)
        return batch

    def _order(self, inputs: list[dict], pool: list[int], parts: tuple) -> list[int]:
        """The pool in an order that a resumed run finds again, the rows that were just sampled last. Collective."""
        seed = row_seed(self.trainer.args.seed, "dynamic_sampling", *parts)
        order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed)).tolist()
        here = torch.tensor([row[ROW_NUMBER] for row in inputs], device=self.accelerator.device)
        sampled = set(self.accelerator.gather(here).tolist())
        return sorted((pool[i] for i in order), key=lambda row: row in sampled)  # a stable sort

    def _round(self, step: _Step, number: int, drawn: list[int]) -> float:
        """Sample candidates for the flat groups and put those with spread in their places; the share of flat ones."""
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        slots = step.flat.nonzero().squeeze(1).tolist()
        count = candidate_groups(len(slots), self.group, processes, self.trainer.args.images_per_reasoning)
        prompts = [drawn[i % len(drawn)] for i in range(step.taken, step.taken + count)]
        step.taken += count
        here = count * self.group // processes
        rows = [prompts[i // self.group] for i in range(rank * here, (rank + 1) * here)]
        candidates, rewards = self._sample(rows, number)
        flat = self._flat(rewards)
        useful = (~flat).nonzero().squeeze(1).tolist()[: len(slots)]
        source = {
            candidate * self.group + i: slot * self.group + i
            for slot, candidate in zip(slots, useful, strict=False)
            for i in range(self.group)
        }  # row of the candidates -> row of the step, both numbered over all ranks
        self._unscale(candidates, rewards)
        self._move(step, candidates, source)
        for old, new in source.items():
            step.rewards[new] = rewards[old]
        step.flat[slots[: len(useful)]] = False
        return flat.float().mean().item()

    def _sample(self, rows: list[int], number: int) -> tuple[list[dict], torch.Tensor]:
        """Rows sampled for training rows, and the rewards of all ranks. Metrics stay those of the first round."""
        trainer, metrics = self.trainer, self.trainer._metrics["train"]
        trainer._metrics["train"] = defaultdict(list)
        trainer.sampling_round = number
        try:
            batch = self.generate([dict(trainer.train_dataset[i]) for i in rows])
        finally:
            extra, trainer._metrics["train"], trainer.sampling_round = trainer._metrics["train"], metrics, 0
        metrics["num_tokens"] = extra["num_tokens"]
        for name in [name for name in extra if _adds_up(name)]:
            metrics[name] = [*metrics[name][:-1], sum(metrics[name][-1:] + extra[name])]
        return split_rows(batch), trainer.round_rewards

    def _move(self, step: _Step, candidates: list[dict], source: dict[int, int]) -> None:
        """Send the useful candidates to the ranks whose rows they replace. Collective."""
        rank, here = self.accelerator.process_index, len(step.rows)
        first = rank * len(candidates)
        sent = [(source[first + i], row) for i, row in enumerate(candidates) if first + i in source]
        for target, row in gather_object(sent):
            if rank * here <= target < (rank + 1) * here:
                step.rows[target - rank * here] = row

    def _finished(self, step: _Step, batch: dict) -> dict:
        """The batch of this rank, with advantages over the rows that are kept, 0 in flat groups. Collective."""
        first = self.accelerator.process_index * len(step.rows)
        scale = self._scale(step.rewards)
        for i, row in enumerate(step.rows):
            flat = step.flat[(first + i) // self.group]
            row["advantages"] = torch.zeros_like(row["advantages"]) if flat else row["advantages"] / scale
        if step.flat.any() and not self.trainer.warned_flat_groups:
            self.trainer.warned_flat_groups = True
            logger.warning(
                "dynamic_sampling: %d of %d groups still have no reward spread after %d rounds; they are used with "
                "advantage 0 (dynamic_sampling/flat_groups_left counts them from now on). Raise "
                "dynamic_sampling_max_rounds or num_generations, or use prompts or a reward that tell samples apart.",
                int(step.flat.sum()),
                len(step.flat),
                self.trainer.args.dynamic_sampling_max_rounds,
            )
        joined = join_rows(step.rows, self.trainer._tokenizer.pad_token_id, self.accelerator.device)
        mask = joined["completion_mask"] * joined.get("tool_mask", 1)
        joined["num_items_in_batch"] = self.accelerator.gather(mask.sum()).sum()
        return {**{k: v for k, v in batch.items() if k not in ("pixel_values", "num_images")}, **joined}

    # TRL scales the advantages of a round by the spread in that round, where it scales over the batch.

    def _unscale(self, rows: list[dict], rewards: torch.Tensor) -> None:
        scale = self._scale(rewards)
        for row in rows:
            row["advantages"] = row["advantages"] * scale

    def _scale(self, rewards: torch.Tensor) -> float:
        """What TRL divides advantages by over the whole batch; 1 where it only looks at each group."""
        trainer = self.trainer
        if trainer.multi_objective_aggregation == "normalize_then_sum":
            grouped = rewards.view(-1, self.group, rewards.shape[-1])
            centred = grouped - grouped.nanmean(1, keepdim=True)
            normalised = (centred / (nanstd(grouped, dim=1, keepdim=True) + EPSILON)).view(rewards.shape)
            rewards = normalised.nan_to_num(0.0).masked_fill(rewards.isnan(), torch.nan)
        elif trainer.scale_rewards != "batch":
            return 1.0
        scale = nanstd(self._totals(rewards)).item() + EPSILON
        return scale if math.isfinite(scale) else 1.0  # fewer than two rows scored: all advantages are 0

    def _totals(self, rewards: torch.Tensor) -> torch.Tensor:
        return total_rewards(rewards, self.trainer.reward_weights)

    def _flat(self, rewards: torch.Tensor) -> torch.Tensor:
        if self.trainer.multi_objective_aggregation == "normalize_then_sum":  # each reward compares on its own
            return flat_groups(rewards[:, self.trainer.reward_weights.to(rewards.device) != 0], self.group)
        return flat_groups(self._totals(rewards).unsqueeze(1), self.group)
