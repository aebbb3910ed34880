"""Checks of weight files right after they were written: every tensor there, with its shape, none empty, and trained.

An empty adapter of 40 bytes was found days after the training that should have filled it (trl#4416, peft#453).
"""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft.utils import PeftType
from safetensors import safe_open
from torch import nn
from transformers import JanusForConditionalGeneration, PreTrainedModel

from .checkpoints import CheckpointError

ADAPTER = "adapter_model.safetensors"
Shape = tuple[int, ...]


def tensor_shapes(folder: Path) -> dict[str, Shape]:
    """Name -> shape of every tensor in the safetensors files of `folder`; reads their headers alone.

    Raises:
        CheckpointError: there is none, or one that cannot be read to its end.
    """
    shapes: dict[str, Shape] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        except Exception as error:  # safetensors has its own exception, and raises others on a short file
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not shapes:
        raise CheckpointError(f"{folder} has no tensor in any safetensors file.")
    return shapes


def expected_tensors(model: nn.Module) -> list[tuple[list[str], Shape]]:
    """Every tensor that a saved `model` has to hold: the names it may have there (several where tied), and its shape.

    Of a PEFT model those are the trained parameters, of any other all.
    """
    adapter = is_peft_model(model)
    names: dict[int, list[str]] = {}
    shapes: dict[int, Shape] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if adapter and not parameter.requires_grad:
            continue
        names.setdefault(id(parameter), []).append(_name_in_file(name, model) if adapter else name)
        shapes[id(parameter)] = tuple(getattr(parameter, "ds_shape", parameter.shape))  # a shard has no shape
    return [(names[key], shapes[key]) for key in names]


def _name_in_file(name: str, model: Any) -> str:
    for adapter in model.peft_config:
        name = name.replace(f".modules_to_save.{adapter}", "").replace(f".{adapter}.", ".")
    return name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def check_weights(folder: Path, model: nn.Module) -> None:
    """Compare the files in `folder` with the model they were written from; a shard of it is enough.

    Raises:
        CheckpointError: a tensor is missing, empty, or has another shape.
    """
    written = tensor_shapes(folder)
    if empty := sorted(name for name, shape in written.items() if 0 in shape):
        raise CheckpointError(f"{folder}: {len(empty)} tensors are empty, e.g. {empty[0]}. {_GATHER_HINT}")
    for names, shape in expected_tensors(model):
        name = next((name for name in names if name in written), None)
        if name is None:
            raise CheckpointError(f"{folder}: the tensor {names[0]} was not written. {_GATHER_HINT}")
        if written[name] != shape:
            raise CheckpointError(f"{folder}: {name} was written with shape {written[name]} instead of {shape}.")


_GATHER_HINT = "Under ZeRO-3 keep `zero3_save_16bit_model: true` in the accelerate config."


def unmoved_lora(folder: Path) -> tuple[list[str], int]:
    """Names of the `lora_B` in a saved adapter that are still 0, as they were initialised, and how many there are."""
    unmoved, count = [], 0
    with safe_open(folder / ADAPTER, "pt") as file:
        for name in file.keys():
            if "lora_B" in name or "lora_embedding_B" in name:
                count += 1
                if not torch.any(file.get_tensor(name)):
                    unmoved.append(name)
    return unmoved, count


def check_moved(folder: Path) -> str | None:
    """Refuse an adapter in which nothing moved, after updates that should have moved it.

    Returns:
        A warning if a part of it did not move, else None.

    Raises:
        CheckpointError: every `lora_B` is 0, so the adapter does nothing.
    """
    unmoved, count = unmoved_lora(folder)
    if not unmoved:
        return None
    cause = "Use gradient_checkpointing_kwargs: {use_reentrant: false}, and target modules that the task uses."
    if len(unmoved) == count:
        raise CheckpointError(f"{folder}: all {count} lora_B are still 0 after an update: nothing was trained. {cause}")
    return f"{len(unmoved)} of {count} lora_B in {folder} are still 0 after an update, e.g. {unmoved[0]}. {cause}"


def mend_adapter_config(folder: Path, base: str | None) -> None:
    """Make `adapter_config.json` what others can use: the Hub id of the base if known, and no class of ours."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    if base:
        config["base_model_name_or_path"] = base
    if config.get("auto_mapping"):
        stock = JanusForConditionalGeneration
        config["auto_mapping"] = {"base_model_class": stock.__name__, "parent_library": stock.__module__}
    path.write_text(json.dumps(config, indent=2, sort_keys=True))


def hub_id(model: PreTrainedModel, given: str | None = None) -> str | None:
    """The Hub id of what `model` was loaded from; None for a folder that is no snapshot in the cache of the Hub."""
    name = given or model.config._name_or_path
    if not Path(name).is_dir():
        return name or None
    for part in Path(name).parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return None


def uses_lora(model: nn.Module) -> bool:
    """Whether the adapter of `model` starts as a no-op whose `lora_B` is 0."""
    if not is_peft_model(model):
        return False
    return all(c.peft_type == PeftType.LORA and c.init_lora_weights is True for c in model.peft_config.values())
