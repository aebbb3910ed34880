"""Makes the tiny Janus of the embedded world: image tokenizer, then SFT on both tasks, then a noisy last stage.

The last stage is what leaves reinforcement learning something to gain, and it is made on purpose: in a share of its
text-to-image rows the scene breaks the prompt, while plan and picture agree, and in a share of its image-to-text rows
the letter is random. Part of what a GRPO run gains afterwards is unlearning that noise.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from datasets import concatenate_datasets
from transformers import JanusForConditionalGeneration

from janus_trl.configs import JanusSFTConfig
from janus_trl.modeling import JanusForInterleavedGeneration, bind_special_ids
from janus_trl.rewards.multiple_choice import multiple_choice_reward
from janus_trl.sampling import SamplingSettings, rollout, row_seed
from janus_trl.sft_trainer import JanusSFTTrainer
from janus_trl.tiny.datasets import tiny_dataset, tiny_sft_dataset
from janus_trl.tiny.grader import read_picture
from janus_trl.tiny.processor import build_config, build_generation_config, build_processor
from janus_trl.tiny.prompts import grade
from janus_trl.tiny.vq import train_vq
from janus_trl.tiny.world import parse_plan

MAX_TEXT_LENGTH = {"t2i": 24, "i2t": 40}


def build_model(vq: torch.nn.Module, seed: int) -> JanusForConditionalGeneration:
    """A Janus with random language model and vision tower around a trained image tokenizer."""
    processor = build_processor()
    torch.manual_seed(seed)
    model = JanusForConditionalGeneration(build_config(processor.tokenizer))
    model.model.vqmodel.load_state_dict(vq.state_dict())
    # transformers draws the vision tower with std 0.02, made for wide layers: at width 64 nothing passes through it.
    for module in (model.model.vision_model, model.model.aligner):
        for weight in module.parameters():
            if weight.ndim > 1:
                torch.nn.init.xavier_uniform_(weight.view(len(weight), -1))
    model.generation_config = build_generation_config(processor.tokenizer)
    return model


def sft(model, processor, stage: str, steps: int, noise: tuple[float, float], learning_rate: float, args) -> None:
    """One SFT stage on both tasks; `noise` is that of `t2i` and `i2t` rows."""
    rows = args.rows
    parts = [
        tiny_sft_dataset("t2i", "train", size=rows, seed=args.seed + len(stage), noise=noise[0]),
        tiny_sft_dataset("i2t", "train", size=rows, seed=args.seed + len(stage), noise=noise[1]),
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = JanusSFTConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=min(50, steps // 10),
            adam_beta2=0.98,
            weight_decay=0.01,
            guidance_dropout=0.1,
            train_sampling_strategy="random",  # both tasks in every batch
            codes_cache_dir=f"{folder}/codes",  # pictures that no other run draws
            logging_steps=max(steps // 10, 1),
            save_strategy="no",
            report_to="none",
            gradient_checkpointing=False,
            bf16=False,
            seed=args.seed,
            dataloader_num_workers=args.workers,
        )
        trainer = JanusSFTTrainer(model, config, concatenate_datasets(parts), processing_class=processor)
        trainer.train()


@torch.no_grad()
def measure(model, processor, split: str = "validation", size: int = 256) -> dict[str, float]:
    """How good a checkpoint is, sampled at temperature 1 without guidance and greedy: rewards in 0 … 1."""
    figures = {}
    for task in ("t2i", "i2t"):
        rows = tiny_dataset(task, split, size=size)
        for way in ("sampled", "greedy"):
            settings = SamplingSettings(task, MAX_TEXT_LENGTH[task], greedy=way == "greedy")
            seeds = [row_seed(0, split, i) for i in range(size)]
            images = rows["images"] if task == "i2t" else None
            result = rollout(model, processor, list(rows["prompt"]), settings, seeds, images=images)
            texts = processor.batch_decode(result.completion_ids, skip_special_tokens=True)
            if task == "i2t":
                rewards = multiple_choice_reward(completions=texts, answer=rows["answer"], choices=rows["choices"])
                figures[f"i2t_{way}"] = sum(r or 0 for r in rewards) / size
                continue
            readings, plans = read_picture(result.images), [parse_plan(text) for text in texts]
            figures[f"t2i_{way}"] = sum(map(grade, rows["demands"], readings)) / size
            graded = [grade(d, p.cells) if p else 0.0 for d, p in zip(rows["demands"], plans, strict=True)]
            figures[f"t2i_plan_{way}"] = sum(graded) / size
            same = [a == b for p, r in zip(plans, readings, strict=True) if p for a, b in zip(p.cells, r, strict=True)]
            figures[f"t2i_picture_follows_plan_{way}"] = sum(same) / max(len(same), 1)
    return {name: round(value, 3) for name, value in figures.items()}


def make(args: argparse.Namespace) -> dict[str, float]:
    """Train all stages and save to `args.output_dir` in bfloat16; returns the figures of the saved checkpoint."""
    start, processor = time.monotonic(), build_processor()
    config = build_config(processor.tokenizer)
    vq = train_vq(config.vq_config, steps=args.vq_steps, seed=args.seed, device=args.device)
    with tempfile.TemporaryDirectory() as folder:
        build_model(vq.cpu(), args.seed).save_pretrained(folder)
        model = JanusForInterleavedGeneration.from_pretrained(folder, dtype=torch.float32).to(args.device)
    bind_special_ids(model, processor)
    stages = (
        ("clean", args.steps, (0.0, 0.0), args.learning_rate),
        ("noisy", args.noisy_steps, (args.t2i_noise, args.i2t_noise), args.learning_rate / 4),
    )
    for stage, steps, noise, learning_rate in stages:
        if steps:
            sft(model, processor, stage, steps, noise, learning_rate, args)
            print(f"{stage}, {time.monotonic() - start:.0f} s: {json.dumps(measure(model, processor))}", flush=True)
    model.to(torch.bfloat16).save_pretrained(args.output_dir)
    processor.save_pretrained(args.output_dir)
    saved = JanusForInterleavedGeneration.from_pretrained(args.output_dir, dtype=torch.float32).to(args.device)
    bind_special_ids(saved, processor)
    return measure(saved, processor)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default=str(Path(__file__).parent / "checkpoint"))
    parser.add_argument("--vq_steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=5000, help="SFT steps on clean rows")
    parser.add_argument("--noisy_steps", type=int, default=300, help="SFT steps on noisy rows")
    parser.add_argument("--t2i_noise", type=float, default=0.5, help="share of scenes that break their prompt")
    parser.add_argument("--i2t_noise", type=float, default=0.5, help="share of letters drawn at random")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16384, help="rows of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main() -> None:
    """Make the checkpoint and print how good it is."""
    args = parse()
    print(json.dumps(make(args)))


if __name__ == "__main__":
    main()
