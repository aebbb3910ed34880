"""What the tests of generation share: prompts, the scorer's view of a folder, scripts as processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from PIL import Image

from tests.distributed_launch import environment

PROMPTS = ["a cat", "two red dogs", "the sea at night, in oil", "x"]
GENEVAL = [
    {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"},
    {"tag": "counting", "include": [{"class": "cow", "count": 2}], "exclude": [{"class": "cow", "count": 3}],
     "prompt": "a photo of two cows"},
    {"tag": "position", "include": [{"class": "cow", "count": 1}, {"class": "bed", "count": 1,
     "position": ["left of", 0]}], "prompt": "a photo of a bed left of a cow"},
]  # fmt: skip
OFFICIAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "prompts" / "geneval_official.jsonl"


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def geneval_file(folder: Path, rows: list[dict]) -> str:
    path = folder / "evaluation_metadata.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def scorer_reads(folder: Path) -> dict[int, tuple[dict, list[str]]]:
    """What GenEval's `evaluate_images.py` finds: folders named by digits, one JSON object, names of digits."""
    found = {}
    for name in os.listdir(folder):
        if (folder / name).is_dir() and name.isdigit():
            with open(folder / name / "metadata.jsonl") as opened:
                metadata = json.load(opened)
            pictures = [n for n in os.listdir(folder / name / "samples") if re.match(r"\d+\.png", n)]
            assert sorted(os.listdir(folder / name / "samples")) == sorted(pictures)
            found[int(name)] = metadata, sorted(pictures)
    return found


def check_geneval(folder: Path, rows: list[dict], size: int) -> None:
    """File by file: names, metadata, sizes, and the grid."""
    found = scorer_reads(folder)
    assert sorted(found) == list(range(len(rows)))
    for index, row in enumerate(rows):
        assert found[index] == (row, ["0000.png", "0001.png", "0002.png", "0003.png"])
        place = folder / f"{index:05d}"
        assert sorted(p.name for p in place.iterdir()) == ["grid.png", "metadata.jsonl", "samples"]
        pictures = [Image.open(place / "samples" / f"{i:04d}.png") for i in range(4)]
        assert {(p.mode, p.size) for p in pictures} == {("RGB", (size, size))}
        grid = Image.open(place / "grid.png")
        assert grid.size == (2 * size, 2 * size)
        assert grid.crop((size, 0, 2 * size, size)).tobytes() == pictures[1].tobytes()
        assert grid.crop((0, size, size, 2 * size)).tobytes() == pictures[2].tobytes()


def start(script: str, argv: list[str], log: Path, **extra: str) -> subprocess.Popen:
    """A script as a process of its own; stdout goes to `log`, stderr to `log.err`."""
    command = [sys.executable, "-m", f"janus_trl.scripts.{script}", *argv]
    with open(log, "w") as out, open(f"{log}.err", "w") as err:
        return subprocess.Popen(command, env=environment(**extra), stdout=out, stderr=err, start_new_session=True)
