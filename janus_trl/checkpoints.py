"""Checkpoint folders on disk: what a whole one is, how it appears at once, and which one a run resumes from.

A checkpoint is written to `<output_dir>/_unfinished/checkpoint-N` and renamed when every file of it has been checked,
so a run that is killed while it saves leaves no half-written `checkpoint-N`. `janus_trl.json`, written last, lists
the files with their sizes: a folder that was cut short later (a copy, a deletion, a full disk) is recognised too.
"""

import contextlib
import json
import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .config_checks import did_you_mean

MANIFEST = "janus_trl.json"
# The leading underscore keeps it out of pushes: transformers uploads the output folder without `_*`.
UNFINISHED = "_unfinished"
PACKAGES = ("janus_trl", "transformers", "trl", "accelerate", "peft", "deepspeed")
_NAME = re.compile(r"^checkpoint-(\d+)$")


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or that is not what the run needs."""


def versions() -> dict[str, str]:
    """Versions of what reads and writes a checkpoint, as far as it is installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {**found, "torch": torch.__version__}  # with the CUDA that it was built for


def sampling_facts(args: Any) -> dict[str, Any]:
    """What `generate`, `evaluate` and the card of a merged checkpoint repeat of a run's arguments."""
    names = ("max_reasoning_length", "max_completion_length", "guidance_scale", "prompt_template")
    return {"sampling": {name: getattr(args, name, None) for name in names}}


def write_manifest(folder: Path, **facts: Any) -> None:
    """Write `janus_trl.json`: `facts`, versions, and every file of `folder` with its size in bytes."""
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    content = {**facts, "versions": versions(), "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The content of `janus_trl.json`; empty where there is none or it cannot be read."""
    try:
        return json.loads((Path(folder) / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}


def why_not_whole(folder: str | Path) -> str | None:
    """What is wrong with a checkpoint folder, or None if it is whole and can be resumed from."""
    folder, manifest = Path(folder), read_manifest(folder)
    if not manifest:
        return f"it has no readable {MANIFEST}, which is written last"
    if manifest.get("weights_only"):
        return "it holds weights alone (save_only_model)"
    for name, size in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def publish(unfinished: Path, final: Path) -> None:
    """Move a finished folder to its place, at once; an older folder there is removed afterwards."""
    older = unfinished.with_name(f"{unfinished.name}.older")
    shutil.rmtree(older, ignore_errors=True)
    if final.exists():
        final.rename(older)
    unfinished.rename(final)
    shutil.rmtree(unfinished.parent, ignore_errors=True)


def publish_files(unfinished: Path, final: Path) -> None:
    """Move the files of a finished folder over those in `final`, weights first, then the rest."""
    files = sorted(path for path in unfinished.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda p: p.suffix != ".safetensors"):
        target = final / path.relative_to(unfinished)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
    written = {path.name for path in files}
    if any(name.endswith(".safetensors") for name in written):
        for old in [*final.glob("*model*.safetensors"), *final.glob("*model*.safetensors.index.json")]:
            if old.name not in written:  # shards of an older save: they would be read with the new ones
                old.unlink()
        if "adapter_config.json" not in written:  # of an older save: transformers would look for its weights
            (final / "adapter_config.json").unlink(missing_ok=True)
    shutil.rmtree(unfinished.parent, ignore_errors=True)


def newest_whole(output_dir: str | Path) -> tuple[Path | None, list[str]]:
    """The whole checkpoint with the highest step, and a line about each newer folder that is not whole."""
    folder = Path(output_dir)
    found = [path for path in folder.iterdir() if _NAME.match(path.name)] if folder.is_dir() else []
    skipped = []
    for path in sorted(found, key=lambda p: -int(_NAME.match(p.name).group(1))):
        reason = why_not_whole(path)
        if reason is None:
            return path, skipped
        skipped.append(f"{path.name} is not whole: {reason}.")
    return None, skipped


def resume_choice(value: str | bool | None) -> str | bool | None:
    """`resume_from_checkpoint` as the command line gives it: a folder, or True, False, None or `auto`."""
    if not isinstance(value, str):
        return value
    word = value.lower()
    return {"true": True, "false": None, "auto": "auto"}.get(word, value)


def find_resume_point(
    value: str | bool | None, output_dir: str | Path, processes: int = 1, sharded: bool = False
) -> tuple[str | None, list[str]]:
    """The folder to resume from, and lines that say so.

    Args:
        value: a folder; True for the newest whole checkpoint in `output_dir`; `auto` for that or, if there is none,
            the start; None or False for the start.
        processes: of this run.
        sharded: DeepSpeed writes one shard per process, so their number has to be that of the checkpoint.

    Raises:
        ValueError: there is no such checkpoint, it is not whole, or it has another number of shards.
    """
    value, lines = resume_choice(value), []
    if not value:
        return None, []
    if value is True or value == "auto":
        found, lines = newest_whole(output_dir)
        if found is None:
            if value is True:
                raise ValueError(_nothing_to_resume(output_dir, lines))
            return None, [*lines, f"No checkpoint in {output_dir} yet: starting from step 0."]
    else:
        found = Path(value)
        _check_given(found)
    manifest = read_manifest(found)
    written_by = manifest.get("processes", processes)
    if sharded and written_by != processes:
        raise ValueError(
            f"resume_from_checkpoint = {found} was written by {written_by} processes, one DeepSpeed shard each, but "
            f"this run has {processes}. Start {written_by} processes, or train on from its weights with "
            f"model_name_or_path: {found}."
        )
    step = manifest.get("step")
    lines.append(f"Resuming from {found}" + (f", step {step}." if step is not None else "."))
    if written_by != processes:
        lines.append(f"It was written by {written_by} processes, this run has {processes}: random states start anew.")
    return str(found), lines


def _check_given(folder: Path) -> None:
    if not folder.is_dir():
        near = [path.as_posix() for path in folder.parent.glob("checkpoint-*")] if folder.parent.is_dir() else []
        raise ValueError(
            f"resume_from_checkpoint = {folder}: there is no such folder. Give a checkpoint folder, or true for the "
            f"newest in output_dir, or auto for that or the start.{did_you_mean(folder.as_posix(), near)}"
        )
    if not (folder / "trainer_state.json").is_file():
        raise ValueError(
            f"resume_from_checkpoint = {folder} has no trainer_state.json, so it is no checkpoint of a trainer. To "
            f"train on from its weights, set model_name_or_path: {folder} instead."
        )
    if (folder / MANIFEST).is_file() and (reason := why_not_whole(folder)):
        raise ValueError(f"resume_from_checkpoint = {folder} is not whole: {reason}. Use an older one, or true.")


def _nothing_to_resume(output_dir: str | Path, skipped: list[str]) -> str:
    found = " ".join(skipped) or "There is no checkpoint-* folder."
    return (
        f"resume_from_checkpoint = true, but output_dir = {output_dir} has no whole checkpoint. {found} Check "
        "output_dir, or use resume_from_checkpoint: auto, which starts from step 0 where there is none."
    )
