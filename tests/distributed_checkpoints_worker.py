"""ZeRO-3 runs on two CPU processes that are killed, terminated, resumed and pushed.

This process imports what a run needs once and forks the two ranks of every run, with the environment that
`accelerate launch` gives them: a run starts in a second, and can be killed at any moment of its life.
"""

import gc
import json
import os
import random
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 (imports half of torch.compile: once, not per rank)
import torch
from accelerate.commands import launch
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from datasets import Dataset
from deepspeed.accelerator import get_accelerator
from transformers import TrainerCallback, set_seed
from trl import ModelConfig

import janus_trl.saving
from janus_trl.configs import JanusGRPOConfig
from janus_trl.grpo_trainer import JanusGRPOTrainer
from janus_trl.script_arguments import lora_config
from janus_trl.scripts.run import save_all
from tests.distributed_scenarios import worker_arguments

STEPS, PROCESSES = 4, 2
ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ("a red cat", "two birds", "fog", "a tower", "snow", "one")


@dataclass
class Run:
    """A run in `output`.

    Attributes:
        lora: train an adapter.
        iterations: `num_iterations`; with 2, every second checkpoint is inside a rollout.
        full_at: the disk of rank 0 is full when it saves this step.
        die_in: rank 0 kills itself in this function of `janus_trl.saving`, at its `die_at`-th call.
        push: to this repository, at the end.
    """

    output: Path
    model: str
    lora: bool = False
    iterations: int = 2
    full_at: int | None = None
    die_in: str | None = None
    die_at: int = 1
    push: str | None = None
    options: dict = field(default_factory=dict)


def odd_ids(completion_ids, **_) -> list[float]:
    """The share of odd ids: depends on every sampled one."""
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]


class Log(TrainerCallback):
    """Appends every logged step to `log.jsonl`, so that it survives the process."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "grad_norm" in logs:
            entry = {"step": state.global_step, "reward": logs.get("reward"), "grad_norm": logs["grad_norm"]}
            with open(Path(args.output_dir) / "log.jsonl", "a") as file:
                file.write(json.dumps(entry) + "\n")


def build(run: Run) -> JanusGRPOTrainer:
    """The trainer of a run."""
    args = JanusGRPOConfig(
        output_dir=str(run.output), max_steps=STEPS, learning_rate=1e-3, lr_scheduler_type="linear",
        per_device_train_batch_size=2, num_generations=4, num_iterations=run.iterations, guidance_scale=2.0,
        max_reasoning_length=2, image_temperature=2.0, bf16=False, logging_steps=1, save_strategy="steps",
        save_steps=1, save_total_limit=2, report_to="none", disable_tqdm=True, gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"}, push_to_hub=run.push is not None, hub_model_id=run.push,
        num_samples=0, seed=3, **run.options,
    )  # fmt: skip
    set_seed(args.seed)
    peft = lora_config(ModelConfig(use_peft=True, lora_r=2, lora_dropout=0.1)) if run.lora else None
    data = Dataset.from_dict({"prompt": list(PROMPTS)})
    return JanusGRPOTrainer(run.model, odd_ids, args, data, callbacks=[Log()], peft_config=peft)


def die_in(name: str, at: int) -> None:
    """Let rank 0 kill itself in the `at`-th call of a function of `janus_trl.saving`."""
    function, calls = getattr(janus_trl.saving, name), []

    def fatal(*args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(janus_trl.saving, name, fatal)


def fill_disk(trainer: JanusGRPOTrainer, step: int) -> None:
    """From the save of `step` on, no file of this process grows beyond 100 kB."""
    save = trainer._save

    def save_on_full_disk(*args, **kwargs):
        if trainer.state.global_step == step:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        save(*args, **kwargs)

    trainer._save = save_on_full_disk


def rank_main(run: Run) -> None:
    """One rank of a run, from its start to its end."""
    if run.die_in and os.environ["RANK"] == "0":
        die_in(run.die_in, run.die_at)
    trainer = build(run)
    if run.full_at and os.environ["RANK"] == "0":
        fill_disk(trainer, run.full_at)
    trainer.train(resume_from_checkpoint="auto")
    if not trainer.interrupted:
        save_all(trainer)


def launch_environment() -> dict[str, str]:
    """What `accelerate launch --config_file zero3.yaml` sets for its ranks."""
    config = str(ROOT / "accelerate_configs" / "zero3.yaml")
    args = launch.launch_command_parser().parse_args(["--config_file", config, "--num_processes", "2", "script.py"])
    launch.deepspeed_launcher = lambda args: None  # only let it complete `args`
    launch.launch_command(args)
    return prepare_deepspeed_cmd_env(args)[1]


def start(run: Run, environment: dict[str, str]) -> list[int]:
    """Fork the ranks of a run; their process ids."""
    run.output.mkdir(parents=True, exist_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = []
    for rank in range(PROCESSES):
        pid = os.fork()
        if pid:
            ranks.append(pid)
            continue
        status = 1
        try:
            log = os.open(run.output / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(PROCESSES)}
            os.environ.update({**environment, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            rank_main(run)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return ranks


def wait(
    ranks: list[int], seconds: float, until: Callable[[], bool] = lambda: False, for_all: bool = False
) -> list[int | None]:
    """Exit statuses (None: still there) when all ended, one failed (not `for_all`), `until()` holds or time is up."""
    statuses: dict[int, int | None] = dict.fromkeys(ranks)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not until() and None in statuses.values():
        for pid in [pid for pid, status in statuses.items() if status is None]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        if not for_all and any(status not in (None, 0) for status in statuses.values()):
            break
        time.sleep(0.02)
    return list(statuses.values())


def kill(ranks: list[int], statuses: list[int | None]) -> None:
    """SIGKILL to those that are still there."""
    for pid, status in zip(ranks, statuses, strict=True):
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def life(run: Run, environment: dict[str, str], seconds: float = 120, for_all: bool = False) -> dict:
    """One run until it ends, dies or is killed after `seconds`."""
    started = time.monotonic()
    ranks = start(run, environment)
    statuses = wait(ranks, seconds, for_all=for_all)
    kill(ranks, statuses)
    unfinished = sorted(path.name for path in (run.output / "_unfinished").glob("*"))
    lines = (run.output / "rank0.log").read_text(errors="replace").splitlines()
    told = [line for line in lines if line.startswith(("Resuming from", "No checkpoint"))]
    return {"statuses": statuses, "seconds": time.monotonic() - started, "unfinished": unfinished, "told": told[-1:]}


def killed(run: Run, environment: dict, kills: int, duration: float, plan: list[tuple[str, int]]) -> list[dict]:
    """Lives that end by SIGKILL, first as `plan` says, then at random moments, each resumed; the last one finishes."""
    chance, lives, first = random.Random(run.output.name), [], run.output
    for number in range(kills):
        if lives and lives[-1]["statuses"] == [0] * PROCESSES:  # it got through before its moment: start over
            run.output = first.with_name(f"{first.name}-{number}")
        run.die_in, run.die_at = plan[number] if number < len(plan) else (None, 1)
        moment = 120 if run.die_in else chance.uniform(0.1, 1) * duration
        lives.append({**life(run, environment, moment), "output": str(run.output), "moment": moment})
    run.die_in = None
    lives.append({**life(run, environment), "output": str(run.output)})
    return lives


def terminated(run: Run, environment: dict) -> list[dict]:
    """SIGTERM to rank 1 alone after the first step; then resumed to the end."""
    ranks = start(run, environment)
    log = run.output / "log.jsonl"
    wait(ranks, 60, until=lambda: log.is_file() and log.read_text())
    os.kill(ranks[1], signal.SIGTERM)
    statuses = wait(ranks, 60)
    kill(ranks, statuses)
    saved = sorted(path.name for path in run.output.glob("checkpoint-*"))
    return [{"statuses": statuses, "saved": saved}, life(run, environment)]


def main() -> None:
    """All runs, one after the other; what happened goes to `<output>/results.json`."""
    parser = worker_arguments()
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--only_kills", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # A rank that dies while it loads this extension leaves torch's lock file, at which the next one waits for ever.
    get_accelerator().create_op_builder("ShareMemCommBuilder").load()
    environment = launch_environment()
    gc.collect()
    gc.freeze()

    def run(name: str, **settings) -> Run:
        settings = {"iterations": options.iterations, **settings}
        return Run(options.output / name, options.model, **settings)

    push = None if options.only_kills else "user/{}"
    results = {"straight": [life(run("straight", push=push and push.format("full")), environment)]}
    duration = results["straight"][0]["seconds"]
    plan = [("check_weights", 2), ("write_manifest", 1)] if options.kills <= 3 else []
    results["killed"] = killed(run("killed"), environment, options.kills, duration, plan)
    if options.only_kills:
        results["disk"] = [life(run("disk", full_at=2), environment, seconds=60, for_all=True)]
    else:
        results["lora"] = [life(run("lora", lora=True, push=push.format("lora")), environment)]
        results["terminated"] = terminated(run("terminated", lora=True), environment)
    (options.output / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
