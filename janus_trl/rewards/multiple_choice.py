"""Multiple choice: which option a completion settles on, and whether it is the right one."""

import logging
import re
from collections.abc import Sequence
from typing import Any

from janus_trl.rewards.calling import completion_text
from janus_trl.rewards.choice_statements import boxed_contents, read_boxed, read_label, read_lone, read_option
from janus_trl.rewards.choice_symbols import DEFAULT_OPTIONS, LETTERS, labelled_text, match_text, option_texts

logger = logging.getLogger(__name__)

# A policy may write without end: of a longer text the end is read, where the answer stands. Reading takes time in the
# square of it.
MAX_LENGTH = 2000
# Share of answers that may be unreadable before a run is refused.
MAX_UNUSABLE_SHARE = 0.01

_TAG = re.compile(
    r"(?:<\s*(?:final_)?answer\s*>|<\|begin_of_box\|>)(.*?)"
    r"(?=<\s*/\s*(?:final_)?answer\s*>|<\|end_of_box\|>|<\s*(?:final_)?answer\s*>|\Z)",
    re.I | re.S,
)
_THOUGHT_END = re.compile(r".*</think(?:ing)?>", re.I | re.S)
_THOUGHT_START = re.compile(r"<think(?:ing)?>.*", re.I | re.S)


def extract_choice(text: str, choices: Sequence[str] | None = None) -> str | None:
    """The option that `text` settles on.

    Read in this order, and the first kind found decides: the last `<answer>` block (its end tag may be missing); the
    whole text as a letter, a number counted from 1, or an option's text; the last statement such as "the answer is B";
    the last `\\boxed{B}`; a leading label such as "B) red"; a letter on a line of its own; the only letter that is
    standing as a choice; a last clause such as "so x = 45" with an option's value. After `</think>` only the rest
    counts, and a thought that is not closed never does. Letters of other alphabets count by their place in it, unless a
    Latin letter of another place looks the same. Numbers count as positions only if no option's text begins with a
    number; circled ones are labels then, and always where the options are numbered so ("① 30").

    Args:
        text: The completion.
        choices: The option texts, in order; None for four options without texts.

    Returns:
        A letter from "A" on, or None: no answer, or several different ones ("A or B").

    Raises:
        ValueError: More than 26 options.
    """
    texts = option_texts(choices)
    text = _THOUGHT_START.sub("", _THOUGHT_END.sub("", labelled_text(text[-10 * MAX_LENGTH :], choices)))
    blocks = [block.strip() for block in _TAG.findall(text) if block.strip()]
    return read_option((blocks[-1] if blocks else text.strip())[-MAX_LENGTH:], texts)


def multiple_choice_reward(
    completions: list, answer: list, choices: list[Sequence[str] | None] | None = None, **columns: Any
) -> list[float | None]:
    """1.0 for the right option, 0.0 for a wrong one or none, None where the row's own answer cannot be read.

    Args:
        completions: Strings, or TRL's message form.
        answer: Per row a letter ("B", "b)"), an option's text, a position from 1 as a string, or an int index from 0.
        choices: Per row the option texts or None.

    Raises:
        ValueError: Columns of different lengths, or `choices` that are not lists of texts.
    """
    _check_lengths(len(completions), answer, choices)
    rewards: list[float | None] = []
    for row, completion in enumerate(completions):
        options = choices[row] if choices is not None else None
        gold = gold_letter(answer[row], options)
        found = extract_choice(completion_text(completion), options)
        rewards.append(None if gold is None else float(found == gold))
    return rewards


def gold_letter(answer: Any, choices: Sequence[str] | None = None) -> str | None:
    """The letter of a data set's answer, or None if it cannot be read (never a guess).

    An int is an index from 0 (the convention of class labels), a digit in a string a position from 1.
    """
    texts = option_texts(choices)
    if answer is None or isinstance(answer, bool):
        return None
    if isinstance(answer, int):
        by_index = LETTERS[answer] if 0 <= answer < len(texts) else None
        by_text = match_text(str(answer), texts)
        # "2" among the options 1, 2, 3: index and text disagree, and either may be meant.
        return by_index if by_text in (None, by_index) else None if by_index else by_text
    if not isinstance(answer, str):
        return None
    answer = labelled_text(answer, choices).strip()
    inner = [block for block in _TAG.findall(answer) if block.strip()] or boxed_contents(answer)
    if inner:
        return read_boxed(inner[-1].strip(), texts)
    return read_lone(answer, texts) or match_text(answer, texts) or read_label(answer, texts)


def unusable_answers(answers: Sequence[Any], choices: Sequence[Any] | None = None) -> list[int]:
    """Rows whose answer cannot be read as one of their options."""
    options = [None] * len(answers) if choices is None else choices
    return [row for row, (a, c) in enumerate(zip(answers, options, strict=True)) if gold_letter(a, c) is None]


def check_rows(dataset: Any) -> None:
    """Look at all answers before training; a few unreadable ones are warned about and later skipped.

    Raises:
        ValueError: More than 1 % of the answers cannot be read.
    """
    choices = list(dataset["choices"]) if "choices" in dataset.column_names else None
    answers = list(dataset["answer"])
    rows = unusable_answers(answers, choices)
    if not rows:
        return
    shown = ", ".join(f"{row}: {answers[row]!r:.30}" for row in rows[:10])
    message = (
        f"column 'answer': {len(rows)} of {len(answers)} rows name none of their options (row: value {shown}"
        f"{', ...' if len(rows) > 10 else ''}); expected a letter, an option's text or an index"
    )
    if choices is None:
        message += f" among {DEFAULT_OPTIONS} options, as there is no column 'choices'"
    if len(rows) > MAX_UNUSABLE_SHARE * len(answers):
        raise ValueError(f"{message}. Correct or drop these rows.")
    logger.warning("%s; they get no reward.", message)


def _check_lengths(expected: int, answer: Any, choices: Any) -> None:
    for name, column in (("answer", answer), ("choices", choices)):
        if column is not None and (isinstance(column, str) or len(column) != expected):
            got = repr(column)[:60] if isinstance(column, str) else f"{len(column)} values"
            raise ValueError(f"reward 'multiple_choice': column '{name}' is {got}; expected one value per completion.")
    for row, options in enumerate(choices or []):
        if isinstance(options, str):
            raise ValueError(
                f"reward 'multiple_choice': choices of row {row} is the text {options!r:.60}; expected a list of texts."
            )
