"""A mixed SFT run for the distributed tests: with two ranks, rank 0 sees only `t2i` rows and rank 1 only `i2t` rows."""

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset
from PIL import Image
from transformers import set_seed

from janus_trl.configs import JanusSFTConfig
from janus_trl.sft_trainer import JanusSFTTrainer

GLOBAL_BATCH, STEPS = 8, 3


def rows() -> Dataset:
    """One global batch: four pictures to draw, then four questions, two of them without a picture."""
    pictures = [Image.new("RGB", (16, 16), (30 * i, 255 - 30 * i, 80)) for i in range(4)]
    draw = [{"prompt": f"draw {i}", "images": [], "reasoning": "so", "image": p} for i, p in enumerate(pictures)]
    ask = [{"prompt": f"name {i}", "images": [p] if i % 2 else []} for i, p in enumerate(pictures)]
    batch = [row | {"completion": None} for row in draw]
    return Dataset.from_list(batch + [row | {"reasoning": "", "image": None, "completion": "ok"} for row in ask])


def main() -> None:
    """Train, and write the log of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--processes", required=True, type=int)
    parser.add_argument("scenarios", nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    args = JanusSFTConfig(
        output_dir=str(options.output / "sft"), max_steps=STEPS, learning_rate=1e-3, lr_scheduler_type="constant",
        per_device_train_batch_size=GLOBAL_BATCH // options.processes, guidance_dropout=0.0, logging_steps=1,
        report_to="none", disable_tqdm=True, bf16=False, save_strategy="no", train_sampling_strategy="sequential",
    )  # fmt: skip
    set_seed(args.seed)
    trainer = JanusSFTTrainer(options.model, args, rows())
    trainer.train()
    result = {"logs": [entry for entry in trainer.state.log_history if "grad_norm" in entry]}
    result["image_codes"] = trainer.train_dataset["image_codes"][:]
    (options.output / f"sft.rank{args.process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
