"""What benchmarks/train_step.py measures: phases of a step, speed, memory beside the plan."""

import argparse
import math
import time
from collections import defaultdict

import torch
from transformers import TrainerCallback
from trl import ModelConfig

from janus_trl import JanusGRPOTrainer
from janus_trl.memory_plan import PHASES, plan_memory
from janus_trl.memory_setup import GIB, Machine, Run, longest_prompt
from janus_trl.metrics import PhaseMemory

# UniRL, Janus-Pro-1B, LoRA, one image: 4.23 GiB at the peak, of which 3.89 GiB are weights.
UNIRL_ONE_IMAGE_GIB = 0.34


class Phases(PhaseMemory, TrainerCallback):
    """Seconds and peak of every phase of every step, with the device synchronised at the borders."""

    def __init__(self, trainer: JanusGRPOTrainer):
        super().__init__(trainer.accelerator.device)
        self.seconds: dict[str, list[float]] = defaultdict(list)  # per step
        self.peaks: dict[str, float] = defaultdict(float)
        self.held: list[float] = []  # GiB after each step
        self.reserved = 0.0
        trainer._memory, self.mark = self, None

    def end(self, phase: str, metrics: dict[str, list[float]]) -> None:
        """As in `PhaseMemory`, and keep the time since the phase before."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            name = phase if self.mark else "load"
            self.peaks[name] = max(self.peaks[name], torch.cuda.max_memory_allocated(self.device) / GIB)
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self.device) / GIB)
        self._add(phase)
        super().end(phase, metrics)

    def _add(self, phase: str) -> None:
        now = time.perf_counter()
        if self.mark is not None:
            self.seconds[phase][-1] += now - self.mark
        self.mark = now

    def on_step_begin(self, args, state, control, **kwargs):
        for phase in ("rollout", "reward", "loss", "update"):
            self.seconds[phase].append(0.0)

    def on_step_end(self, args, state, control, **kwargs):
        self.end("update", defaultdict(list))
        if self.device.type == "cuda":
            self.held.append(torch.cuda.memory_allocated(self.device) / GIB)

    def table(self) -> dict[str, float]:
        """Mean seconds of each phase without the first step."""
        return {name: round(mean(values[1:] or values), 3) for name, values in self.seconds.items()}


def load_dtype(args: argparse.Namespace) -> str:
    """Without DeepSpeed there are no float32 master weights: load float32 and compute in bf16."""
    return "bfloat16" if torch.cuda.is_available() and (args.lora or args.zero3) else "float32"


def result(args: argparse.Namespace, trainer: JanusGRPOTrainer, clock: Phases) -> dict:
    """What is printed; collective, since peaks are the largest over ranks."""
    seconds = clock.table()
    peaks = {name: over_ranks(trainer, clock.peaks[name]) for name in ("load", "rollout", "reward", "loss", "update")}
    reserved, highest = over_ranks(trainer, clock.reserved), max(clock.peaks.values(), default=0.0)
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    whole, world = sum(seconds.values()), trainer.accelerator.num_processes
    line = {name: getattr(args, name) for name in ("size", "task", "lora", "zero3", "offload", "beta", "guidance")}
    line |= {"gpus": world, "images": args.images, "micro_batch": args.micro_batch, "group": args.group}
    line |= {"rollout_batch_size": args.rollout_batch_size, "keep_buffers": not args.release, "steps": len(logs)}
    line |= {"seconds": seconds, "step_s": round(whole, 3)}
    line["first_step_s"] = round(sum(values[0] for values in clock.seconds.values()), 2)
    line["images_per_s_gpu"] = round(args.images / world / whole, 4)
    line |= flops(args, trainer, seconds["loss"] + seconds["update"])
    line["finite"] = len(logs) == args.steps and all(math.isfinite(e["grad_norm"] + e["loss"]) for e in logs)
    line["grad_norm"] = [round(float(entry["grad_norm"]), 5) for entry in logs]
    line["drift_mean"] = round(mean([entry["logps/drift_mean"] for entry in logs]), 5)
    if trainer.accelerator.device.type == "cuda":
        line["peak_gib"] = {name: round(value, 2) for name, value in peaks.items()}
        line |= {"highest_gib": round(over_ranks(trainer, highest), 2), "reserved_gib": round(reserved, 2)}
        line["held_gib"] = [round(value, 3) for value in clock.held]  # after each step: does it grow?
        line["gpu_used_gib"] = round(gpu_used(trainer.accelerator.device), 2)
    line["planned_gib"] = planned(args, trainer)
    if args.one_image:
        line |= one_image(trainer, clock)
    return line


def planned(args: argparse.Namespace, trainer: JanusGRPOTrainer) -> dict[str, float]:
    """What `memory_plan` says of the same run, GiB by phase."""
    cuda, world = torch.cuda.is_available(), trainer.accelerator.num_processes
    adapters = ModelConfig(use_peft=args.lora, lora_r=16, dtype=load_dtype(args))
    draws = args.task == "t2i"
    run = Run.of(
        trainer.args,
        adapters,
        prompt_length=longest_prompt(trainer.train_dataset, trainer.processing_class, draws),
        rows=args.images // world,
        micro_batch=args.micro_batch,
        lora_bytes=2 if args.one_image else 4,
        mixed=cuda,
    )
    machine = Machine(world, 3 if args.zero3 else 0, offload_optimizer=args.offload)
    plan = plan_memory(trainer.base_model.config, run, machine)
    sizes = {phase: round(plan.total(phase) / GIB, 2) for phase in PHASES}
    if args.zero3:  # DeepSpeed makes the optimizer's step at the end of the last backward
        sizes["loss"] = max(sizes["loss"], sizes["update"])
    return sizes


def flops(args: argparse.Namespace, trainer: JanusGRPOTrainer, seconds: float) -> dict[str, float]:
    """TFLOP/s per GPU of replay and backward, without and with the repeated forward."""
    model, draws = trainer.base_model, args.task == "t2i"
    layers = model.model.language_model.layers.parameters()
    size = sum(getattr(p, "ds_numel", p.numel()) for p in layers)
    streams = 2 if draws and args.guidance != 1 else 1
    completion = args.text + (model.num_image_codes + 3 if draws else 0)
    picture = 0 if draws else trainer.processing_class.num_image_tokens + 2
    tokens = args.images / trainer.accelerator.num_processes * streams * (args.prompt + picture + completion)
    useful = (4 if args.lora else 6) * size * tokens
    repeated = 0 if args.no_checkpointing else 2 * size * tokens
    per_second = {"model": useful / seconds / 1e12, "hardware": (useful + repeated) / seconds / 1e12}
    return {f"tflops_{name}": round(value, 2) for name, value in per_second.items()}


def one_image(trainer: JanusGRPOTrainer, clock: Phases) -> dict[str, float]:
    """Peak of replay, backward and optimizer of one image, without weights, adapters, their gradients and Adam states.

    Micro-batch 1, rollout buffers freed: in `loss` and `update` one image is in work at a time.
    """
    modules = [trainer.model, *([trainer._decoder.vq] if trainer._decoder else [])]
    weights = {t.data_ptr(): size_of(t) for m in modules for t in [*m.parameters(), *m.buffers()]}
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    states = [s for state in trainer.optimizer.state.values() for s in state.values() if torch.is_tensor(s)]
    held = sum(weights.values()) + sum(map(size_of, trained)) + sum(map(size_of, states))
    peak = max(clock.peaks["loss"], clock.peaks["update"])
    return {
        "one_image_peak_gib": round(peak, 3),
        "weights_gib": round(sum(weights.values()) / GIB, 3),
        "adapter_gradients_and_adam_gib": round((held - sum(weights.values())) / GIB, 3),
        "one_image_gib": round(peak - held / GIB, 3),
        "unirl_gib": UNIRL_ONE_IMAGE_GIB,
    }


def size_of(tensor: torch.Tensor) -> int:
    """Bytes."""
    return tensor.numel() * tensor.element_size()


def over_ranks(trainer: JanusGRPOTrainer, value: float) -> float:
    """The largest value of all ranks."""
    local = torch.tensor([value], device=trainer.accelerator.device)
    return trainer.accelerator.gather(local).max().item()


def gpu_used(device: torch.device) -> float:
    """GiB in use on the device: what PyTorch holds, the CUDA context, NCCL, and other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / GIB


def mean(values: list[float]) -> float:
    """0 for no values."""
    return sum(values) / max(len(values), 1)
