"""Whole GRPO steps on random weights of the real shapes: seconds and peak memory by phase, beside the planned memory.

    python benchmarks/train_step.py --size 7b --zero3 --images 64 --micro_batch 8 --rollout_batch_size 32
    python benchmarks/train_step.py --size 7b --lora --micro_batch 8 --rollout_batch_size 32      # no DeepSpeed
    python benchmarks/train_step.py --size 1b --one_image                                         # see `one_image`
    python benchmarks/train_step.py --size tiny --images 16 --micro_batch 8                       # on a CPU

Weights are written once to --folder and loaded as users load them; with --zero3 or --ddp the script starts itself
through `accelerate launch` on all GPUs. One JSON line per call. Phases, each with the device synchronised: `rollout`
(sampling and decoding), `reward` (the stub; scores of old policy and reference, if any), `loss` (replay and backward;
under DeepSpeed also the optimizer), `update` (the optimizer and what is between steps). Means leave out the first step,
which compiles and allocates; peaks are over all steps and ranks. `planned_gib` is what `memory_plan` says.

TFLOP/s are those of the language model's layers (N parameters) over the seconds of `loss` and `update`, per GPU:
2 N a token forward and 2 N backward to the activations, plus 2 N for weight gradients unless --lora, plus with
`hardware` 2 N for the forward that gradient checkpointing repeats. Tokens are rows x streams x positions; attention and
heads are left out (Kaplan et al. 2020, arXiv 2001.08361, section 2.1).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset, Features, Image, List, Value
from peft import PeftConfig
from PIL import Image as PILImage
from transformers import JanusProcessor
from trl import ModelConfig

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
from shapes import build
from train_step_results import Phases, load_dtype, result

from janus_trl import JanusGRPOConfig, JanusGRPOTrainer
from janus_trl.prompts import encode_prompts
from janus_trl.script_arguments import lora_config

ROOT = Path(__file__).resolve().parent.parent
WORDS = "a red circle and a blue square left of a green cross".split()
GROUP = 8


def main(argv: list[str] | None = None) -> dict | None:
    """Measure the configuration of the command line; returns what rank 0 prints."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    if not (args.zero3 or args.ddp):
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # transformers would split batches over all GPUs it sees
    write_weights(args)
    if (args.zero3 or args.ddp) and "RANK" not in os.environ:
        subprocess.run(launch_command(args, argv), check=True, cwd=ROOT)
        return None
    trainer = build_trainer(args)
    if args.one_image:
        cast_adapters(trainer, torch.bfloat16)
    clock = Phases(trainer)
    trainer.add_callback(clock)
    trainer.train()
    line = result(args, trainer, clock)
    if trainer.accelerator.is_main_process:
        print(json.dumps(line), flush=True)
    return line


def build_trainer(args: argparse.Namespace) -> JanusGRPOTrainer:
    """The trainer as a user builds it from a folder."""
    config = training_config(args)
    processor = JanusProcessor.from_pretrained(args.folder)
    return JanusGRPOTrainer(
        model=args.folder,
        reward_funcs=mean_id,
        args=config,
        train_dataset=rows(args, processor, config.generation_batch_size // config.num_generations),
        peft_config=adapter(args),
    )


def training_config(args: argparse.Namespace) -> JanusGRPOConfig:
    """`--images` completions a step over all processes, the rest as in the recipes."""
    world, cuda = int(os.environ.get("WORLD_SIZE", 1)), torch.cuda.is_available()
    return JanusGRPOConfig(
        output_dir=tempfile.mkdtemp(),
        task=args.task,
        guidance_scale=args.guidance,
        max_completion_length=args.text or 64,
        max_reasoning_length=args.text if args.task == "t2i" else 0,
        rollout_batch_size=args.rollout_batch_size,
        keep_rollout_buffers=not args.release,
        vq_batch_size=args.vq_batch_size,
        num_generations=args.group,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.images // (args.micro_batch * world),
        max_steps=args.steps,
        beta=args.beta,
        learning_rate=1e-5 if args.lora else 1e-6,
        model_init_kwargs={"dtype": load_dtype(args), "attn_implementation": "sdpa"},
        bf16=cuda,
        gradient_checkpointing=not args.no_checkpointing,
        detach_unconditional=args.detach_unconditional,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )


def adapter(args: argparse.Namespace) -> PeftConfig | None:
    """LoRA of rank 16 on all seven projections."""
    return lora_config(ModelConfig(use_peft=args.lora, lora_r=16, lora_alpha=32, lora_dropout=0.0))


def rows(args: argparse.Namespace, processor: JanusProcessor, prompts: int) -> Dataset:
    """Prompts of `--prompt` ids, each of its own; with one picture in `i2t`."""
    words: list[str] = []
    while len(encode_prompts(processor, [" ".join(words)])["input_ids"][0]) < args.prompt:
        words.append(WORDS[len(words) % len(WORDS)])
    texts = [" ".join(words[i % len(words) :] + words[: i % len(words)]) for i in range(prompts)]
    if args.task == "t2i":
        return Dataset.from_dict({"prompt": texts})
    size = processor.image_processor.size["height"]
    pictures = [PILImage.effect_noise((size, size), 20 + i).convert("RGB") for i in range(prompts)]
    features = Features({"prompt": Value("string"), "images": List(Image())})
    table = [{"prompt": text, "images": [picture]} for text, picture in zip(texts, pictures, strict=True)]
    return Dataset.from_list(table, features=features)


def mean_id(completion_ids: list[list[int]], **_) -> list[float]:
    """The reward stub: it costs nothing and differs within a group."""
    return [sum(ids) / len(ids) for ids in completion_ids]


def cast_adapters(trainer: JanusGRPOTrainer, dtype: torch.dtype) -> None:
    """PEFT keeps adapters on a bf16 model in float32."""
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


# Start ---------------------------------------------------------------------------------------------------------------


def write_weights(args: argparse.Namespace) -> None:
    """Random weights of the real shapes and a processor, in `--folder`, unless they are there."""
    if (Path(args.folder) / "config.json").exists():
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, processor = build(args.size, device, torch.bfloat16)
    if args.size != "tiny":
        vision = model.config.vision_config
        processor.num_image_tokens = vision.num_image_tokens
        processor.image_processor.size = {"height": vision.image_size, "width": vision.image_size}
    part = f"{args.folder}.part"  # a folder that was written half is not taken for a model
    model.save_pretrained(part)
    processor.save_pretrained(part)
    os.replace(part, args.folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def launch_command(args: argparse.Namespace, argv: list[str]) -> list[str]:
    """This script under ZeRO-3 or DDP on all GPUs (two processes without one)."""
    processes = args.processes or torch.cuda.device_count() or 2
    config = str(ROOT / "accelerate_configs" / f"{'zero3' if args.zero3 else 'ddp'}.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    command += ["--num_processes", str(processes)]
    if args.offload:
        command += ["--offload_optimizer_device", "cpu"]
    return [*command, str(Path(__file__).resolve()), *argv, "--folder", args.folder]


def parse(argv: list[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("tiny", "1b", "7b"), default="tiny")
    parser.add_argument("--task", choices=("t2i", "i2t"), default="t2i")
    parser.add_argument("--lora", action="store_true", help="rank 16 on all seven projections")
    parser.add_argument("--zero3", action="store_true", help="DeepSpeed ZeRO-3 on all GPUs")
    parser.add_argument("--ddp", action="store_true", help="a whole model on each of all GPUs")
    parser.add_argument("--offload", action="store_true", help="with --zero3: optimizer in host memory")
    parser.add_argument("--processes", type=int, help="with --zero3 or --ddp; all GPUs by default")
    parser.add_argument("--images", type=int, default=64, help="completions of a step, over all GPUs")
    parser.add_argument("--micro_batch", type=int, default=8, help="completions of a GPU in one forward")
    parser.add_argument("--group", type=int, default=GROUP)
    parser.add_argument("--rollout_batch_size", type=int, default=32)
    parser.add_argument("--release", action="store_true", help="keep_rollout_buffers: false")
    parser.add_argument("--vq_batch_size", type=int, default=4)
    parser.add_argument("--guidance", type=float, default=5.0)
    parser.add_argument("--detach_unconditional", action="store_true")
    parser.add_argument("--no_checkpointing", action="store_true", help="without gradient checkpointing")
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=32, help="ids of the prompt")
    parser.add_argument("--text", type=int, help="ids of reasoning (t2i: 0) or answer (i2t: 64)")
    parser.add_argument("--one_image", action="store_true", help="LoRA in bf16, micro-batch 1: memory of one image")
    parser.add_argument("--folder", help="of the weights; in the system's folder for temporary files by default")
    args = parser.parse_args(argv)
    if args.one_image:
        args.lora, args.micro_batch, args.images, args.group, args.release = True, 1, 2, 2, True
    args.text = {"t2i": 0, "i2t": 64}[args.task] if args.text is None else args.text
    args.folder = args.folder or str(Path(tempfile.gettempdir()) / f"janus_random_{args.size}")
    unit = args.micro_batch * int(os.environ.get("WORLD_SIZE", 1))
    if args.images % unit:
        parser.error(f"--images {args.images} must be a multiple of --micro_batch x processes = {unit}")
    return args


if __name__ == "__main__":
    main()
