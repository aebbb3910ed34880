"""What a resumed run is compared with: fingerprints of weights, and the state beside them."""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

STATE = "janus_trl_state.json"
# A fingerprint covers so many values of so many tensors of each kind: enough to tell another model, cheap at 7B.
TENSORS, VALUES = 8, 2**16


def fingerprints(model: nn.Module, names: list[str] | None = None) -> dict[str, str]:
    """Hashes of some frozen and some trained tensors, by name; collective under ZeRO-3.

    Args:
        names: the tensors; evenly spread ones if None. A name that the model lacks is left out.
    """
    parameters = dict(model.named_parameters())
    if names is None:
        names = [name for frozen in (True, False) for name in _spread(parameters, frozen)]
    chosen = {name: parameters[name] for name in names if name in parameters}
    with _whole(list(chosen.values())):
        return {name: _fingerprint(parameter) for name, parameter in chosen.items()}


def _spread(parameters: dict[str, nn.Parameter], frozen: bool) -> list[str]:
    names = [name for name, parameter in parameters.items() if parameter.requires_grad != frozen]
    return names[:: max(1, -(-len(names) // TENSORS))]


def _whole(parameters: list[nn.Parameter]):
    if not parameters or not is_deepspeed_zero3_enabled():
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def _fingerprint(parameter: nn.Parameter) -> str:
    values = parameter.detach().flatten()[:VALUES].float().cpu().contiguous()
    return hashlib.blake2b(values.numpy().tobytes(), digest_size=8).hexdigest()


def changed(model: nn.Module, expected: dict[str, str]) -> tuple[list[str], list[str]]:
    """Names of `expected` whose tensor is another one now, and names that the model lacks; collective under ZeRO-3."""
    found = fingerprints(model, list(expected))
    missing = [name for name in expected if name not in found]
    return [name for name, value in found.items() if value != expected[name]], missing


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write `janus_trl_state.json` of a checkpoint."""
    (folder / STATE).write_text(json.dumps(state))


def read_state(folder: str | Path) -> dict[str, Any]:
    """The content of `janus_trl_state.json`; empty where there is none (a checkpoint of another trainer)."""
    path = Path(folder) / STATE
    return json.loads(path.read_text()) if path.is_file() else {}


def mismatch_message(folder: str | Path, model: nn.Module, changed: list[str], missing: list[str]) -> str:
    """What a run that got other weights than it saved is told."""
    parameters = dict(model.named_parameters())
    frozen = [name for name in changed if not parameters[name].requires_grad]
    if missing:
        what, why = f"the model has no parameter {missing[0]}", "It was trained with other LoRA settings or as a whole."
    elif frozen:
        what = f"the frozen weight {frozen[0]} is not the one it was trained with"
        why = "model_name_or_path names another base, its files have changed, or dtype is another one."
    else:
        what, why = f"the weight {changed[0]} was not restored", "Its files are damaged, or dtype is another one."
    count = len(changed) + len(missing)
    return (
        f"resume_from_checkpoint = {folder}: {what} ({count} tensors differ). {why} Resume with the recipe of the "
        "run that wrote it."
    )


def mid_cycle_file(folder: str | Path, rank: int) -> Path:
    """Where a rank keeps the rollout that it has not finished learning from."""
    return Path(folder) / f"rollout_{rank}.pt"


def to_cpu(value: Any) -> Any:
    """`value` with every tensor in it as a CPU tensor of its own storage."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: to_cpu(item) for key, item in value.items()}
    return type(value)(to_cpu(item) for item in value) if isinstance(value, list | tuple) else value


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    return type(value)(to_device(item, device) for item in value) if isinstance(value, list | tuple) else value
