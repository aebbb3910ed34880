"""Multiple-choice questions about pictures of the embedded world, with a short reasoning that leads to the letter.

The reasoning names what the asked cells show, then the answer gives the value and the letter:
``top-left is red circle.`` and ``red <answer>B</answer>``. A small model that is taught letters alone stays at chance.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from janus_trl.tiny.prompts import NUMBERS, PLURALS
from janus_trl.tiny.world import CELLS, COLORS, EMPTY, OBJECTS, SHAPES, Scene

LETTERS = ("A", "B", "C", "D")
KINDS = ("object", "color", "shape", "count")
CAPTION_PROMPT = "what is in the picture?"
CHOICES_PROMPT = "list the choices."


class Question(NamedTuple):
    """A question with four choices, of which exactly one is right.

    `prompt` holds the question and the choices; `answer` is the letter; `reasoning` and `completion` are the target
    text of supervised training.
    """

    prompt: str
    choices: list[str]
    answer: str
    reasoning: str
    completion: str
    category: str


def sample_question(scene: Scene, rng: np.random.Generator, kind: str | None = None) -> Question:
    """Random question about a scene that shows at least one object, of a given kind of `KINDS` or of any."""
    kind = KINDS[rng.integers(len(KINDS))] if kind is None else kind
    if kind == "count":
        return _count_question(scene, rng)
    if kind == "object":
        cell = CELLS[rng.integers(len(CELLS))]
        value = scene.objects.get(cell, EMPTY)
        pool: Sequence[str] = (*OBJECTS, EMPTY)
        text = f"what is at {cell}?"
    else:
        occupied = list(scene.objects)
        cell = occupied[rng.integers(len(occupied))]
        color, shape = scene.objects[cell].split()
        value, pool = (color, tuple(COLORS)) if kind == "color" else (shape, SHAPES)
        text = f"what {kind} is at {cell}?"
    return _build(text, value, pool, describe(scene, [cell]), kind, rng)


def describe(scene: Scene, cells: Sequence[str]) -> str:
    """What some cells show, such as ``"top-left is red circle, top-right is empty."``."""
    return ", ".join(f"{cell} is {scene.objects.get(cell, EMPTY)}" for cell in cells) + "."


def caption_row(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    """Prompt and completion that describe all cells in random order, which ties each cell to its own place."""
    cells = [CELLS[i] for i in rng.permutation(len(CELLS))]
    return CAPTION_PROMPT, describe(scene, cells)


def choices_row(question: Question, rng: np.random.Generator) -> tuple[str, str]:
    """Prompt and completion that list all pairs of value and letter in random order."""
    pairs = [f"{question.choices[i]} is {LETTERS[i]}" for i in rng.permutation(len(LETTERS))]
    return f"{CHOICES_PROMPT} {_list_choices(question.choices)}", ", ".join(pairs) + "."


def answer_text(value: str, letter: str) -> str:
    """Completion that gives a value and its letter."""
    return f"{value} <answer>{letter}</answer>"


def _count_question(scene: Scene, rng: np.random.Generator) -> Question:
    """How many shapes there are, of one color, of one shape, or at all."""
    names = list(scene.objects.values())
    about = rng.integers(3)
    color, shape = tuple(COLORS)[rng.integers(len(COLORS))], SHAPES[rng.integers(len(SHAPES))]
    if rng.integers(4):  # mostly about something that is there, or the answer would mostly be zero
        color, shape = names[rng.integers(len(names))].split()
    if about == 0:
        text, number = "how many shapes are there?", len(names)
    elif about == 1:
        text, number = f"how many {color} shapes are there?", sum(color in name.split() for name in names)
    else:
        text, number = f"how many {PLURALS[shape]} are there?", sum(shape in name.split() for name in names)
    return _build(text, NUMBERS[number], NUMBERS, describe(scene, CELLS), "count", rng)


def _build(text: str, value: str, pool: Sequence[str], reasoning: str, kind: str, rng: np.random.Generator) -> Question:
    """Question with the right value and three others of the pool in random order."""
    others = [name for name in pool if name != value]
    choices = [value] + [others[i] for i in rng.permutation(len(others))[: len(LETTERS) - 1]]
    choices = [choices[i] for i in rng.permutation(len(choices))]
    letter = LETTERS[choices.index(value)]
    prompt = f"{text} {_list_choices(choices)}"
    return Question(prompt, choices, letter, reasoning, answer_text(value, letter), kind)


def _list_choices(choices: Sequence[str]) -> str:
    """Choices with their letters, such as ``"A) red B) blue C) green D) yellow"``."""
    return " ".join(f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices))
