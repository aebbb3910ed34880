"""What the training scripts share around a trainer: its data, its folder, its closing words."""

import os
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

from trl import ModelConfig

from janus_trl.checkpoints import find_resume_point
from janus_trl.data import load_training_dataset
from janus_trl.data_report import from_first_process
from janus_trl.hub import check_write_access
from janus_trl.memory_setup import machine_from
from janus_trl.recipe import config_apart, read_recipe
from janus_trl.script_arguments import JanusScriptArguments
from janus_trl.signals import resume_command
from janus_trl.task_mixture import evaluations_of


def limit_rows(splits: dict[str, Any], script: JanusScriptArguments) -> dict[str, Any]:
    """Keep the first `max_train_rows` and `max_test_rows` rows."""
    limits = {"train": script.max_train_rows, "test": script.max_test_rows}
    return {
        name: rows.select(range(min(limits[name], len(rows)))) if rows is not None and limits[name] else rows
        for name, rows in splits.items()
    }


def training_splits(script: JanusScriptArguments, task: str, stage: str = "grpo") -> dict[str, Any]:
    """The rows of a task to train on, and those held out, as many as the script's arguments allow.

    Raises:
        ValueError: there are none to train on, or what is wrong with them.
    """
    splits = limit_rows(load_training_dataset(script, task, stage), script)
    if splits["train"] is None:
        raise ValueError(
            f"dataset_train_split is unset, so there are no rows of {task} to train on. Name a split, such as train."
        )
    return splits


def model_kwargs(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained`."""
    given = {"revision": model.model_revision, "dtype": model.dtype, "attn_implementation": model.attn_implementation}
    return {name: value for name, value in given.items() if value is not None}


def check_start(args, script: JanusScriptArguments) -> None:
    """Refuse what would end the run after its weights are loaded: no checkpoint to resume from, no access to the Hub.

    Raises:
        ValueError: what is wrong and how to mend it.
    """
    processes = (script.num_processes if script.dry_run else None) or args.world_size
    sharded = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if script.dry_run and script.accelerate_config:
        sharded = machine_from(script.accelerate_config, processes).zero_stage > 0
    find_resume_point(args.resume_from_checkpoint, args.output_dir, processes, sharded)
    if not script.dry_run:
        from_first_process(lambda: check_output_dir(args.output_dir))
    from_first_process(lambda: check_write_access(args, create=not script.dry_run))


def check_output_dir(folder: str) -> None:
    """Make the output folder, and refuse one in which nothing can be written."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0" * 2**16)
    except OSError as error:
        raise ValueError(
            f"output_dir = {folder} cannot be written: {error.strerror}. Choose another folder, or make room."
        ) from error


def keep_recipe(trainer, argv: list[str]) -> None:
    """Write the recipe and its overrides to `recipe.yaml` in the output folder."""
    argv = config_apart(argv)
    if not trainer.accelerator.is_main_process or "--config" not in argv:
        return
    path = argv[argv.index("--config") + 1]
    read_recipe(path)
    overrides = [word for i, word in enumerate(argv) if word != "--config" and (i == 0 or argv[i - 1] != "--config")]
    folder = Path(trainer.args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    note = f"# command line: {' '.join(overrides)}\n" if overrides else ""
    (folder / "recipe.yaml").write_text(without_tokens(note + Path(path).read_text()))


def without_tokens(recipe: str) -> str:
    """A recipe without the value of `hub_token`: it is pushed, and shown in the model card."""
    return re.sub(r"(\bhub_token\b[\"']?\s*[:=]?\s*)(\S+)", r"\1***", recipe)


def finish(trainer) -> None:
    """Evaluate if the last step was not evaluated, save the model, and say what changed on held-out rows."""
    evaluations = trainer.evaluations
    if trainer.eval_dataset is not None and (not evaluations or evaluations[-1][0] != trainer.state.global_step):
        trainer.evaluate()
    save_all(trainer)
    if trainer.accelerator.is_main_process:
        for task, evaluations in evaluations_by_task(trainer).items():
            print(f"{task}: " * bool(task) + closing_line(evaluations, trainer.args.output_dir))


def evaluations_by_task(trainer) -> dict[str, list]:
    """The evaluations of each task of a run of both; of a run of one, under the empty name."""
    if not isinstance(trainer.eval_dataset, dict):
        return {"": trainer.evaluations}
    return {task: evaluations_of(rows, trainer.evaluations) for task, rows in trainer.eval_dataset.items()}


def save_all(trainer) -> None:
    """Save state, model and card to the output folder, and push them if asked for."""
    trainer.save_state()
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
    else:
        trainer.save_model()
        trainer.create_model_card()


def ended_early(trainer, module: str, argv: list[str]) -> bool:
    """Whether SIGTERM ended the run; says how to go on, or that it cannot."""
    if trainer.interrupted and trainer.accelerator.is_main_process:
        step = trainer.state.global_step
        if trainer.args.save_only_model:
            folder = Path(trainer.args.output_dir) / f"checkpoint-{step}"
            print(
                f"SIGTERM: saved the weights alone at step {step}, in {folder}: with save_only_model: true a run "
                "cannot be resumed.",
                flush=True,
            )
            return True
        command = resume_command(module, argv, trainer.args.world_size)
        print(f"SIGTERM: saved at step {step}. Go on with:\n  {command}", flush=True)
    return trainer.interrupted


def closing_line(evaluations: list[tuple[int, dict[int, float]]], folder: str) -> str:
    """Held-out reward before and after, with the standard error of the row-wise difference."""
    if len(evaluations) < 2:
        return f"Done. Checkpoints, curve and samples are in {folder}."
    (first, before), (last, after) = evaluations[0], evaluations[-1]
    both = sorted(before.keys() & after.keys())
    if not both:
        return f"Done. No held-out row has a reward at both steps {first} and {last}. Output: {folder}"
    before, after = [before[row] for row in both], [after[row] for row in both]
    gains = [b - a for a, b in zip(before, after, strict=True)]
    gain = statistics.fmean(gains)
    error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
    ratio = f", {gain / error:.1f} standard errors" if error > 0 else ""
    return (
        f"Held-out reward on {len(before)} rows: {statistics.fmean(before):.3f} at step {first}, "
        f"{statistics.fmean(after):.3f} at step {last} ({gain:+.3f} +- {error:.3f}{ratio}). Output: {folder}"
    )
