"""Data sets of the embedded world, built on the fly: the same rows for the same arguments on every machine.

Splits are disjoint by the hash of the prompt text (text-to-image) or of the layout (image-to-text). Words and objects
are shared, so the held-out splits ask for new combinations of known parts.
"""

from typing import Any

import numpy as np
from datasets import Dataset, Features, Image, List, Value

from janus_trl.tiny.prompts import CATEGORIES, Prompt, check_name, sample_breaking, sample_fulfilling, sample_prompt
from janus_trl.tiny.questions import KINDS, LETTERS, answer_text, caption_row, choices_row, sample_question
from janus_trl.tiny.world import SPLITS, Scene, plan_text, render, sample_scene, split_of

TASKS = ("t2i", "i2t")
SIZES = {"train": 2048, "validation": 128, "test": 512}
SFT_SIZES = {"train": 8192, "validation": 256, "test": 256}
_TEXT = Value("string")
_T2I = Features({"prompt": _TEXT, "demands": _TEXT, "category": _TEXT})
_I2T = Features({"prompt": _TEXT, "images": List(Image()), "answer": _TEXT, "choices": List(_TEXT), "category": _TEXT})
_T2I_SFT = Features({**_T2I, "images": List(Image()), "reasoning": _TEXT, "image": Image()})
_I2T_SFT = Features({**_I2T, "reasoning": _TEXT, "completion": _TEXT})


def tiny_dataset(task: str, split: str, size: int | None = None, seed: int = 0) -> Dataset:
    """Rows for reinforcement learning and evaluation.

    Categories take turns. A category with few prompts (80 count in the whole) repeats some once they are used up.

    Args:
        task: ``"t2i"`` (columns prompt, demands, category) or ``"i2t"`` (prompt, images, answer, choices, category).
        split: ``"train"``, ``"validation"`` or ``"test"``.
        size: number of rows; by default the entry of `SIZES`.
        seed: seed of the rows that are drawn from the split.

    Returns:
        The rows. `answer` is a letter A to D, `choices` the four option texts, `demands` JSON for `grade`.

    Raises:
        ValueError: if the task or the split is unknown or the size is not positive.
    """
    size = _check(task, split, size, SIZES)
    rng = _generator(task, split, seed, stage=0)
    if task == "t2i":
        rows = [prompt._asdict() for prompt in _prompts(split, size, rng)]
        return _to_dataset([{"prompt": row.pop("text"), **row} for row in rows], _T2I)
    return _to_dataset([_question_row(split, KINDS[i % len(KINDS)], rng) for i in range(size)], _I2T)


def tiny_sft_dataset(
    task: str, split: str, size: int | None = None, seed: int = 0, noise: float = 0.0, auxiliary: float = 0.4
) -> Dataset:
    """Rows for supervised training.

    Args:
        task: ``"t2i"`` (columns prompt, images (empty), reasoning, image, demands, category) or ``"i2t"`` (prompt,
            images, reasoning, completion, answer, choices, category).
        split: ``"train"``, ``"validation"`` or ``"test"``.
        size: number of rows; by default the entry of `SFT_SIZES`.
        seed: seed of the rows that are drawn from the split.
        noise: makes a start for reinforcement learning that has something to gain. Text-to-image: the share of rows
            whose scene breaks the prompt while plan and picture agree. Image-to-text: the share of rows whose letter is
            replaced by a random one.
        auxiliary: image-to-text only: the share of rows that describe all cells or list all choices with their letters
            (their `answer` is empty). Cells and letters are learned from these long before the questions themselves.

    Returns:
        The rows. Reasoning is the plan (text-to-image) or what the asked cells show (image-to-text).

    Raises:
        ValueError: if the task or the split is unknown, the size is not positive or a share is outside [0, 1].
    """
    size = _check(task, split, size, SFT_SIZES)
    for field, share in (("noise", noise), ("auxiliary", auxiliary)):
        if not 0 <= share <= 1:
            raise ValueError(f"{field}={share} must be a share of the rows, from 0 to 1.")
    rng = _generator(task, split, seed, stage=1)
    if task == "t2i":
        return _to_dataset([_plan_row(prompt, noise, rng) for prompt in _prompts(split, size, rng)], _T2I_SFT)
    return _to_dataset([_answer_row(split, noise, auxiliary, rng) for _ in range(size)], _I2T_SFT)


def _check(task: str, split: str, size: int | None, sizes: dict[str, int]) -> int:
    """The number of rows, after checks of all three arguments."""
    check_name("task", task, TASKS)
    check_name("split", split, tuple(SPLITS))
    if size is not None and size < 1:
        raise ValueError(f"size={size} must be at least 1; leave it out for {sizes[split]} rows.")
    return sizes[split] if size is None else size


def _generator(task: str, split: str, seed: int, stage: int) -> np.random.Generator:
    """One stream for each task, split, seed and kind of rows."""
    return np.random.default_rng([seed, TASKS.index(task), tuple(SPLITS).index(split), stage])


def _to_dataset(rows: list[dict[str, Any]], features: Features) -> Dataset:
    return Dataset.from_dict({name: [row[name] for row in rows] for name in features}, features=features)


def _prompts(split: str, size: int, rng: np.random.Generator, tries: int = 20) -> list[Prompt]:
    """Prompts of a split, categories taking turns, each new if one is found in a few tries."""
    prompts, seen = [], set()
    for i in range(size):
        for _ in range(tries):
            prompt = sample_prompt(CATEGORIES[i % len(CATEGORIES)], split, rng)
            if prompt.text not in seen:
                break
        seen.add(prompt.text)
        prompts.append(prompt)
    return prompts


def _scene(split: str, rng: np.random.Generator) -> Scene:
    """Random scene whose layout belongs to a split."""
    while True:
        scene = sample_scene(rng)
        if split_of(plan_text(scene)) == split:
            return scene


def _question_row(split: str, kind: str | None, rng: np.random.Generator) -> dict[str, Any]:
    scene = _scene(split, rng)
    return {**sample_question(scene, rng, kind)._asdict(), "images": [render(scene, rng)]}


def _plan_row(prompt: Prompt, noise: float, rng: np.random.Generator) -> dict[str, Any]:
    sample = sample_breaking if rng.random() < noise else sample_fulfilling
    scene = sample(prompt.demands, rng)
    row = {"prompt": prompt.text, "demands": prompt.demands, "category": prompt.category}
    return {**row, "images": [], "reasoning": plan_text(scene), "image": render(scene, rng)}


def _answer_row(split: str, noise: float, auxiliary: float, rng: np.random.Generator) -> dict[str, Any]:
    scene = _scene(split, rng)
    question = sample_question(scene, rng)
    row = {**question._asdict(), "images": [render(scene, rng)]}
    if rng.random() < auxiliary:
        caption = rng.random() < 0.75
        prompt, completion = caption_row(scene, rng) if caption else choices_row(question, rng)
        extra = {"answer": "", "choices": [], "category": "caption" if caption else "choices"}
        return {**row, **extra, "prompt": prompt, "reasoning": "", "completion": completion}
    if rng.random() < noise:
        value = question.choices[LETTERS.index(question.answer)]
        row["completion"] = answer_text(value, LETTERS[rng.integers(len(LETTERS))])
    return row
