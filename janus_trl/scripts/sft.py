"""SFT cold start: `accelerate launch … -m janus_trl.scripts.sft --config recipe.yaml [--key value …]`."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from transformers import JanusConfig, JanusProcessor
from trl import ModelConfig

from janus_trl.callbacks import SampleGridCallback
from janus_trl.config_checks import one_of
from janus_trl.configs import JanusSFTConfig
from janus_trl.data_report import first_prompt_lines, prompt_room, validated
from janus_trl.prompts import bind_prompt_template
from janus_trl.recipe import or_exit, parse_recipe, resolve_model
from janus_trl.reporting import SampleSender
from janus_trl.script_arguments import JanusScriptArguments, lora_config
from janus_trl.scripts.run import check_start, ended_early, keep_recipe, model_kwargs, save_all, training_splits
from janus_trl.sft_trainer import JanusSFTTrainer
from janus_trl.task_mixture import one_after_another

MODULE = "janus_trl.scripts.sft"


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
    report: list[str]


def configure(argv: list[str]) -> SFTRun:
    """Parse and check.

    Raises:
        ValueError: what is wrong and how to mend it.
    """
    script, args, model = parse_recipe((SFTScriptArguments, JanusSFTConfig, ModelConfig), argv)
    one_of(script, "task", ("t2i", "i2t", "both"))
    lora_config(model)
    check_start(args, script)
    model.model_name_or_path = resolve_model(model.model_name_or_path, model.model_revision)
    parts, report = {"train": {}, "test": {}}, []
    for task in ("t2i", "i2t") if script.task == "both" else (script.task,):
        splits = training_splits(script, task, stage="sft")
        splits, lines = check_rows(splits, task, script, args, model)
        report += lines
        for name, rows in splits.items():
            if rows is not None:
                parts[name][task] = rows
    return SFTRun(script, args, model, joined(parts["train"]), joined(parts["test"]), report)


def check_rows(splits: dict, task: str, script: SFTScriptArguments, args: JanusSFTConfig, model: ModelConfig):
    """The splits as they are safe to train on, and a report of a few lines (with the first prompt in a dry run)."""
    processor = JanusProcessor.from_pretrained(model.model_name_or_path, revision=model.model_revision)
    bind_prompt_template(processor, args.prompt_template)
    config = JanusConfig.from_pretrained(model.model_name_or_path, revision=model.model_revision)
    # Reasoning and answer count as part of the prompt; an answer has one token more, its end.
    options = {"rows": script.validate_rows, "bad_rows": script.bad_rows, "stage": "sft"}
    options["room"] = prompt_room(config, task, 0 if task == "t2i" else 1)
    checked, lines = {}, []
    for name, rows in splits.items():
        if rows is not None:
            rows, report = validated(rows, task, processor, name=f"{task}, {name}", **options)
            lines += report.lines()
        checked[name] = rows
    if script.dry_run:
        lines += first_prompt_lines(checked["train"], processor, draws=task == "t2i")
    return checked, lines


def joined(parts: dict[str, Dataset]) -> Dataset | None:
    """The rows of all tasks; None where there are none."""
    return one_after_another(parts) if len(parts) > 1 else next(iter(parts.values()), None)


def train(run: SFTRun, argv: list[str]) -> JanusSFTTrainer:
    """Load, train, evaluate, save."""
    run.args.model_init_kwargs = model_kwargs(run.model)
    trainer = JanusSFTTrainer(
        model=run.model.model_name_or_path,
        args=run.args,
        train_dataset=run.train,
        eval_dataset=run.test,
        peft_config=lora_config(run.model),
    )
    keep_recipe(trainer, argv)
    if run.test is not None and run.args.num_samples:
        send = SampleSender(trainer)
        trainer.add_callback(
            EvaluationGridCallback(
                lambda step: [] if trainer.interrupted else trainer.sample_rows(run.args.num_samples),
                every=0,
                send=send,
            )
        )
    trainer.train(resume_from_checkpoint=run.args.resume_from_checkpoint)
    if ended_early(trainer, MODULE, argv):
        return trainer
    if run.test is not None and last_evaluation(trainer) != trainer.state.global_step:
        trainer.evaluate()
    save_all(trainer)
    return trainer


class EvaluationGridCallback(SampleGridCallback):
    """A grid at start, at end and at every evaluation."""

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        """Draws the held-out rows that were just evaluated."""
        self._sample(args, state)


def last_evaluation(trainer: JanusSFTTrainer) -> int | None:
    """The step of the last evaluation."""
    return max((entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry), default=None)


def closing_line(history: list[dict], folder: str) -> str:
    """Held-out losses before and after."""
    parts = []
    for name in ("eval_loss", "eval_loss/text", "eval_loss/image"):
        values = [(entry["step"], entry[name]) for entry in history if name in entry]
        if values:
            (first, before), (last, after) = values[0], values[-1]
            parts.append(f"{name} {before:.3f} (step {first}) to {after:.3f} (step {last})")
    return f"Done. {'; '.join(parts) + '. ' if parts else ''}The checkpoint is in {folder}."


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    argv = sys.argv[1:] if argv is None else argv
    run = or_exit(configure, argv)
    if run.args.process_index == 0:
        held_out = f", {len(run.test)} held-out rows" if run.test is not None else ""
        print(*run.report, f"SFT ({run.script.task}): {len(run.train)} training rows{held_out}", sep="\n")
    if run.script.dry_run:
        if run.args.process_index == 0:
            print(f"The recipe is fine; a run writes to {Path(run.args.output_dir)}.")
        return
    trainer = train(run, argv)
    if trainer.accelerator.is_main_process and not trainer.interrupted:
        print(closing_line(trainer.state.log_history, run.args.output_dir))


if __name__ == "__main__":
    main()
