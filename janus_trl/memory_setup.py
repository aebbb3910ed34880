"""What a memory plan is made for: the machine, the settings of a run, and what its data and rewards add."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from datasets import Dataset
from transformers import JanusProcessor
from trl import ModelConfig

from .config_checks import did_you_mean
from .configs import JanusGRPOConfig
from .prompts import prompt_lengths
from .rewards.specs import parse_reward_specs

GIB = 2**30
# Parameters of the reward models that are known by name (CLIP ViT-H/14 twice, ViT-L/14), loaded in float32 by default.
REWARD_PARAMETERS = {"pickscore": 986_109_441, "hps_v2": 986_109_441, "aesthetic": 427_616_513}


@dataclass(frozen=True)
class Machine:
    """How the processes share the model: `zero_stage` 0 is plain (one process, or DDP)."""

    processes: int = 1
    zero_stage: int = 0
    offload_optimizer: bool = False
    offload_weights: bool = False
    gpu: bool = True

    @property
    def shards(self) -> int:
        """Parts that ZeRO-3 makes of the weights."""
        return self.processes if self.zero_stage == 3 else 1

    def __str__(self) -> str:
        kind = f"ZeRO-{self.zero_stage}" if self.zero_stage else "DDP" if self.processes > 1 else "no sharding"
        extra = ", optimizer in host memory" if self.offload_optimizer else ""
        return f"{self.processes} GPU{'s' if self.processes > 1 else ''}, {kind}{extra}"


def machine_from(config: str | None, processes: int | None) -> Machine:
    """The machine of an accelerate file (a path, or a name in accelerate_configs/), or of the running launcher.

    Raises:
        ValueError: if there is no such file (lists those in accelerate_configs/), or not the one that it names.
    """
    env = os.environ
    if config is None:
        with_deepspeed = env.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        stage = int(env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)) if with_deepspeed else 0
        offload = [env.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_DEVICE") == "cpu" for what in ("OPTIMIZER", "PARAM")]
        return Machine(processes or int(env.get("WORLD_SIZE", 1)), stage, *offload)
    path = Path(config) if config.endswith((".yaml", ".yml")) else Path("accelerate_configs") / f"{config}.yaml"
    if not path.is_file():
        names = sorted(p.stem for p in Path("accelerate_configs").glob("*.yaml"))
        raise ValueError(
            f"accelerate_config = {config}: there is no file {path}. Names in accelerate_configs/: "
            f"{', '.join(names) or 'none'}.{did_you_mean(config, names)}"
        )
    content = yaml.safe_load(path.read_text())
    return Machine(
        processes or content.get("num_processes", 1),
        *_sharding(content.get("deepspeed_config") or {}),
        gpu=not content.get("use_cpu", False),
    )


def _sharding(zero: dict) -> tuple[int, bool, bool]:
    """Stage, and whether optimizer and weights are offloaded, of the `deepspeed_config` of an accelerate file."""
    if file := zero.get("deepspeed_config_file"):
        if not Path(file).is_file():
            raise ValueError(f"deepspeed_config_file = {file} of the accelerate file does not exist.")
        settings = json.loads(Path(file).read_text()).get("zero_optimization", {})
        devices = [settings.get(f"offload_{what}", {}).get("device") for what in ("optimizer", "param")]
        return settings.get("stage", 0), devices[0] == "cpu", devices[1] == "cpu"
    devices = [zero.get(f"offload_{what}_device") for what in ("optimizer", "param")]
    return zero.get("zero_stage", 0), devices[0] == "cpu", devices[1] == "cpu"


@dataclass(frozen=True)
class Run:
    """The settings of a run that its memory depends on; `micro_batch` and `rows` count completions of one process."""

    task: str = "t2i"
    micro_batch: int = 8
    rows: int = 64
    group: int = 8
    rollout_batch_size: int | None = None
    prompt_length: int = 32
    text_length: int = 0
    guided: bool = True  # the replay runs both streams
    sampled_guided: bool | None = None  # the rollout does; as the replay if None
    reference: bool = False
    checkpointing: bool = True
    detach: bool = False
    keep_buffers: bool = True
    mixed: bool = True
    weight_bytes: int = 2
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    lora_bytes: int = 4
    vq_bytes: int = 4
    vq_batch_size: int = 4
    reward_bytes: int = 0
    trains: str | None = None  # the task of the run where it is not that of the batch: `both`

    @classmethod
    def of(
        cls, args: JanusGRPOConfig, model: ModelConfig, prompt_length: int, rows: int, micro_batch: int, **changes
    ) -> "Run":
        """From a `JanusGRPOConfig` and TRL's `ModelConfig`, for one process; of a run of both tasks name one."""
        task, targets = changes.get("task", args.task), model.lora_target_modules
        draws = task == "t2i"
        settings = {
            "task": task,
            "trains": args.task,
            "micro_batch": micro_batch,
            "rows": rows,
            "group": args.num_generations,
            "rollout_batch_size": args.rollout_batch_size,
            "prompt_length": prompt_length,
            "text_length": args.max_reasoning_length if draws else args.max_completion_length,
            "guided": draws and args.guidance_scale != 1 and args.logp_guidance == "guided",
            "sampled_guided": draws and args.guidance_scale != 1,
            "reference": args.beta != 0,
            "checkpointing": args.gradient_checkpointing,
            "detach": args.detach_unconditional,
            "keep_buffers": args.keep_rollout_buffers,
            "mixed": bool(args.bf16),
            "weight_bytes": 2 if str(model.dtype).removeprefix("torch.") in ("bfloat16", "float16", "auto") else 4,
            "lora_rank": model.lora_r if model.use_peft else 0,
            "lora_targets": tuple([targets] if isinstance(targets, str) else targets or ()),
            "vq_bytes": 4 if args.vq_dtype == "float32" else 2,
            "vq_batch_size": args.vq_batch_size,
        }
        if "all-linear" in settings["lora_targets"]:
            settings["lora_targets"] = ()
        return cls(**{**settings, **changes})


def reward_bytes(specs) -> int:
    """Bytes of the reward models named in `reward_funcs`; 0 for a reward that is not known to have one."""
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    known = [spec for spec in parse_reward_specs(specs) if spec.name in REWARD_PARAMETERS]
    on_gpu = [spec for spec in known if spec.args.get("device") != "cpu"]
    return sum(REWARD_PARAMETERS[spec.name] * sizes.get(spec.args.get("dtype"), 4) for spec in on_gpu)


def longest_prompt(rows: Dataset, processor: JanusProcessor, draws: bool, looked_at: int = 64) -> int:
    """Ids of the longest prompt among evenly spaced rows."""
    rows = rows.select(range(0, len(rows), -(-len(rows) // looked_at)))
    pictures = rows["images"] if "images" in rows.column_names else [()] * len(rows)
    counts = [len(row or ()) for row in pictures]
    return max(prompt_lengths(processor, list(rows["prompt"]), counts, draws))


def visible_gpu_gib() -> float | None:
    """Memory of the first visible GPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory / GIB
