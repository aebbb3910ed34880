"""What the training scripts share around a trainer: its data, its folder, its closing words."""

import statistics
from pathlib import Path
from typing import Any

from trl import ModelConfig

from janus_trl.recipe import read_recipe
from janus_trl.script_arguments import JanusScriptArguments
from janus_trl.task_mixture import evaluations_of


def limit_rows(splits: dict[str, Any], script: JanusScriptArguments) -> dict[str, Any]:
    """Keep the first `max_train_rows` and `max_test_rows` rows."""
    limits = {"train": script.max_train_rows, "test": script.max_test_rows}
    return {
        name: rows.select(range(min(limits[name], len(rows)))) if rows is not None and limits[name] else rows
        for name, rows in splits.items()
    }


def model_kwargs(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained`."""
    given = {"revision": model.model_revision, "dtype": model.dtype, "attn_implementation": model.attn_implementation}
    return {name: value for name, value in given.items() if value is not None}


def resume_point(args) -> str | bool | None:
    """`resume_from_checkpoint`, which the command line gives as a string: a folder, or true for the newest one."""
    value = args.resume_from_checkpoint
    return value.lower() == "true" if isinstance(value, str) and value.lower() in ("true", "false") else value


def keep_recipe(trainer, argv: list[str]) -> None:
    """Write the recipe and its overrides to `recipe.yaml` in the output folder."""
    if not trainer.accelerator.is_main_process or "--config" not in argv:
        return
    path = argv[argv.index("--config") + 1]
    read_recipe(path)
    overrides = [word for i, word in enumerate(argv) if word != "--config" and (i == 0 or argv[i - 1] != "--config")]
    folder = Path(trainer.args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    note = f"# command line: {' '.join(overrides)}\n" if overrides else ""
    (folder / "recipe.yaml").write_text(note + Path(path).read_text())


def finish(trainer) -> None:
    """Evaluate if the last step was not evaluated, save the model, and say what changed on held-out rows."""
    evaluations = trainer.evaluations
    if trainer.eval_dataset is not None and (not evaluations or evaluations[-1][0] != trainer.state.global_step):
        trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    trainer.create_model_card()
    if trainer.accelerator.is_main_process:
        for task, evaluations in evaluations_by_task(trainer).items():
            print(f"{task}: " * bool(task) + closing_line(evaluations, trainer.args.output_dir))


def evaluations_by_task(trainer) -> dict[str, list]:
    """The evaluations of each task of a run of both; of a run of one, under the empty name."""
    if not isinstance(trainer.eval_dataset, dict):
        return {"": trainer.evaluations}
    return {task: evaluations_of(rows, trainer.evaluations) for task, rows in trainer.eval_dataset.items()}


def closing_line(evaluations: list[tuple[int, dict[int, float]]], folder: str) -> str:
    """Held-out reward before and after, with the standard error of the row-wise difference."""
    if len(evaluations) < 2:
        return f"Done. Checkpoints, curve and samples are in {folder}."
    (first, before), (last, after) = evaluations[0], evaluations[-1]
    both = sorted(before.keys() & after.keys())
    before, after = [before[row] for row in both], [after[row] for row in both]
    gains = [b - a for a, b in zip(before, after, strict=True)]
    gain = statistics.fmean(gains)
    error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
    ratio = f", {gain / error:.1f} standard errors" if error > 0 else ""
    return (
        f"Held-out reward on {len(before)} rows: {statistics.fmean(before):.3f} at step {first}, "
        f"{statistics.fmean(after):.3f} at step {last} ({gain:+.3f} +- {error:.3f}{ratio}). Output: {folder}"
    )
