"""SFT cold start: `accelerate launch … -m janus_trl.scripts.sft --config recipe.yaml [--key value …]`."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, concatenate_datasets
from trl import ModelConfig

from janus_trl.configs import JanusScriptArguments, JanusSFTConfig, lora_config, one_of
from janus_trl.data import load_training_dataset
from janus_trl.recipe import or_exit, parse_recipe, resolve_model
from janus_trl.scripts.run import keep_recipe, limit_rows, model_kwargs, resume_point
from janus_trl.sft_trainer import JanusSFTTrainer


@dataclass
class SFTScriptArguments(JanusScriptArguments):
    """Data of an SFT run."""

    task: str = field(default="t2i", metadata={"help": "`t2i`, `i2t`, or `both` for a data set that has both."})


@dataclass
class SFTRun:
    """Everything a run needs, checked; no weights are loaded yet."""

    script: SFTScriptArguments
    args: JanusSFTConfig
    model: ModelConfig
    train: Dataset
    test: Dataset | None


def configure(argv: list[str]) -> SFTRun:
    """Parse and check.

    Raises:
        ValueError: what is wrong and how to mend it.
    """
    script, args, model = parse_recipe((SFTScriptArguments, JanusSFTConfig, ModelConfig), argv)
    one_of(script, "task", ("t2i", "i2t", "both"))
    lora_config(model)
    model.model_name_or_path = resolve_model(model.model_name_or_path, model.model_revision)
    tasks = ("t2i", "i2t") if script.task == "both" else (script.task,)
    parts = [limit_rows(load_training_dataset(script, task, stage="sft"), script) for task in tasks]
    tests = [part["test"] for part in parts if part["test"] is not None]
    return SFTRun(script, args, model, joined([part["train"] for part in parts]), joined(tests) if tests else None)


def joined(parts: list[Dataset]) -> Dataset:
    """The rows of all parts; concatenation alone would drop the transform that decodes pictures."""
    return concatenate_datasets(parts).with_transform(parts[0].format["format_kwargs"]["transform"])


def train(run: SFTRun, argv: list[str]) -> JanusSFTTrainer:
    """Load, train, save."""
    run.args.model_init_kwargs = model_kwargs(run.model)
    trainer = JanusSFTTrainer(
        model=run.model.model_name_or_path,
        args=run.args,
        train_dataset=run.train,
        eval_dataset=run.test,
        peft_config=lora_config(run.model),
    )
    keep_recipe(trainer, argv)
    trainer.train(resume_from_checkpoint=resume_point(run.args))
    trainer.save_model()
    trainer.save_state()
    trainer.create_model_card()
    return trainer


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    argv = sys.argv[1:] if argv is None else argv
    run = or_exit(configure, argv)
    if run.args.process_index == 0:
        print(f"SFT ({run.script.task}): {len(run.train)} rows")
    if run.script.dry_run:
        print(f"The recipe is fine; a run writes to {Path(run.args.output_dir)}.")
        return
    trainer = train(run, argv)
    if trainer.accelerator.is_main_process:
        print(f"Done. The checkpoint is in {run.args.output_dir}.")


if __name__ == "__main__":
    main()
