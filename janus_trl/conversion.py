"""Original DeepSeek checkpoints to transformers folders: files in, files out, a few gigabytes in memory at most.

No code of a checkpoint is run: weights come from safetensors or from `torch.load(weights_only=True)`.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import JanusForConditionalGeneration

from .conversion_keys import check_weights, converted_config, converted_tensors
from .conversion_processor import converted_generation_config, converted_processor

SHARD_BYTES = 2 * 10**9
# In the order in which they are looked for.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Conversion:
    """What a conversion wrote."""

    output: Path
    parameters: int
    shards: int
    dtype: torch.dtype
    tied: bool
    template: str


def local_folder(name: str, revision: str | None = None) -> Path:
    """The folder of an original checkpoint; a Hub id is downloaded (from the cache with HF_HUB_OFFLINE=1).

    Raises:
        ValueError: neither a folder nor a Hub id that can be reached.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
        if not list(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.bin"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ValueError(
            f"input = {name}: neither a folder nor a checkpoint of the Hub ({str(error).strip().splitlines()[0]}). "
            "Give the folder of an original checkpoint or an id such as deepseek-ai/Janus-Pro-1B."
        ) from error
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file; its absence is named.

    Raises:
        ValueError: there is no such file, or it holds no JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} has no {path.name}; the folder of an original checkpoint has one.") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error


def check_original(folder: Path) -> dict[str, Any]:
    """The configuration of an original checkpoint.

    Raises:
        ValueError: it is none; the message says what the folder holds.
    """
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind == "janus":
        raise ValueError(f"{folder} is in the layout of transformers already; train from it as it is.")
    if kind != "multi_modality":
        raise ValueError(f"{folder} has model_type {kind!r}; an original Janus has 'multi_modality'.")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, safetensors before .bin.

    Raises:
        ValueError: there are none, or some that the index lists are missing.
    """
    for name in _WEIGHTS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            files = [folder / shard for shard in sorted(set(read_json(index)["weight_map"].values()))]
            if missing := [file.name for file in files if not file.is_file()]:
                raise ValueError(f"{folder} lacks {', '.join(missing)}, which {index.name} lists. Download it again.")
            return files
        if (folder / name).is_file():
            return [folder / name]
    raise ValueError(f"{folder} has no weights; looked for {' and '.join(_WEIGHTS)}, whole or in shards.")


def tensors_of(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights, one file after another; what was read is mapped from disk and not copied."""
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    yield name, opened.get_tensor(name)
        else:
            try:
                content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            except RuntimeError:  # the format before torch 1.6 cannot be mapped
                content = torch.load(file, map_location="cpu", weights_only=True)
            yield from content.items()
            del content


def convert_checkpoint(
    folder: Path, output: Path, template: str = "auto", shard_bytes: int = SHARD_BYTES
) -> Conversion:
    """Write a stock transformers folder of an original checkpoint: weights, configuration, processor, generation.

    All is written to a neighbour of `output` and renamed at the end, so `output` is either whole or not there.

    Args:
        folder: the original checkpoint.
        output: a folder that does not exist yet (or is empty).
        template: words of the chat template; see `converted_processor`.
        shard_bytes: size of the weight files, and about the memory that is needed.

    Raises:
        ValueError: naming what is wrong, before anything is written.
    """
    original = check_original(folder)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"output = {output} exists already. Name a folder that does not.")
    files = weight_files(folder)
    names, dtype = meta_tensors(files)
    processor, template = converted_processor(folder, original, names, template)
    tokenizer = processor.tokenizer
    ids = {"pad": tokenizer.pad_token_id, "bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    ids["image"] = tokenizer.convert_tokens_to_ids(processor.image_token)
    config = converted_config(original, names, ids)
    config.dtype = dtype
    config.architectures = [JanusForConditionalGeneration.__name__]
    converted = {new: meta for name, tensor in names.items() for new, meta in converted_tensors(name, tensor).items()}
    check_weights(config, converted)

    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was interrupted
    partial.mkdir(parents=True)
    processor.save_pretrained(partial)
    converted_generation_config(processor).save_pretrained(partial)
    shards = _write_weights(files, partial, shard_bytes)
    config.save_pretrained(partial)
    if output.exists():
        output.rmdir()
    partial.rename(output)
    total = sum(tensor.numel() for tensor in converted.values())
    return Conversion(output, total, shards, dtype, config.tie_word_embeddings, template)


def meta_tensors(files: list[Path]) -> tuple[dict[str, torch.Tensor], torch.dtype]:
    """Shape and dtype of every weight as meta tensors, and the dtype of most of them.

    Raises:
        ValueError: a name comes twice.
    """
    found: dict[str, torch.Tensor] = {}
    sizes: dict[torch.dtype, int] = {}
    for name, tensor in tensors_of(files):
        if name in found:
            raise ValueError(f"{name} stands in two weight files of {files[0].parent}.")
        found[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    if not sizes:
        raise ValueError(f"{files[0].parent} holds no weights.")
    return found, max(sizes, key=sizes.get)


def _write_weights(files: list[Path], folder: Path, shard_bytes: int) -> int:
    """The converted weights as safetensors with an index, the number of files; about one is in memory at a time."""
    shards: list[list[str]] = []
    buffer: dict[str, torch.Tensor] = {}
    held = total = 0

    def flush() -> None:
        save_file(buffer, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(buffer))
        buffer.clear()

    for name, tensor in tensors_of(files):
        for ours, part in converted_tensors(name, tensor).items():
            size = part.numel() * part.element_size()
            if buffer and held + size > shard_bytes:
                flush()
                held = 0
            buffer[ours] = part.clone(memory_format=torch.contiguous_format)  # parts of qkv share their memory
            held, total = held + size, total + size
    flush()
    _name_shards(folder, shards, total)
    return len(shards)


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    where = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{i}").rename(folder / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
