"""The README.md of a trained checkpoint."""

from pathlib import Path
from typing import Any

import yaml
from accelerate.utils import is_peft_model

from .adapter_files import adapter_folder
from .card_snippets import Usage, snippet
from .checkpoints import read_manifest, versions
from .prompts import prompt_template
from .weight_files import hub_id

_KINDS = {"t2i": ("text-to-image", "text-to-image"), "i2t": ("image-to-text", "image-text-to-text")}
_LOCAL_BASE = "path/to/the/base"


def write_model_card(
    trainer, method: str, task: str | None, model_name: str | None = None, reasoning_length: int | None = None
) -> None:
    """Write `README.md` to the output folder: base, method, curve end points, samples, how to use it, the recipe.

    Args:
        trainer: a `JanusGRPOTrainer` or `JanusSFTTrainer`; the main process writes.
        method: `GRPO` or `SFT`.
        task: `t2i` or `i2t`; `both` or None for both.
        model_name: title; the name of the output folder if None.
        reasoning_length: most text tokens before a picture; `max_reasoning_length` of the arguments if None.
    """
    if not trainer.is_world_process_zero():
        return
    folder, args = Path(trainer.args.output_dir), trainer.args
    task = task if task in _KINDS else None
    pushed_to = getattr(trainer, "hub_model_id", None)  # set where something is pushed
    adapter = is_peft_model(trainer.model)
    model = trainer.model.get_base_model() if adapter else trainer.model
    known = hub_id(model, getattr(args, "base_model_id", None))  # a local folder means nothing to others
    name = pushed_to or args.hub_model_id or model_name or folder.name
    usage = Usage(
        pushed_to or folder.as_posix(),
        base=(known or _LOCAL_BASE) if adapter else None,
        template=prompt_template(trainer.processing_class),
        guidance_scale=getattr(args, "guidance_scale", None) or getattr(args, "eval_guidance_scale", 5.0),
        reasoning_length=reasoning_length or getattr(args, "max_reasoning_length", None) or 0,
        answer_length=getattr(args, "max_completion_length", None) or 256,
    )
    sections = [
        _front_matter(known, method, task, adapter),
        f"# {name}",
        f"{known or 'A Janus checkpoint'}, trained with {method} by janus_trl"
        + (f" for {_KINDS[task][0]}." if task else " for text-to-image and image-to-text.")
        + (" This is a LoRA adapter." if adapter else ""),
        _end_points(trainer.state.log_history),
        _pictures(folder),
        snippet(usage, task),
        _recipe(folder),
        _versions(),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("\n\n".join(part for part in sections if part) + "\n")


def merged_card(adapter: str, base: str, output_dir: str, comparisons: list[str]) -> str:
    """The card of a merged checkpoint, with what the merge changed."""
    folder = Path(adapter_folder(adapter) or adapter)
    facts = read_manifest(folder)
    task = facts.get("task") if facts.get("task") in _KINDS else None  # a run of both names `both`
    known = None if Path(base).is_dir() else base
    method = facts.get("method") or "LoRA"
    measured = "\n".join(f"- {line}" for line in comparisons)
    sections = [
        _front_matter(known, method, task, adapter=False),
        f"# {Path(output_dir).name}",
        f"{known or 'A Janus checkpoint'} with the adapter {Path(adapter).name} merged into it, trained by janus_trl.",
        f"Compared with base and adapter on one prompt:\n\n{measured}",
        snippet(_merged_usage(Path(output_dir).as_posix(), facts.get("sampling", {})), task),
        _recipe(folder),
        _versions(),
    ]
    return "\n\n".join(part for part in sections if part) + "\n"


def _merged_usage(name: str, sampling: dict[str, Any]) -> Usage:
    return Usage(
        name,
        template=sampling.get("prompt_template") or "{prompt}",
        guidance_scale=sampling.get("guidance_scale") or 5.0,
        reasoning_length=sampling.get("max_reasoning_length") or 0,
        answer_length=sampling.get("max_completion_length") or 256,
    )


def _front_matter(base: str | None, method: str, task: str | None, adapter: bool) -> str:
    data: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    data["tags"] = ["janus", "trl", method.lower()]
    if task:
        data["pipeline_tag"] = _KINDS[task][1]
    if base:
        data["base_model"] = base
        data["base_model_relation"] = "adapter" if adapter else "finetune"
    return f"---\n{yaml.safe_dump(data, sort_keys=False)}---"


def _end_points(history: list[dict]) -> str:
    """First and last value of what was logged of reward and loss."""
    lines = []
    for key in ("eval_reward", "eval_reward/t2i", "eval_reward/i2t", "reward", "kl", "loss"):
        values = [(row["step"], row[key]) for row in history if row.get(key) is not None]
        if values:
            (first, before), (last, after) = values[0], values[-1]
            lines.append(f"| {key} | {before:.4g} (step {first}) | {after:.4g} (step {last}) |")
    return "\n".join(["| | first | last |", "|---|---|---|", *lines]) if lines else ""


def _pictures(folder: Path) -> str:
    grids = sorted(folder.glob("samples/step-*.png"))
    names = [grid.relative_to(folder).as_posix() for grid in grids[-1:]]
    names += ["curve.png"] if (folder / "curve.png").is_file() else []
    return "\n\n".join(f"![{Path(name).stem}]({name})" for name in names)


def _recipe(folder: Path) -> str:
    path = folder / "recipe.yaml"
    return f"Recipe:\n\n```yaml\n{path.read_text().rstrip()}\n```" if path.is_file() else ""


def _versions() -> str:
    return "Versions: " + ", ".join(f"{name} {version}" for name, version in versions().items()) + "."
