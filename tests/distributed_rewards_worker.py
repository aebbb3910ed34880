"""Training runs with rewards that hold a model, and checks of the scripts, for `tests.test_rewards_distributed`.

A small CLIP lies in `<output>/clip`; for what is written there see `tests.distributed_scenarios`.
"""

import contextlib
import io
import math
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from janus_trl.configs import JanusGRPOConfig
from janus_trl.grpo_trainer import JanusGRPOTrainer
from janus_trl.rewards import get_reward_funcs
from janus_trl.scripts import grpo
from tests.distributed_scenarios import run_scenarios
from tests.distributed_worker import STEPS, Progress, rows

FAULTY_ROW = 2  # of rank 1, at the last step, whose advantages TRL keeps


def build(name: str, folder: str, output: Path, processes: int, rewards, **options) -> JanusGRPOTrainer:
    """A trainer of eight t2i completions a step, in groups of four."""
    args = JanusGRPOConfig(
        output_dir=str(output / name), task="t2i", max_steps=STEPS, learning_rate=3e-4, lr_scheduler_type="constant",
        per_device_train_batch_size=8 // processes, num_generations=4, shuffle_dataset=False, bf16=False,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, seed=2, num_samples=0,
        max_reasoning_length=0, model_init_kwargs={"dtype": "float32"}, reward_weights=rewards.weights, **options,
    )  # fmt: skip
    return JanusGRPOTrainer(folder, rewards.funcs, args, rows("t2i"), callbacks=[Progress()])


def clip(folder: str, output: Path, processes: int) -> dict:
    """CLIP on `auto` and on `cpu`, beside a reward that returns NaN once on one rank."""
    rank, calls, path = torch.distributed.get_rank(), [], str(output / "clip")

    def sometimes_nan(completions):
        calls.append(len(completions))
        faulty = rank == 1 and len(calls) == STEPS
        return [math.nan if faulty and i == FAULTY_ROW else 0.0 for i in range(len(completions))]

    args = {"model": path, "processor": path, "batch_size": 3}
    specs = [
        {"name": "pickscore", "args": args},
        {"name": "pickscore", "alias": "on_cpu", "args": {**args, "device": "cpu", "offload": True}},
        sometimes_nan,
    ]
    rewards = get_reward_funcs(specs, "t2i", ["prompt"])
    trainer = build("clip", folder, output, processes, rewards)
    rewards.load()
    trainer.train()
    saved, models = load_file(output / "clip" / "model.safetensors"), []
    for function in rewards.funcs[:2]:
        with function.wrapped_reward.clip.ready() as scorer:
            models.append({name: weight.cpu() for name, weight in scorer.module.state_dict().items()})
    return {
        "logs": [entry for entry in trainer.state.log_history if "reward" in entry],
        "intact": [all(torch.equal(model[name], weight) for name, weight in saved.items()) for model in models],
        "advantages": list(trainer._logs["advantages"]),
    }


def async_raises(folder: str, output: Path, processes: int) -> dict:
    """An `async` reward that raises on rank 1 while that of rank 0 is fine."""
    rank = torch.distributed.get_rank()

    async def judge(prompts):
        if rank == 1:
            raise ConnectionError("the judge is gone")
        return [float(i) for i in range(len(prompts))]

    trainer = build("async_raises", folder, output, processes, get_reward_funcs(judge))
    start = time.perf_counter()
    try:
        trainer.train()
    except RuntimeError as error:
        return {"message": str(error), "took": time.perf_counter() - start, "step": trainer.state.global_step}
    return {"message": None}


def script(folder: str, output: Path, processes: int) -> dict:
    """The script in processes that were started already: it is given a file as output folder, then a dry run."""
    (output / f"file.rank{torch.distributed.get_rank()}").touch()
    torch.distributed.barrier()
    recipe = ["--config", "recipes/tiny/t2i.yaml", "--max_train_rows", "32", "--max_test_rows", "4"]
    recipe += ["--per_device_train_batch_size", "8", "--num_generations", "4"]
    spoken, refused, status = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(spoken), contextlib.redirect_stderr(refused):
        start = time.perf_counter()
        try:
            grpo.main([*recipe, "--output_dir", str(output / "file.rank0")])
        except SystemExit as stop:
            status = stop.code
        took = time.perf_counter() - start
        planned = ["--dry_run", "true", "--accelerate_config", "zero3", "--gpu_memory_gib", "80"]
        grpo.main([*recipe, "--output_dir", str(output / "planned"), *planned])
    return {"status": status, "refused": refused.getvalue(), "took": took, "spoken": spoken.getvalue()}


SCENARIOS = {"clip": clip, "async_raises": async_raises, "script": script}


def run(name: str, folder: str, output: Path, processes: int) -> dict:
    """A scenario, which asks for its rank before it has a trainer."""
    JanusGRPOConfig(output_dir=str(output), report_to="none")  # starts the process group
    return SCENARIOS[name](folder, output, processes)


if __name__ == "__main__":
    run_scenarios(SCENARIOS, run)
