"""VQ codes of target pictures, computed once and kept on disk under picture content and tokenizer weights."""

import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, concatenate_datasets
from PIL import Image, ImageOps
from torchvision.transforms.functional import pil_to_tensor
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from .modeling import JanusForInterleavedGeneration
from .picture_decoder import PictureDecoder

# What happens between the stored picture and the tokenizer; part of the cache's name, so change it with `_square`.
PREPROCESSING = "RGB, centred square, bicubic, -1 … 1; version 1"
SHARD_SIZE = 256  # pictures a file: what a run that is killed loses at most, on each process
CONTENT_LENGTH = 1024  # a longer string is content (base64), not a path


@torch.no_grad()
def encode_pictures(model: JanusForInterleavedGeneration, pictures: list[Image.Image]) -> list[list[int]]:
    """VQ codes `[N]` of each picture, cropped to a square first; values are -1 … 1 as in decoding."""
    return _encode(_tokenizer(model), pictures)


def _tokenizer(model: JanusForInterleavedGeneration) -> torch.nn.Module:
    """The image tokenizer, whole and in float32; a copy where the model's is not (collective under ZeRO-3 then).

    The nearest codes lie closer together than bfloat16 rounds their distances: 28 % of the codes of the embedded
    world's pictures were others in it, and the loss of the checkpoint on them twice as high.
    """
    return PictureDecoder(model, torch.float32, keep_copy=is_deepspeed_zero3_enabled()).vq


@torch.no_grad()
def _encode(vq: torch.nn.Module, pictures: list[Image.Image]) -> list[list[int]]:
    """`encode_pictures` with whole weights."""
    if not pictures:
        return []
    pixels = torch.stack([_square(picture, _side(vq)) for picture in pictures])  # [N, 3, side, side]
    weight = vq.quantize.embedding.weight
    codes = vq.encode(pixels.to(weight.device, weight.dtype)).image_tokens
    return codes.view(len(pictures), -1).tolist()


def _side(vq: torch.nn.Module) -> int:
    """Pixels along an edge of the picture that the tokenizer reads."""
    return vq.quantize.quant_state_dims[0] * 2 ** (len(vq.config.channel_multiplier) - 1)


def _square(picture: Image.Image, side: int) -> torch.Tensor:
    """The largest centred square, resized; `[3, side, side]` in -1 … 1, the range in which codes are decoded."""
    picture = ImageOps.fit(picture.convert("RGB"), (side, side), Image.Resampling.BICUBIC)
    return pil_to_tensor(picture).float() / 127.5 - 1


def default_cache_dir() -> str:
    """The folder of the code cache beside that of `datasets`."""
    return os.path.join(datasets.config.HF_DATASETS_CACHE, "janus_trl_codes")


def with_image_codes(
    dataset: Dataset | None,
    model: JanusForInterleavedGeneration,
    cache_dir: str | None = None,
    batch_size: int = 64,
    device: torch.device | str | None = None,
) -> Dataset | None:
    """Put `image_codes` (VQ codes of the target picture, `[]` for rows without one) in the place of `image`.

    Pictures whose content is known are neither decoded nor encoded again. Under several processes each encodes a
    share of the rest, and all read the same files; every process has to call it.

    Args:
        cache_dir: folder of the cache; `default_cache_dir()` if None.
        batch_size: pictures that are encoded at a time.
        device: where to encode; where the tokenizer is if None.

    Raises:
        OSError: if another process could not leave its codes in the folder.
    """
    if dataset is None or "image" not in dataset.column_names:
        return dataset
    vq, keys = _tokenizer(model), picture_keys(dataset)
    if device is not None:
        vq.to(device)
    store = CodeStore(Path(cache_dir or default_cache_dir()) / _fingerprint(vq))
    _fill(store, dataset, keys, lambda pictures: _encode(vq, pictures), batch_size)
    column, layout = store.column(keys), dataset.format
    rest = dataset.remove_columns("image").with_format(None)
    return concatenate_datasets([rest, column], axis=1).with_format(layout["type"], **layout["format_kwargs"])


def _fingerprint(vq: torch.nn.Module) -> str:
    """Names a tokenizer: a hash of its float32 weights and of the preprocessing."""
    digest = hashlib.blake2b(f"{PREPROCESSING}, side {_side(vq)}".encode(), digest_size=16)
    for name, value in sorted(vq.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def picture_keys(dataset: Dataset) -> list[bytes | None]:
    """A hash of what each row's `image` holds (None for none); only what has no stored form is decoded for it."""
    transform = dataset.format["format_kwargs"].get("transform")
    folder = getattr(transform, "keywords", {}).get("folder") or ""  # that of the rows: paths are relative to it
    column, keys = dataset.select_columns(["image"]), []
    for table in column.with_format("arrow").iter(100):
        for cell in table["image"].to_pylist():
            content = _content(cell, folder)
            if content is None and cell is not None:
                picture = column[len(keys)]["image"]
                content = f"{picture.mode} {picture.size}".encode() + picture.tobytes()
            keys.append(None if content is None else hashlib.blake2b(content, digest_size=16).hexdigest().encode())
    return keys


def _content(cell, folder: str) -> bytes | None:
    """The bytes of a stored picture; None if it is not known where they are."""
    if isinstance(cell, dict):
        return cell["bytes"] if cell.get("bytes") is not None else _content(cell.get("path"), folder)
    if isinstance(cell, bytes):
        return cell
    if not isinstance(cell, str):
        return None
    if len(cell) > CONTENT_LENGTH:
        return cell.encode()
    paths = [path for path in (os.path.join(folder, cell), cell) if os.path.isfile(path)]
    return Path(paths[0]).read_bytes() if paths else None


def _fill(
    store: "CodeStore",
    dataset: Dataset,
    keys: list[bytes | None],
    encode: Callable[[list[Image.Image]], list[list[int]]],
    batch_size: int,
) -> None:
    """Encode what the store lacks: each process a share, in a second round that of its machine alone.

    In that round nothing is left to do, unless the machines do not share the folder.
    """
    column = dataset.select_columns(["image"])
    for rank, processes in (_rank("RANK", "WORLD_SIZE"), _rank("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        missing = list(store.missing(keys).items())
        _wait()  # before any process writes: the shares are those of one list
        mine, start = missing[rank::processes], time.monotonic()
        for first in range(0, len(mine), SHARD_SIZE):
            shard, codes = mine[first : first + SHARD_SIZE], []
            for at in range(0, len(shard), batch_size):
                rows = [row for _, row in shard[at : at + batch_size]]
                codes.extend(encode(column[rows]["image"]))
            store.write([key for key, _ in shard], codes)
        if mine and rank == 0:
            print(f"Image codes of {len(missing)} pictures: {time.monotonic() - start:.1f} s, kept in {store.folder}.")
        _wait()
        store.refresh()
    if missing := store.missing(keys):
        raise OSError(
            f"codes_cache_dir: {store.folder} lacks the codes of {len(missing)} pictures after encoding them."
        )


class CodeStore:
    """Image codes of one tokenizer on disk: files of `SHARD_SIZE` pictures, each written whole or not at all."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._shards: list[np.ndarray] = []
        self._where: dict[bytes, tuple[int, int]] = {}
        self._read: set[Path] = set()
        self.refresh()

    def refresh(self) -> None:
        """Find the shards that were written since the last look; they are mapped, not read."""
        for path in sorted(set(self.folder.glob("*.npy")) - self._read):
            shard = np.load(path, mmap_mode="r")
            self._where.update({key: (len(self._shards), i) for i, key in enumerate(shard["key"].tolist())})
            self._shards.append(shard)
            self._read.add(path)

    def missing(self, keys: Iterable[bytes | None]) -> dict[bytes, int]:
        """The keys that are not there, with the first row of each."""
        rows: dict[bytes, int] = {}
        for row, key in enumerate(keys):
            if key is not None and key not in self._where:
                rows.setdefault(key, row)
        return rows

    def write(self, keys: list[bytes], codes: list[list[int]]) -> None:
        """Add a shard."""
        shard = np.empty(len(keys), dtype=[("key", "S32"), ("codes", np.int32, (len(codes[0]),))])
        shard["key"], shard["codes"] = keys, codes
        _write_whole(self.folder / f"{uuid.uuid4().hex}.npy", lambda file: np.save(file, shard))

    def column(self, keys: list[bytes | None]) -> Dataset:
        """`image_codes` of rows with these keys, mapped from a file that the first process of the machine writes."""
        name = hashlib.blake2b(b",".join(key or b"" for key in keys), digest_size=16).hexdigest()
        path = self.folder / "columns" / f"{name}.arrow"
        if _rank("LOCAL_RANK", "LOCAL_WORLD_SIZE")[0] == 0 and not path.exists():
            _write_whole(path, lambda file: self._write_column(file, keys))
        _wait()
        return Dataset.from_file(str(path))

    def _write_column(self, file, keys: list[bytes | None]) -> None:
        schema = pa.schema({"image_codes": pa.list_(pa.int32())})
        with pa.ipc.new_stream(file, schema) as writer:
            for start in range(0, len(keys), 1000):
                rows = [None if key is None else self._where[key] for key in keys[start : start + 1000]]
                codes = [self._shards[at[0]]["codes"][at[1]] if at else np.empty(0, np.int32) for at in rows]
                offsets = np.cumsum([0, *map(len, codes)], dtype=np.int32)
                values = pa.array(np.concatenate(codes), pa.int32())
                writer.write_batch(pa.record_batch([pa.ListArray.from_arrays(offsets, values)], schema=schema))


def _write_whole(path: Path, write: Callable) -> None:
    """A file that appears under its name when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{uuid.uuid4().hex}.unfinished")
    try:
        with open(unfinished, "wb") as file:
            write(file)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _rank(rank: str, processes: str) -> tuple[int, int]:
    """Number of this process and of all, as the launcher names them in the environment."""
    if not torch.distributed.is_initialized():
        return 0, 1
    return int(os.environ.get(rank, 0)), int(os.environ.get(processes, 1))


def _wait() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
