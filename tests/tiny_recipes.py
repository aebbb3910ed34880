"""The recipes of the embedded world as the tests of the scripts use them: with few rows, and varied."""

from pathlib import Path

import pytest
import yaml

from janus_trl.tiny import datasets as tiny_datasets

ROOT = Path(__file__).parent.parent
T2I, I2T, SFT = (str(ROOT / "recipes" / "tiny" / f"{name}.yaml") for name in ("t2i", "i2t", "sft"))


def small_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave 16 rows in every split."""
    for sizes in (tiny_datasets.SIZES, tiny_datasets.SFT_SIZES):
        for split in sizes:
            monkeypatch.setitem(sizes, split, 16)


def write_recipe(folder: Path, base: str = T2I, **changes) -> str:
    """A variation of a recipe; None removes a key."""
    values = {**yaml.safe_load(Path(base).read_text()), "output_dir": str(folder / "out"), **changes}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in values.items() if value is not None}))
    return str(path)
