"""Entropy control on one process or several: the coefficients of a run, of a resumed run, and what they do.

Started by `tests.distributed_launch`; see `tests.distributed_scenarios`.
"""

from pathlib import Path

from datasets import Dataset

from janus_trl.configs import JanusGRPOConfig
from janus_trl.grpo_trainer import JanusGRPOTrainer
from tests.distributed_scenarios import run_scenarios

GLOBAL_BATCH, STEPS = 8, 3
# Steps that are large enough to see; both modalities start on one side of their target.
CONTROL = {
    "entropy_coef_lr": 0.05,
    "entropy_coef_limit": 0.2,
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 2,
}
SCENARIOS = {
    "above": {"entropy_target_text": 1.0, "entropy_target_image": 1.0},
    "below": {
        "entropy_target_text": 4.6,
        "entropy_target_image": 2.77,
        "gradient_accumulation_steps": 2,
        "save_strategy": "no",
    },
}


def constant(completions, **_) -> list[float]:
    """No advantage: the entropy terms alone move the policy."""
    return [1.0] * len(completions)


def build(folder: str, output: Path, processes: int, options: dict) -> JanusGRPOTrainer:
    """A trainer on rows that end their texts at different lengths: the ranks hold different numbers of text ids."""
    micro_batches = options.get("gradient_accumulation_steps", 1)
    args = JanusGRPOConfig(
        output_dir=str(output), num_generations=8, learning_rate=2e-3, lr_scheduler_type="constant", adam_epsilon=1e-6,
        logging_steps=1, report_to="none", disable_tqdm=True,
        shuffle_dataset=False, bf16=False, guidance_scale=1.0, max_reasoning_length=6, seed=2, num_samples=0,
        model_init_kwargs={"dtype": "float32"}, per_device_train_batch_size=GLOBAL_BATCH // processes // micro_batches,
        **{**CONTROL, **options},
    )  # fmt: skip
    return JanusGRPOTrainer(folder, constant, args, Dataset.from_dict({"prompt": ["a red cat", "fog", "a tower"]}))


def train(trainer: JanusGRPOTrainer, checkpoint: Path | None = None) -> dict:
    """The logged steps, and the state of the control at the end."""
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    result = {"logs": logs, "state": trainer.entropy_control.state()}
    trainer.accelerator.free_memory()
    return result


def run(name: str, folder: str, output: Path, processes: int) -> dict:
    """A scenario; the first one is also resumed from its checkpoint of step 2."""
    result = train(build(folder, output / name, processes, SCENARIOS[name]))
    if name == "above":
        again = build(folder, output / name, processes, SCENARIOS[name])
        result["resumed"] = train(again, output / name / "checkpoint-2")
    return result


if __name__ == "__main__":
    run_scenarios(SCENARIOS, run)
