"""Text-to-image prompts of the embedded world, what each demands of a picture, and scenes that meet or break it.

A prompt carries its demands as a JSON string, so that a reward function needs no parsing of language:

* explicit: ``{"kind": "explicit", "objects": [["top-left", "red circle"], ...]}``
* count:    ``{"kind": "count", "number": 2, "object": "red circle"}``
* relation: ``{"kind": "relation", "relation": "left of", "objects": ["red circle", "blue square"]}``
* distinct: ``{"kind": "distinct", "relation": "in different rows", "objects": [...]}``
"""

import json
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from janus_trl.tiny.world import CELLS, EMPTY, OBJECTS, SPLITS, Scene, split_of

NUMBERS = ("zero", "one", "two", "three", "four")
PLURALS = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}

# Whether a relation holds between (row, column) of A and (row, column) of B.
RELATIONS: dict[str, Callable[[tuple[int, int], tuple[int, int]], bool]] = {
    "left of": lambda a, b: a[1] < b[1],
    "right of": lambda a, b: a[1] > b[1],
    "above": lambda a, b: a[0] < b[0],
    "below": lambda a, b: a[0] > b[0],
}
DISTINCT: dict[str, Callable[[tuple[int, int], tuple[int, int]], bool]] = {
    "in different rows": lambda a, b: a[0] != b[0],
    "in different columns": lambda a, b: a[1] != b[1],
    "in opposite corners": lambda a, b: a[0] != b[0] and a[1] != b[1],
}
CATEGORIES = ("explicit", "count", "relation", "distinct")


class Prompt(NamedTuple):
    """A prompt, its demands (JSON) and its category."""

    text: str
    demands: str
    category: str


def make_prompt(demands: dict[str, Any]) -> Prompt:
    """Prompt in words from its demands (see the head of this file)."""
    kind = demands["kind"]
    if kind == "explicit":
        text = " and ".join(f"a {name} at {cell}" for cell, name in demands["objects"])
    elif kind == "count":
        color, shape = demands["object"].split()
        number = demands["number"]
        text = f"{NUMBERS[number]} {color} {shape if number == 1 else PLURALS[shape]}"
    elif kind == "relation":
        first, second = demands["objects"]
        text = f"a {first} {demands['relation']} a {second}"
    else:
        first, second = demands["objects"]
        text = f"a {first} and a {second} {demands['relation']}"
    return Prompt(text, json.dumps(demands), kind)


def sample_prompt(category: str, split: str, rng: np.random.Generator) -> Prompt:
    """Random prompt of one category whose text belongs to `split`.

    Raises:
        ValueError: if the category or the split is unknown.
    """
    check_name("category", category, CATEGORIES)
    check_name("split", split, tuple(SPLITS))
    while True:
        prompt = make_prompt(_sample_demands(category, rng))
        if split_of(prompt.text) == split:
            return prompt


def check_name(field: str, value: str, valid: Sequence[str]) -> None:
    """Raise ValueError that lists the valid names, and the nearest, if `value` is none of them."""
    if value in valid:
        return
    near = get_close_matches(str(value), valid, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{field}={value!r} is unknown; valid: {', '.join(valid)}.{hint}")


def grade(demands: str | dict[str, Any], reading: Sequence[str]) -> float:
    """Share of the demands of a prompt that a picture meets.

    Explicit: each named cell (half for the shape, half for the color) and nothing else. Count: half for the number,
    half for nothing else. Relation and distinct: A is there, B is there, the relation holds, nothing else. "Nothing
    else" counts only if something that was asked for is drawn: otherwise a blank picture would earn a part.

    Args:
        demands: as in `Prompt.demands`, JSON or parsed.
        reading: what each of the four cells shows (see `read_picture`); `Scene.cells` works too.

    Returns:
        A value in [0, 1]; 1 only if all is met.
    """
    wanted = json.loads(demands) if isinstance(demands, str) else demands
    occupied = sum(cell != EMPTY for cell in reading)
    if wanted["kind"] == "explicit":
        return _grade_explicit(wanted["objects"], reading)
    if wanted["kind"] == "count":
        found = sum(cell == wanted["object"] for cell in reading)
        return 0.5 * (found == wanted["number"]) + 0.5 * (found > 0 and found == occupied)
    first, second = ([i for i, cell in enumerate(reading) if cell == name] for name in wanted["objects"])
    holds = RELATIONS | DISTINCT
    related = any(holds[wanted["relation"]](divmod(a, 2), divmod(b, 2)) for a in first for b in second)
    there = bool(first) + bool(second)
    return (there + related + (there > 0 and occupied == there)) / 4


def fulfilling_scenes(demands: str | dict[str, Any]) -> list[Scene]:
    """Every scene that meets all demands of a prompt."""
    wanted = json.loads(demands) if isinstance(demands, str) else demands
    if wanted["kind"] == "explicit":
        return [Scene.of(dict(wanted["objects"]))]
    names = [wanted["object"]] * wanted["number"] if wanted["kind"] == "count" else wanted["objects"]
    layouts = (Scene.of(dict(zip(cells, names))) for cells in permutations(CELLS, len(names)))
    return list(dict.fromkeys(scene for scene in layouts if grade(wanted, scene.cells) == 1.0))


def sample_fulfilling(demands: str | dict[str, Any], rng: np.random.Generator) -> Scene:
    """Random scene that meets all demands of a prompt."""
    scenes = fulfilling_scenes(demands)
    return scenes[rng.integers(len(scenes))]


def sample_breaking(demands: str | dict[str, Any], rng: np.random.Generator) -> Scene:
    """Random scene near a prompt that breaks it: one or two edits (replace, recolor, move, add, remove) away."""
    while True:
        cells = list(sample_fulfilling(demands, rng).cells)
        for _ in range(rng.integers(1, 3)):
            _edit(cells, rng)
        if grade(demands, cells) < 1.0 and any(cell != EMPTY for cell in cells):
            return Scene(tuple(cells))


def _grade_explicit(objects: Sequence[Sequence[str]], reading: Sequence[str]) -> float:
    """Half a point each for color and shape of every named cell, one point for nothing else."""
    seen = dict(zip(CELLS, reading, strict=True))
    points = 0.0
    for cell, name in objects:
        words = seen[cell].split()
        points += sum(0.5 for got, want in zip(words, name.split()) if got == want)
    any_drawn = any(seen[cell] == name for cell, name in objects)
    named = {cell for cell, _ in objects}
    nothing_else = any_drawn and all(seen[cell] == EMPTY for cell in CELLS if cell not in named)
    return (points + nothing_else) / (len(objects) + 1)


def _sample_demands(category: str, rng: np.random.Generator) -> dict[str, Any]:
    """Random demands of one category."""
    if category == "explicit":
        cells = rng.permutation(len(CELLS))[: rng.integers(1, 4)]
        return {"kind": category, "objects": [[CELLS[cell], OBJECTS[rng.integers(len(OBJECTS))]] for cell in cells]}
    if category == "count":
        return {"kind": category, "number": int(rng.integers(1, 5)), "object": OBJECTS[rng.integers(len(OBJECTS))]}
    relations = tuple(RELATIONS if category == "relation" else DISTINCT)
    pair = rng.permutation(len(OBJECTS))[:2]
    relation = relations[rng.integers(len(relations))]
    return {"kind": category, "relation": relation, "objects": [OBJECTS[i] for i in pair]}


def _edit(cells: list[str], rng: np.random.Generator) -> None:
    """Change one cell in place: put an object there, empty it, swap it with another, or change one word of it."""
    cell, other = rng.permutation(len(cells))[:2]
    edit = rng.integers(4)
    if edit == 0 or (edit == 3 and cells[cell] == EMPTY):
        cells[cell] = OBJECTS[rng.integers(len(OBJECTS))]
    elif edit == 1:
        cells[cell] = EMPTY
    elif edit == 2:
        cells[cell], cells[other] = cells[other], cells[cell]
    else:
        color, shape = cells[cell].split()
        donor_color, donor_shape = OBJECTS[rng.integers(len(OBJECTS))].split()
        cells[cell] = f"{donor_color} {shape}" if rng.integers(2) else f"{color} {donor_shape}"
