"""Training runs for the distributed tests: the same scenarios on one process, under DDP and under ZeRO-3.

Started by `tests.distributed_launch`, once per number of processes; see `tests.distributed_scenarios`.
"""

import dataclasses
import hashlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from PIL import Image
from transformers import TrainerCallback, set_seed
from trl import ModelConfig

from janus_trl import trainer_sampling
from janus_trl.configs import JanusGRPOConfig
from janus_trl.grpo_trainer import JanusGRPOTrainer
from janus_trl.run_log import read_messages
from janus_trl.script_arguments import lora_config
from tests.distributed_scenarios import run_scenarios

GLOBAL_BATCH = 8  # completions of a step, on all processes together
STEPS = 3
EVAL_ROWS = 5
T2I_PROMPTS = ("a red cat", "two small green birds on a long wire", "fog", "a tower")
I2T_PROMPTS = ("What is it?", "Say the first letter of all", "Which of the two is red?", "Why", "And it?", "ok")
# Every second prompt has no picture: with two groups of four on two ranks, rank 1 never sees one.
I2T_PICTURES = (1, 0, 2, 0, 1, 0)


@dataclass(frozen=True)
class Scenario:
    """A run of `STEPS` steps.

    Attributes:
        lora: train an adapter instead of all weights.
        accumulation: micro-batches of a step; the global batch stays the same.
        resume: train again from the checkpoint of step 2.
        evaluate: evaluate `EVAL_ROWS` rows at the end.
        raises: the reward raises on rank 1.
        engine: with several processes, sample on the decode engine as on a GPU.
        constant: the reward is the same for all completions.
        options: further fields of `JanusGRPOConfig`.
    """

    task: str
    lora: bool = False
    accumulation: int = 1
    resume: bool = False
    evaluate: bool = False
    raises: bool = False
    engine: bool = False
    constant: bool = False
    options: dict = field(default_factory=dict)


SCENARIOS = {
    "t2i_full": Scenario("t2i", accumulation=2, resume=True, evaluate=True, options={"beta": 0.04}),
    "t2i_lora": Scenario("t2i", lora=True, resume=True, engine=True, options={"beta": 0.04}),
    "i2t_full": Scenario("i2t", engine=True),
    "i2t_lora": Scenario("i2t", lora=True),
    "t2i_engine": Scenario("t2i", engine=True, options={"keep_rollout_buffers": False, "rollout_batch_size": 3}),
    "t2i_no_gather": Scenario("t2i", options={"ds3_gather_for_generation": False, "max_steps": 2}),
    "i2t_no_gather": Scenario("i2t", options={"ds3_gather_for_generation": False, "max_steps": 2}),
    "no_signal": Scenario(
        "i2t", constant=True, options={"max_steps": 6, "no_signal_patience": 2, "stop_on_no_signal": True}
    ),
    "reward_raises": Scenario("t2i", raises=True, options={"max_steps": 1}),
}


def rows(task: str, count: int | None = None) -> Dataset:
    """Prompts of `task`, with pictures for `i2t`; the first `count` of them, repeated where there are fewer."""
    prompts = T2I_PROMPTS if task == "t2i" else I2T_PROMPTS
    picked = [i % len(prompts) for i in range(count or len(prompts))]
    columns = {"prompt": [prompts[i] for i in picked]}
    if task == "i2t":
        colours = [(40 * i, 255 - 40 * i, 90) for i in picked]
        columns["images"] = [
            [Image.new("RGB", (16, 16), colour)] * I2T_PICTURES[i] for i, colour in zip(picked, colours, strict=True)
        ]
    return Dataset.from_dict(columns)


class Recorder:
    """A reward (the share of odd ids) that keeps what it was given: one list of rows per call."""

    __name__ = "odd_ids"

    def __init__(self, raises_on: int | None = None, constant: bool = False):
        self.raises_on, self.constant, self.rank = raises_on, constant, None
        self.calls: list[dict] = []

    def __call__(self, prompts, completion_ids, generated_images=(), images=(), **columns) -> list[float]:
        brightness = [sum(i.convert("L").tobytes()) / (i.width * i.height) for i in generated_images]
        ids = [[int(i) for i in row] for row in completion_ids]
        self.calls.append({"completion_ids": ids, "brightness": brightness, "pictures": [len(row) for row in images]})
        if self.raises_on is not None and self.rank == self.raises_on:
            raise ArithmeticError("no score for this picture")
        return [0.5 if self.constant else sum(i % 2 for i in ids) / max(len(ids), 1) for ids in completion_ids]


class Progress(TrainerCallback):
    """Each finished step on stderr, so that the log of a hang shows where it is."""

    def on_step_end(self, args, state, control, **kwargs):
        print(f"rank {args.process_index}: step {state.global_step}", file=sys.stderr, flush=True)


def build_trainer(name: str, scenario: Scenario, folder: str, output: Path, processes: int) -> JanusGRPOTrainer:
    """The trainer of a scenario, writing to `<output>/<name>`."""
    draws = scenario.task == "t2i"
    per_device = GLOBAL_BATCH // processes // scenario.accumulation
    # With adam_epsilon 1e-8 the first update of a weight whose gradient is rounding noise is the sign of the noise.
    lengths = {"max_reasoning_length": 6} if draws else {"max_completion_length": 8}
    options = {
        "output_dir": str(output / name), "task": scenario.task, "max_steps": STEPS, "learning_rate": 3e-4,
        "adam_epsilon": 1e-6, "lr_scheduler_type": "constant", "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": scenario.accumulation, "per_device_eval_batch_size": 4 // processes,
        "num_generations": GLOBAL_BATCH if draws else GLOBAL_BATCH // 2, "shuffle_dataset": False, "bf16": False,
        "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "steps" if scenario.resume else "no",
        "save_steps": 2, "report_to": "none", "disable_tqdm": True, "seed": 2, "num_samples": 0,
        "model_init_kwargs": {"dtype": "float32"}, **lengths, **scenario.options,
    }  # fmt: skip
    args = JanusGRPOConfig(**options)
    set_seed(args.seed)  # the adapter's first weights
    reward = Recorder(raises_on=1 if scenario.raises else None, constant=scenario.constant)
    reward.rank = args.process_index
    return JanusGRPOTrainer(
        model=folder,
        reward_funcs=reward,
        args=args,
        train_dataset=rows(scenario.task),
        eval_dataset=rows(scenario.task, EVAL_ROWS) if scenario.evaluate else None,
        callbacks=[Progress()],
        peft_config=lora_config(ModelConfig(use_peft=True, lora_r=4, lora_dropout=0.0)) if scenario.lora else None,
    )


def train(trainer: JanusGRPOTrainer, resume_from: Path | None = None) -> dict:
    """Train; the log of every step and what the reward saw on this rank."""
    reward = trainer.reward_funcs[0].function
    trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {"logs": logs, "calls": list(reward.calls), "monitor": read_messages(trainer.state.log_history)}


def digest(trainer: JanusGRPOTrainer) -> str:
    """A hash of all weights as this rank holds them."""
    state = hashlib.sha256()
    for _, parameter in sorted(trainer.accelerator.unwrap_model(trainer.model).named_parameters()):
        state.update(parameter.detach().numpy().tobytes())
    return state.hexdigest()


def run(name: str, folder: str, output: Path, processes: int) -> dict:
    """All of one scenario: train, save, evaluate, resume."""
    scenario = SCENARIOS[name]
    trainer_sampling.ENGINE_DEVICES = ("cpu",) if scenario.engine and processes > 1 else ("cuda",)
    trainer = build_trainer(name, scenario, folder, output, processes)
    result = train(trainer)
    result["engine"] = trainer._engine is not None
    result["digest"] = digest(trainer)
    trainer.save_model(str(output / name / "final"))
    if scenario.evaluate:
        trainer.evaluate()
        result["eval"] = {"rewards": list(trainer.eval_rewards().values()), "log": trainer.state.log_history[-1]}
    trainer.accelerator.free_memory()
    if scenario.resume:
        again = build_trainer(name, scenario, folder, output, processes)
        result["resumed"] = train(again, resume_from=output / name / "checkpoint-2")
        again.accelerator.free_memory()
    return {**result, "scenario": dataclasses.asdict(scenario)}


if __name__ == "__main__":
    run_scenarios(SCENARIOS, run)
