"""Adapters of PEFT by folder or by Hub id: whether a name is one, the base it names, and where its files are."""

import json
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers.utils.hub import cached_file

CONFIG = "adapter_config.json"


def model_file(name: str | None, file: str, revision: str | None = None) -> Path | None:
    """A file of a folder or of a Hub id (without network from its cache); None if it is not there."""
    if not name or name == "tiny":  # the model in the package is no Hub id
        return None
    # A file that is missing is an answer here; a name that is no repository is refused where its config is read.
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")}
    try:
        found = cached_file(name, file, revision=revision, **quiet)
    except OSError:
        return None
    return Path(found) if found else None


def is_adapter(name: str | None, revision: str | None = None) -> bool:
    """Whether a folder or a Hub id holds a PEFT adapter instead of a model."""
    return model_file(name, CONFIG, revision) is not None


def adapter_base(name: str | None) -> str | None:
    """The base that an adapter names; None for what is no adapter."""
    path = model_file(name, CONFIG)
    return json.loads(path.read_text())["base_model_name_or_path"] if path else None


def adapter_folder(name: str | None) -> str | None:
    """The local folder of an adapter, downloaded or from the cache if `name` is a Hub id; None for no adapter."""
    if not is_adapter(name) or Path(name).is_dir():
        return name if is_adapter(name) else None
    return snapshot_download(name, ignore_patterns=["*/*"])  # without pictures and pushed checkpoints
