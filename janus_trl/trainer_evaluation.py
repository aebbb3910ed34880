"""Held-out rows of `JanusGRPOTrainer`: each counted once, and drawn with fixed seeds."""

import torch

from .prompts import prompt_with_pictures, user_text
from .reward_settlement import settle
from .sampling import Rollout, row_seed
from .task_mixture import drop_joint_metrics, row_for_task
from .training_rows import with_image_list


class HeldOutEvaluation:
    """Mixin that evaluates and draws held-out rows."""

    def evaluation_loop(self, *args, **kwargs):
        """TRL's loop; the mean reward counts every row once (the sampler repeats rows to fill the ranks)."""
        self._eval_rewards, self._eval_rows_seen = {}, 0
        output = super().evaluation_loop(*args, **kwargs)
        if rewards := self.eval_rewards():
            values = torch.tensor(list(rewards.values()), dtype=torch.float64)
            error = values.std().item() / len(values) ** 0.5 if len(values) > 1 else 0.0
            self._metrics["eval"]["reward"] = [values.mean().item()]
            self._metrics["eval"]["reward_standard_error"] = [error]
            self._add_evaluation(rewards)
        if self.task == "both":
            drop_joint_metrics(self._metrics["eval"], self.batch_task)
        return output

    def _add_evaluation(self, rewards: dict[int, float]) -> None:
        """To `evaluations`; rows of another task at the same step join those that are there."""
        step = self.state.global_step
        if self.evaluations and self.evaluations[-1][0] == step and not rewards.keys() & self.evaluations[-1][1].keys():
            self.evaluations[-1][1].update(rewards)
        else:
            self.evaluations.append((step, rewards))

    def eval_rewards(self) -> dict[int, float]:
        """The weighted reward of each held-out row that was scored in the last evaluation, by row number."""
        scored = {row: [t for t in totals if t == t] for row, totals in sorted(self._eval_rewards.items())}
        return {row: sum(totals) / len(totals) for row, totals in scored.items() if totals}

    def sample_rows(self, rows: int) -> list[dict]:
        """The first held-out rows with fixed seeds: `prompt`, `image`, `reasoning`, `reward`; every rank calls it."""
        if self.eval_dataset is None or rows == 0:
            return []
        both = self.task == "both"
        held_out = self.eval_dataset["t2i"] if both else self.eval_dataset
        inputs = [held_out[i] for i in range(min(rows, len(held_out)))]
        inputs = [row_for_task(row) if both else with_image_list(row) for row in inputs]
        prompts = [prompt_with_pictures(row) for row in inputs]
        seeds = [row_seed(self.args.seed, "samples", i) for i in range(len(inputs))]
        settings = self.sampling_settings("eval", task="t2i" if both else self.task)
        result = self.sample(prompts, seeds, settings)
        texts = self.processing_class.batch_decode(result.completion_ids, skip_special_tokens=True)
        totals = self._score_samples(inputs, prompts, texts, result)
        pictures = result.images or [row["images"][0] if row.get("images") else None for row in inputs]
        return [
            {"image": picture, "prompt": user_text(row["prompt"]), "reasoning": text, "reward": total}
            for row, picture, text, total in zip(inputs, pictures, texts, totals, strict=True)
        ]

    def _score_samples(
        self, inputs: list[dict], prompts: list, texts: list[str], result: Rollout
    ) -> list[float | None]:
        """Weighted rewards, called as in training, without a trace in its metrics and tables; collective."""
        if result.images:
            pictures = zip(inputs, result.images, strict=True)
            inputs = [{**row, "generated_images": picture} for row, picture in pictures]
        if not isinstance(prompts[0], str):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        rewards = super()._calculate_rewards(inputs, prompts, texts, result.completion_ids)
        rewards = settle(self.reward_funcs, rewards, self.reward_weights, self.accelerator)
        self._pending_metrics.clear()
        self._pending_extra_logs.clear()
        totals = (rewards * self.reward_weights.to(rewards.device)).nansum(1)[: len(inputs)].tolist()
        unscored = rewards.isnan().all(1).tolist()  # of all ranks; every rank scored the same rows
        return [None if none else total for total, none in zip(totals, unscored, strict=False)]
