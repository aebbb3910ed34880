"""A mixed SFT run for the distributed tests: with two ranks, rank 0 sees only `t2i` rows and rank 1 only `i2t` rows."""

from pathlib import Path

import numpy as np
from datasets import Dataset
from PIL import Image
from transformers import set_seed

from janus_trl.configs import JanusSFTConfig
from janus_trl.sft_trainer import JanusSFTTrainer
from tests.distributed_scenarios import run_scenarios

GLOBAL_BATCH, STEPS = 8, 3


def rows() -> Dataset:
    """One global batch: four pictures to draw, then four questions, two of them without a picture."""
    pictures = [Image.new("RGB", (16, 16), (30 * i, 255 - 30 * i, 80)) for i in range(4)]
    draw = [{"prompt": f"draw {i}", "images": [], "reasoning": "so", "image": p} for i, p in enumerate(pictures)]
    ask = [{"prompt": f"name {i}", "images": [p] if i % 2 else []} for i, p in enumerate(pictures)]
    batch = [row | {"completion": None} for row in draw]
    return Dataset.from_list(batch + [row | {"reasoning": "", "image": None, "completion": "ok"} for row in ask])


def run(name: str, folder: str, output: Path, processes: int) -> dict:
    """Train; the log of every step, and what this rank sampled, encoded and evaluated."""
    args = JanusSFTConfig(
        output_dir=str(output / name), max_steps=STEPS, learning_rate=1e-3, lr_scheduler_type="constant",
        per_device_train_batch_size=GLOBAL_BATCH // processes, guidance_dropout=0.0, logging_steps=1,
        report_to="none", disable_tqdm=True, bf16=False, save_strategy="no", train_sampling_strategy="sequential",
        per_device_eval_batch_size=GLOBAL_BATCH // processes, codes_cache_dir=str(output / "codes"),
        image_loss_weight=0.5, max_reasoning_length=2, eval_guidance_scale=2.0,
    )  # fmt: skip
    set_seed(args.seed)
    held_out = rows().select([0, 1, 2, 4, 5])  # two ranks have room for eight
    trainer = JanusSFTTrainer(folder, args, rows(), eval_dataset=held_out)
    samples = [item["image"].tobytes().hex() for item in trainer.sample_rows(2)]
    trainer.train()
    return {
        "logs": [entry for entry in trainer.state.log_history if "grad_norm" in entry],
        "samples": samples,
        "image_codes": trainer.train_dataset["image_codes"][:],
        "eval": trainer.evaluate(),
        "shards": [len(np.load(path)) for path in (output / "codes").glob("*/*.npy")],
    }


if __name__ == "__main__":
    run_scenarios(["sft"], run)
