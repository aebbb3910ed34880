"""A mixed SFT run for the distributed tests: with two ranks, rank 0 sees only `t2i` rows and rank 1 only `i2t` rows."""

import argparse
import json
from pathlib import Path

import numpy as np
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
        per_device_eval_batch_size=GLOBAL_BATCH // options.processes, codes_cache_dir=str(options.output / "codes"),
        image_loss_weight=0.5, max_reasoning_length=2, eval_guidance_scale=2.0,
    )  # fmt: skip
    set_seed(args.seed)
    trainer = JanusSFTTrainer(options.model, args, rows(), eval_dataset=rows())
    samples = [item["image"].tobytes().hex() for item in trainer.sample_rows(2)]
    trainer.train()
    result = {"logs": [entry for entry in trainer.state.log_history if "grad_norm" in entry], "samples": samples}
    result["image_codes"] = trainer.train_dataset["image_codes"][:]
    result["eval"] = trainer.evaluate()
    result["shards"] = [len(np.load(path)) for path in (options.output / "codes").glob("*/*.npy")]
    (options.output / f"sft.rank{args.process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
