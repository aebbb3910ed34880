"""The README.md of a trained checkpoint."""

from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
import trl
import yaml
from accelerate.utils import is_peft_model

_KINDS = {"t2i": ("text-to-image", "text-to-image"), "i2t": ("image-to-text", "image-text-to-text")}
_LOAD = {
    False: 'model = JanusForConditionalGeneration.from_pretrained("{name}")',
    True: 'model = PeftModel.from_pretrained(JanusForConditionalGeneration.from_pretrained("{base}"), "{name}")',
}


def write_model_card(trainer, method: str, task: str | None, model_name: str | None = None) -> None:
    """Write `README.md` to the output folder: base, method, curve end points, samples, how to load it, the recipe.

    Args:
        trainer: a `JanusGRPOTrainer` or `JanusSFTTrainer`; the main process writes.
        method: `GRPO` or `SFT`.
        task: `t2i`, `i2t`, or None for both.
        model_name: title; the name of the output folder if None.
    """
    if not trainer.is_world_process_zero():
        return
    folder, base = Path(trainer.args.output_dir), trainer.model.config._name_or_path
    name = trainer.args.hub_model_id or model_name or folder.name
    known = None if Path(base).is_dir() else base  # a local folder means nothing to others
    sections = [
        _front_matter(known, method, task),
        f"# {name}",
        f"{known or 'A Janus checkpoint'}, trained with {method} by janus_trl"
        + (f" for {_KINDS[task][0]}." if task else " for text-to-image and image-to-text."),
        _end_points(trainer.state.log_history),
        _pictures(folder),
        _loading(name, known or "path/to/the/base", is_peft_model(trainer.model)),
        _recipe(folder),
        f"Versions: transformers {transformers.__version__}, TRL {trl.__version__}, accelerate "
        f"{accelerate.__version__}, PyTorch {torch.__version__}.",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("\n\n".join(part for part in sections if part) + "\n")


def _front_matter(base: str | None, method: str, task: str | None) -> str:
    data: dict[str, Any] = {"library_name": "transformers", "tags": ["janus", "trl", method.lower()]}
    if task:
        data["pipeline_tag"] = _KINDS[task][1]
    if base:
        data["base_model"] = base
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


def _loading(name: str, base: str, adapter: bool) -> str:
    imports = ["from peft import PeftModel"] if adapter else []
    imports.append("from transformers import JanusForConditionalGeneration, JanusProcessor")
    load = [_LOAD[adapter].format(name=name, base=base), f'processor = JanusProcessor.from_pretrained("{name}")']
    return "\n".join(["```python", *imports, "", *load, "```"])


def _recipe(folder: Path) -> str:
    path = folder / "recipe.yaml"
    return f"Recipe:\n\n```yaml\n{path.read_text().rstrip()}\n```" if path.is_file() else ""
