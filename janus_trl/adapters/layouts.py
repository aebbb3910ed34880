"""Published layouts of data sets, brought into our columns: `dataset_format: geneval`, for example.

A layout is a function `(row, rng) -> row or None` on plain dictionaries. The random generator depends on the seed and
the number of the row alone; None drops a row that has no form of ours (they are counted). Columns that hold a
dictionary or a list of dictionaries (`include`, `spatial_info`, ...) become JSON strings, since Arrow would fill the
keys that a row lacks with None.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import datasets

from janus_trl.adapters.geometry import distractors, letter_in, lettered

TEXT = datasets.Value("string")
TEXTS = datasets.List(TEXT)


class Column(NamedTuple):
    """A column that a layout reads: its usual names, the recipe field that gives another, and whether it must be."""

    names: tuple[str, ...]
    field: str | None = None
    required: bool = True


@dataclass(frozen=True)
class Layout:
    """A published layout.

    Args:
        convert: `(row, rng) -> row or None`; the row has the first name of each of `reads`, None where it is not there.
        reads: Columns that `convert` gets.
        writes: Columns that `convert` gives, with their types.
        task: `t2i` or `i2t`.
        picture: Our name of the picture column; None for layouts of prompts alone.
        picture_names: Names that it goes by; it is renamed and not copied.
        keeps_rest: Whether all other columns stay.
    """

    convert: Callable[[dict, random.Random], dict | None]
    reads: tuple[Column, ...]
    writes: dict[str, Any]
    task: str = "t2i"
    picture: str | None = None
    picture_names: tuple[str, ...] = ()
    keeps_rest: bool = False


def prompt_line(row: dict, rng: random.Random) -> dict:
    """One prompt a row: PickScore prompt lists (a text file, or the column `caption`), ReasonGen-R1 RL."""
    return {"prompt": (row["prompt"] or "").strip()}


def reasongen_sft(row: dict, rng: random.Random) -> dict:
    """ReasonGen-R1 SFT: one of the five kinds of prompts, and one of the kinds of reasoning, that the row has.

    As published, a list of tags is joined by ",", one of objects by ", " and " and ", one of several captions is drawn,
    and the full stop at the end of a prompt is dropped. Without `augmented_cots` the reasoning is the detailed caption.
    """
    prompts = {kind: value for kind, value in _present(row["augmented_prompts"]).items() if kind in PROMPT_KINDS}
    kind = rng.choice(sorted(prompts)) if prompts else None
    prompt = PROMPT_KINDS[kind](prompts[kind], rng) if kind else row["brief_caption"] or ""
    plans = {kind: value for kind, value in _present(row["augmented_cots"]).items() if kind in PLAN_JOINS}
    kind = rng.choice(sorted(plans)) if plans else None
    plan = PLAN_JOINS[kind].join(_as_texts(plans[kind])) if kind else row["detailed_caption"] or ""
    return {"prompt": prompt.strip().removesuffix("."), "reasoning": plan.strip()}


def t2i_r1(row: dict, rng: random.Random) -> dict:
    """T2I-R1: prompt, `nouns`, `attr_nouns` (lists), `task_type`, `spatial_info` and `numeracy_info` (JSON strings)."""
    return {
        "prompt": row["prompt"],
        "task_type": row["task_type"] or "",
        "nouns": row["nouns"] or [],
        "attr_nouns": row["attr_nouns"] or [],
        "spatial_info": _as_json(row["spatial_info"] or {}),
        "numeracy_info": _as_json(row["numeracy_info"] or []),
    }


def geneval(row: dict, rng: random.Random) -> dict:
    """GenEval metadata: prompt and `tag`; `include` and `exclude` are JSON lists as strings."""
    include, exclude = _as_json(row["include"] or []), _as_json(row["exclude"] or [])
    return {"prompt": row["prompt"], "tag": row["tag"] or "", "include": include, "exclude": exclude}


def geometry3k(row: dict, rng: random.Random, options: int = 4) -> dict | None:
    """Geometry3K as multiple choice: the right answer among others close in value, in random order.

    Rows that list their choices keep them. None for an answer that is no number and names no choice.
    """
    answer = str(row["answer"] if row["answer"] is not None else "").strip()
    choices = [str(choice).strip() for choice in row["choices"] or []]
    if choices:
        letter = letter_in(row["answer"], choices)
        answer = choices[ord(letter) - ord("A")] if letter else None
    else:
        others = distractors(answer, options - 1, rng)
        choices, answer = ([answer, *others], answer) if others else ([], None)
    if answer is None:
        return None
    rng.shuffle(choices)
    problem = (row["problem"] or "").replace("<image>", "").strip()
    text = lettered(f"Look at the geometry diagram. {problem}", choices)
    return {"prompt": text, "choices": choices, "answer": letter_in(answer, choices, texts_first=True)}


def vqa(row: dict, rng: random.Random) -> dict | None:
    """A question, its options (a list, or a mapping of letters to texts) and the answer: letter, index or text.

    An int counts from 0, a digit in a string from 1, as in the reward `multiple_choice`. None if the answer is none of
    the options, or there are none.
    """
    options = row["options"]
    if isinstance(options, str):
        options = _parsed(options)
    if isinstance(options, Mapping):
        options = [text for _, text in sorted(options.items()) if text is not None]
    choices = [str(option).strip() for option in options or []]
    letter = letter_in(row["answer"], choices) if choices else None
    if letter is None:
        return None
    question = (row["question"] or "").replace("<image>", "").strip()
    return {"prompt": lettered(question, choices), "choices": choices, "answer": letter}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _present(value: Mapping | str | None) -> dict:
    value = _parsed(value) if isinstance(value, str) else value
    return {key: item for key, item in (value or {}).items() if item}


def _as_texts(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]


def _as_json(value: Any) -> str:
    """JSON without the keys that Arrow filled with None."""

    def present(item: Any) -> Any:
        if isinstance(item, Mapping):
            return {key: present(entry) for key, entry in item.items() if entry is not None}
        return [present(entry) for entry in item] if isinstance(item, list) else item

    return json.dumps(present(value), ensure_ascii=False)


def _and(value: Any, rng: random.Random) -> str:
    *first, last = _as_texts(value)
    return f"{', '.join(first)} and {last}" if first else last


PROMPT_KINDS: dict[str, Callable[[Any, random.Random], str]] = {
    "short_caption": lambda value, rng: str(value),
    "paraphrases": lambda value, rng: rng.choice(_as_texts(value)),
    "varied_captions": lambda value, rng: rng.choice(_as_texts(value)),
    "tags": lambda value, rng: ",".join(_as_texts(value)),
    "object_prompts": _and,
}
PLAN_JOINS = {"step_by_step": "\n", "object_centric": "; ", "region_descriptions": "; ", "tags": ", "}

_PROMPT = Column(("prompt", "text", "caption"), "text_column")
_ANSWER = Column(("answer", "label", "ground_truth", "correct"), "answer_column")
_QUESTION = ("question", "query", "problem", "prompt")
_MULTIPLE_CHOICE = {"prompt": TEXT, "choices": TEXTS, "answer": TEXT}

FORMATS: dict[str, Layout] = {
    "prompts": Layout(prompt_line, (_PROMPT,), {"prompt": TEXT}),
    "reasongen_rl": Layout(prompt_line, (_PROMPT,), {"prompt": TEXT}),
    "reasongen_sft": Layout(
        reasongen_sft,
        (
            Column(("augmented_prompts",)),
            Column(("augmented_cots",), required=False),
            Column(("brief_caption",), required=False),
            Column(("detailed_caption",), required=False),
        ),
        {"prompt": TEXT, "reasoning": TEXT},
        picture="image",
        picture_names=("image", "base64", "image_base64"),
    ),
    "t2i_r1": Layout(
        t2i_r1,
        (
            Column(("prompt",), "text_column"),
            *(Column((name,), required=False) for name in ("task_type", "nouns", "attr_nouns")),
            *(Column((name,), required=False) for name in ("spatial_info", "numeracy_info")),
        ),
        {"prompt": TEXT, "task_type": TEXT, "nouns": TEXTS, "attr_nouns": TEXTS}
        | {"spatial_info": TEXT, "numeracy_info": TEXT},
    ),
    "geneval": Layout(
        geneval,
        (
            Column(("prompt",), "text_column"),
            Column(("include",)),
            Column(("exclude",), required=False),
            Column(("tag",), required=False),
        ),
        {"prompt": TEXT, "tag": TEXT, "include": TEXT, "exclude": TEXT},
    ),
    "geometry3k": Layout(
        geometry3k,
        (
            Column(("problem", "question", "prompt"), "text_column"),
            Column(("answer", "ground_truth"), "answer_column"),
            Column(("choices", "options"), "choices_column", required=False),
        ),
        _MULTIPLE_CHOICE,
        task="i2t",
        picture="images",
        picture_names=("images", "image"),
        keeps_rest=True,
    ),
    "vqa": Layout(
        vqa,
        (Column(_QUESTION, "text_column"), Column(("options", "choices"), "choices_column"), _ANSWER),
        _MULTIPLE_CHOICE,
        task="i2t",
        picture="images",
        picture_names=("images", "image"),
        keeps_rest=True,
    ),
}
