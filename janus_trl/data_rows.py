"""What happens whenever a row is read: pictures become RGB, control strings in texts are neutralised."""

import logging
import os
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import datasets
from PIL import Image

from janus_trl.data_text import TEXT_COLUMNS, neutralise
from janus_trl.images import limit_image_size, load_image

logger = logging.getLogger(__name__)
BLANK_SIZE = (64, 64)
PICTURE_FORMS = {"image": datasets.Image(decode=False), "images": datasets.List(datasets.Image(decode=False))}


def with_row_reader(dataset: datasets.Dataset, folder: str | None) -> datasets.Dataset:
    """Read rows through `read_rows`; paths of pictures may be relative to `folder`."""
    return dataset.with_transform(partial(read_rows, folder=folder))


def with_reader_settings(dataset: datasets.Dataset, **settings: Any) -> datasets.Dataset:
    """The same data set with other settings of `read_rows`; those that are not named are kept."""
    transform = (dataset.format["format_kwargs"] or {}).get("transform")
    if not isinstance(transform, partial) or transform.func is not read_rows:
        transform = partial(read_rows, folder=None)
    return dataset.with_transform(partial(read_rows, **{**transform.keywords, **settings}))


def read_rows(
    batch: dict[str, list],
    folder: str | None,
    control: Sequence[str] = (),
    forgiving: bool = False,
    max_pixels: int | None = None,
) -> dict[str, list]:
    """Transform of a batch of rows.

    Args:
        folder: Where relative paths start, tried before the working folder.
        control: Control strings to neutralise in prompt, reasoning and completion.
        forgiving: Give a blank picture, with one warning, for one that cannot be read: for rows that were checked
            before, as training must not stop over a file that broke since.
        max_pixels: See `limit_image_size`. PIL's limit is that of a process: a worker of a loader that is not forked
            has not the one that was set when the data was loaded.

    Raises:
        ValueError: A picture cannot be read, unless `forgiving`.
    """
    limit_image_size(max_pixels)
    prompts = batch.get("prompt")

    def read(cell: Any, row: int) -> Image.Image:
        try:
            return _read(cell, folder)
        except ValueError as error:
            if not forgiving:
                raise
            _warn_once(f"{error} A blank picture takes its place in the row with prompt {_start(prompts, row)}.")
            return Image.new("RGB", BLANK_SIZE, "white")

    if "images" in batch:
        batch["images"] = [[read(cell, row) for cell in _as_list(cells)] for row, cells in enumerate(batch["images"])]
    if "image" in batch:
        batch["image"] = [None if cell is None else read(cell, row) for row, cell in enumerate(batch["image"])]
    for name in TEXT_COLUMNS if control else ():
        if name in batch:
            batch[name] = [neutralise(text, control) if isinstance(text, str) else text for text in batch[name]]
    return batch


def undecoded(dataset: datasets.Dataset) -> datasets.Dataset:
    """The same data set with pictures left as stored bytes and paths, so that `load_image` sees them."""

    def plain(feature: Any) -> Any:
        if isinstance(feature, datasets.Image):
            return datasets.Image(decode=False)
        return datasets.List(plain(feature.feature)) if isinstance(feature, datasets.List) else feature

    if dataset._indices is not None:  # of a shuffled or filtered data set; `flatten_indices` copies all rows otherwise
        dataset = dataset.flatten_indices()
    info = dataset.info.copy()
    info.features = datasets.Features({name: plain(feature) for name, feature in dataset.features.items()})
    # The stored form is the same: no cast, which would write all pictures to disk again.
    return datasets.Dataset(dataset.data, info=info, split=dataset.split)


def with_stored_pictures(dataset: datasets.Dataset, folder: str | None) -> datasets.Dataset:
    """The same rows with pictures in the form of `PICTURE_FORMS` and full paths, which rows to be mixed must share."""
    for name, form in PICTURE_FORMS.items():
        if dataset.features.get(name) in (None, form):
            continue
        pictures = dataset.select_columns([name]).map(
            partial(_stored, folder=folder),
            batched=True,
            features=datasets.Features({name: form}),
            load_from_cache_file=False,
        )
        dataset = datasets.concatenate_datasets([dataset.remove_columns(name), pictures], axis=1)
    return dataset


def _stored(batch: dict[str, list], folder: str | None) -> dict[str, list]:
    def stored(cell: Any) -> dict | None:
        return {"bytes": None, "path": _inside(folder, cell) or cell} if isinstance(cell, str) else cell

    if "images" in batch:
        return {"images": [[stored(cell) for cell in _as_list(cells)] for cells in batch["images"]]}
    return {"image": [stored(cell) for cell in batch["image"]]}


def _read(cell: Any, folder: str | None) -> Image.Image:
    path = cell.get("path") if isinstance(cell, dict) and cell.get("bytes") is None else cell
    return load_image(_inside(folder, path) or cell)


def _inside(folder: str | None, path: Any) -> str | None:
    """The path inside the folder that holds the rows, if there is such a file."""
    if folder and isinstance(path, str) and len(path) < 4096 and os.path.isfile(os.path.join(folder, path)):
        return os.path.join(folder, path)
    return None


def _as_list(cells: Any) -> list:
    return [] if cells is None else cells if isinstance(cells, list) else [cells]


def _start(prompts: list | None, row: int) -> str:
    text = prompts[row] if prompts else "(not read)"
    text = text if isinstance(text, str) else str(text)
    return repr(text if len(text) <= 80 else f"{text[:80]}...")


@lru_cache(maxsize=10_000)
def _warn_once(message: str) -> None:
    logger.warning(message)
