"""Runs with group filtering, shared reasonings and both tasks, on any number of processes (see `distributed_launch`).

The global batch is 12 rows in groups of 4: on two processes the second group lies on both.
"""

from pathlib import Path

from datasets import Dataset
from PIL import Image
from transformers import set_seed
from trl import ModelConfig

from janus_trl.configs import JanusGRPOConfig
from janus_trl.grpo_trainer import JanusGRPOTrainer
from janus_trl.script_arguments import lora_config
from tests.distributed_scenarios import run_scenarios

GLOBAL_BATCH, GROUP, STEPS = 12, 4, 4
NAMES = [chr(ord("a") + i) for i in range(12)]
COMMON = {
    "max_steps": STEPS, "learning_rate": 3e-4, "adam_epsilon": 1e-6, "lr_scheduler_type": "constant", "bf16": False,
    "num_generations": GROUP, "shuffle_dataset": False, "logging_steps": 1, "save_strategy": "no", "seed": 2,
    "report_to": "none", "disable_tqdm": True, "num_samples": 0, "gradient_checkpointing": False,
    "max_reasoning_length": 4, "max_completion_length": 6, "image_temperature": 2.0, "guidance_scale": 2.0,
    "model_init_kwargs": {"dtype": "float32"},
}  # fmt: skip
FILTER = {"dynamic_sampling": True, "dynamic_sampling_max_rounds": 4}
SCENARIOS = {
    "filter_t2i": {"task": "t2i", "images_per_reasoning": 2, "max_steps": 2, **FILTER},
    "filter_i2t": {"task": "i2t", "scale_rewards": "batch", "max_steps": 2, **FILTER, "dynamic_sampling_max_rounds": 1},
    "mixed": {"task": "both", "beta": 0.04, "gradient_checkpointing": True, "per_device_eval_batch_size": 2},
    "mixed_lora": {"task": "both", "beta": 0.04, **FILTER},
}
EVAL_ROWS = 5  # of each task: the ranks score some twice


def pictures(names: list[str]) -> Dataset:
    """Rows of which the second and fourth of every five have no picture and the last has two."""
    counts = [(1, 0, 1, 0, 2)[i % 5] for i in range(len(names))]
    images = [[Image.new("RGB", (16, 16), (20 * i, 255 - 20 * i, 90))] * count for i, count in enumerate(counts)]
    return Dataset.from_dict({"prompt": names, "images": images})


def rows(task: str) -> Dataset | dict[str, Dataset]:
    """Prompts of one letter."""
    if task == "both":
        return {"t2i": rows("t2i"), "i2t": rows("i2t")}
    return Dataset.from_dict({"prompt": NAMES}) if task == "t2i" else pictures(NAMES)


class Scripted:
    """Spread for every second prompt, by the share of odd ids; the others get a constant. Keeps what it was given.

    Args:
        gaps: give no reward to some rows of prompts with spread.
    """

    __name__ = "scripted"

    def __init__(self, gaps: bool = False):
        self.calls, self.gaps = [], gaps

    def __call__(self, prompts, completion_ids, images=(), **columns):
        names = [prompt if isinstance(prompt, str) else prompt[0]["content"] for prompt in prompts]
        names = [name if isinstance(name, str) else name[-1]["text"] for name in names]
        self.calls.append({
            "names": names, "completion_ids": [[int(i) for i in ids] for ids in completion_ids],
            "pictures": [len(row) for row in images], "task": list(columns.get("task", [])),
        })  # fmt: skip
        lively = [name in NAMES[::2] for name in names]
        rewards = [
            sum(i % 2 for i in ids) / max(len(ids), 1) if live else 0.5
            for live, ids in zip(lively, completion_ids, strict=True)
        ]
        missing = [self.gaps and live and sum(ids) % 4 == 0 for live, ids in zip(lively, completion_ids, strict=True)]
        self.calls[-1]["missing"] = missing
        return [None if gone else reward for gone, reward in zip(missing, rewards, strict=True)]


def inputs_of(batch: dict) -> list[dict]:
    """What the loss sees of every row: ids without padding, advantage of the first and the last id, pictures."""
    seen = []
    first, counts = 0, batch.get("num_images", [0] * len(batch["prompt_ids"]))
    for i, count in enumerate(counts):
        kept = batch["completion_mask"][i].bool()
        advantage = batch["advantages"][i]
        advantage = advantage[kept][[0, -4]].tolist() if advantage.ndim else [advantage.item()] * 2
        images = batch["pixel_values"][first : first + count].mean((2, 3)).flatten().tolist() if count else []
        first += count
        seen.append({
            "prompt": batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist(),
            "completion": batch["completion_ids"][i][kept].tolist(), "advantage": advantage, "pictures": images,
        })  # fmt: skip
    return seen


def run(name: str, folder: str, output: Path, processes: int) -> dict:
    """Train a scenario; what the reward and the loss saw on this rank, and the log."""
    options = {**COMMON, **SCENARIOS[name], "per_device_train_batch_size": GLOBAL_BATCH // processes}
    args = JanusGRPOConfig(output_dir=str(output / name), **options)
    set_seed(args.seed)
    reward = Scripted(gaps=name == "filter_t2i")
    held_out = {task: part.select(range(EVAL_ROWS)) for task, part in rows("both").items()}
    trainer = JanusGRPOTrainer(
        folder, reward, args, rows(args.task), eval_dataset=held_out if name == "mixed" else None,
        peft_config=lora_config(ModelConfig(use_peft=True, lora_r=4)) if name.endswith("lora") else None,
    )  # fmt: skip
    losses, compute = [], trainer.compute_loss

    def recorded(model, inputs, *given, **named):
        losses.append(inputs_of(inputs))
        return compute(model, inputs, *given, **named)

    trainer.compute_loss = recorded
    trainer.train()
    calls, trained = list(reward.calls), list(losses)
    evaluated = trainer.evaluate() if name == "mixed" else {}
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    trainer.accelerator.free_memory()
    rewards = {k: v for k, v in evaluated.items() if "reward" in k and "time" not in k and v is not None}
    return {"calls": calls, "losses": trained, "logs": logs, "evaluated": rewards, "held_out": trainer.evaluations}


if __name__ == "__main__":
    run_scenarios(SCENARIOS, run)
