"""Numeric answers: is the number that a completion settles on the right one, within a tolerance?

math-verify reads LaTeX and plain numbers out of running text; this module decides where in the text the answer stands,
and compares values instead of forms.
"""

import importlib.util
import logging
import math
import re
import threading
import unicodedata
from typing import Any

from janus_trl.rewards.calling import completion_text
from janus_trl.rewards.choice_symbols import CIRCLED, plain_but_circled

logger = logging.getLogger(__name__)

INSTALL = "pip install 'janus_trl[math]'"
# Share of answers that may be unreadable before a run is refused.
MAX_UNUSABLE_SHARE = 0.01
# A policy may write anything: of longer texts the end is read, of a statement the start, and towers of powers are not
# evaluated.
MAX_LENGTH = 2000
PARSE_SECONDS = 5

_TAG = re.compile(r"<\s*answer\s*>(.*?)(?=<\s*/\s*answer\s*>|<\s*answer\s*>|\Z)", re.I | re.S)
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_ANSWER_IS = (
    r"(?:(?<![^\W_])(?:answer|result|antwort|ergebnis|respuesta|réponse|risposta|resposta|ответ)|答案)"
    r"[ \t]*(?:[*_]+[ \t]*)?(?:is|was|:|=|ist|es|est|è|é|是|为)"  # linear in a run of spaces
)
_STATED = re.compile(rf"{_ANSWER_IS}[ \t]*:?[ \t]*[*_]*(?P<rest>[^\n]*)", re.I)
# A circled digit is a number where it is the answer; elsewhere it refers to a step or an equation.
_CIRCLES = re.compile(
    rf"(?P<answer>\A\W*(?=[{CIRCLED}]\W*\Z)|\\boxed\s*\{{\s*|{_ANSWER_IS}[\s(*_:$]*)[{CIRCLED}](?![{CIRCLED}])"
    rf"|[{CIRCLED}]+",
    re.I,
)
_PLAIN = re.compile(r"[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)\.?)(?:e[-+]?\d+)?", re.I)
# "is 45 and not 50", "is about 3 cm": the number at the start of a statement, if it is not the start of a formula.
_FIRST = re.compile(
    r"[ \t$(*_]*(?:(?:about|approximately|roughly|exactly|simply|just)[ \t]+|[≈~])?"
    r"(?P<number>[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?(?:[ \t]*\\?%)?)"
    r"(?![\d.,]*\d)(?![ \t]*(?:[-+*/×·^:=\\({√π]|sqrt|pi\b))(?![ \t]+\d)",
    re.I,
)
_MIXED = re.compile(r"([-+]?\d+)\s+(\d+)/([1-9]\d*)")
# "4 or 5", "4, 5": two numbers with nothing but this between them are no answer.
_HEDGE = re.compile(
    r"[-+]?\d[\d.,/]*(?:\s*\$)?\s*(?:\bor\b|\boder\b|\band\b|;|,\s)\s*"
    r"(?:\$\s*)?(?:[a-z]\s*=\s*)?[-+]?\d|\d\.\d{3},\d",  # and 1.000,5 is written in neither way of numbers
    re.I,
)
_RATIO = re.compile(r"\d\s*:\s*\d")
_TOWER = re.compile(r"(?:\^|\*\*)[^+\-=]*(?:\^|\*\*)|(?:\^|\*\*)\s*\{?\(?\s*\d{4,}|!")


class NumericReward:
    """1.0 where the completion's number is within the tolerance of the row's `answer`, else 0.0.

    The last `<answer>` block is read, else the last `\\boxed{}`, else what follows the last "answer is", else the text
    (its last number). After `</think>` only the rest counts. A percentage is right as 50 and as 0.5; two numbers
    ("4 or 5") are no answer. None where the row's own answer is no number.

    Args:
        relative_tolerance: Allowed difference as a part of the right value; 1e-3 takes 3.14 for pi.
        absolute_tolerance: Allowed difference, if that is more.

    Raises:
        ValueError: math-verify is not installed, or a tolerance is negative.
    """

    def __init__(self, relative_tolerance: float = 1e-3, absolute_tolerance: float = 1e-9):
        for name, value in (("relative_tolerance", relative_tolerance), ("absolute_tolerance", absolute_tolerance)):
            if value < 0:
                raise ValueError(f"reward 'numeric': {name} is {value}; it must be 0 or more.")
        require_math_verify()
        self._relative, self._absolute = relative_tolerance, absolute_tolerance

    def __call__(self, completions: list, answer: list, **columns: Any) -> list[float | None]:
        """One value per completion (a string or TRL's message form); `answer` holds numbers or texts with one."""
        if isinstance(answer, str) or len(answer) != len(completions):
            raise ValueError(f"reward 'numeric': column 'answer' is {answer!r:.60}; expected one value per completion.")
        return [self._score(completion_text(text), gold) for text, gold in zip(completions, answer, strict=True)]

    def _score(self, text: str, gold: Any) -> float | None:
        right = gold_number(gold)
        if right is None:
            return None
        return float(any(self._close(found, right) for found in extract_numbers(text)))

    def _close(self, found: float, right: float) -> bool:
        # Half a unit in the 15th place on top: the difference of two rounded numbers is rounded again.
        limit = max(self._relative * abs(right), self._absolute) * (1 + 1e-9)
        return abs(found - right) <= limit + 1e-15 * abs(right)


def extract_numbers(text: str) -> tuple[float, ...]:
    """The number that `text` settles on, as a tuple of its readings: none, one, or two for a percentage."""
    text = plain_but_circled(text, _nfkc).replace("\u2044", "/").replace("−", "-").rpartition("</think>")[2]
    blocks = [block for block in _TAG.findall(text) if block.strip()]
    text = (blocks[-1] if blocks else text).strip()
    text = _nfkc(_CIRCLES.sub(lambda match: " " if match["answer"] is None else match[0], text))
    if boxed := _BOXED.findall(text):
        return _read(boxed[-1], rf"\boxed{{{boxed[-1]}}}")
    if stated := [match["rest"] for match in _STATED.finditer(text) if re.search(r"\d|\\", match["rest"])]:
        # Up to the end of the sentence: "The answer is 9. (I used 3 steps)".
        sentence = re.split(r"(?<=\S)[.!?;](?=\s|$)", stated[-1][:MAX_LENGTH], maxsplit=1)[0]
        first = _FIRST.match(sentence)
        return _read(first["number"] if first and not _HEDGE.search(sentence) else sentence)
    return _read(text[-MAX_LENGTH:])


def _nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def gold_number(gold: Any) -> float | None:
    """The value of a data set's answer, or None if it is no finite number."""
    if isinstance(gold, bool) or gold is None:
        return None
    if isinstance(gold, int | float):
        return float(gold) if math.isfinite(gold) else None
    if not isinstance(gold, str):
        return None
    # GSM8K writes its solution and then "#### 42".
    found = extract_numbers(gold.rpartition("####")[2])
    return found[0] if found else None


def check_rows(dataset: Any) -> None:
    """Look at all answers before training; a few that are no numbers are warned about and later skipped.

    Raises:
        ValueError: More than 1 % of them are no numbers.
    """
    answers = list(dataset["answer"])
    rows = [row for row, answer in enumerate(answers) if gold_number(answer) is None]
    if not rows:
        return
    shown = ", ".join(f"{row}: {answers[row]!r:.30}" for row in rows[:10])
    message = f"column 'answer': {len(rows)} of {len(answers)} rows hold no number (row: value {shown})"
    if len(rows) > MAX_UNUSABLE_SHARE * len(answers):
        raise ValueError(f"{message}. Correct or drop these rows.")
    logger.warning("%s; they get no reward.", message)


def require_math_verify() -> None:
    """Refuse to go on without the optional package.

    Raises:
        ValueError: With the line that installs it.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError(f"reward 'numeric': the package math-verify is not installed. Run {INSTALL}")


def _read(text: str, formula: str | None = None) -> tuple[float, ...]:
    """Readings of a short text; `formula` is the same as math-verify is to see it."""
    bare = text.strip(" \t\n*_`\"'$()[]").rstrip(".,;:!*_`\"'$)]")
    percent = re.fullmatch(r"(.*?)\s*\\?%", bare)
    number = percent[1] if percent else bare
    if number and _PLAIN.fullmatch(number):
        value = float(number.replace(",", ""))
        readings = (value, value / 100) if percent else (value,)
    elif mixed := _MIXED.fullmatch(number):
        whole, part = float(mixed[1]), int(mixed[2]) / int(mixed[3])
        readings = (whole + math.copysign(part, whole),)
    else:
        readings = _parse(text if formula is None else formula)
    return tuple(value for value in readings if math.isfinite(value))


def _parse(text: str) -> tuple[float, ...]:
    """Readings by math-verify, evaluated; none where that is no real number."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    if _HEDGE.search(text) or _RATIO.search(text) or _TOWER.search(text):
        return ()
    text = _as_formula(text)
    # Its time limit is a signal, which only the main thread may set; what could run long was refused above.
    limit = PARSE_SECONDS if threading.current_thread() is threading.main_thread() else None
    found = parse(text, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=limit)
    if not found or isinstance(found[0], str):
        return ()
    expression = found[0]
    expression = getattr(expression, "rhs", expression)  # "x = 3"
    if getattr(expression, "free_symbols", True) or not getattr(expression, "is_number", False):
        return ()
    value = complex(expression.evalf(20))
    if value.imag:
        return ()
    percent = "%" in text
    return (value.real * 100, value.real) if percent else (value.real,)


def _as_formula(text: str) -> str:
    """Spell what math-verify would misread: 1e-3 as 1, 2 × 10^5 as 10, 2√3 as 3, 2\\pi outside of $ as 2."""
    text = text.replace("×", "*").replace("·", "*")
    text = re.sub(r"(\d(?:\.\d+)?)e([-+]?\d{1,3})\b", r"\1*10^(\2)", text, flags=re.I)
    text = re.sub(r"(?<![\\\w])sqrt\(([^()]*)\)|√\(([^()]*)\)|√(\d+)", r"\\sqrt{\1\2\3}", text)
    text = re.sub(r"(?<![\\\w])pi(?!\w)|π", r"\\pi ", text)
    bare = text.strip(" \t\n.,;:*")
    delimited = re.search(r"\$|\\[(\[]|\\boxed", text)
    words = re.search(r"(?<![\\A-Za-z])[A-Za-z]{2,}", bare)
    return f"${bare}$" if re.search(r"[\\{]", bare) and not delimited and not words else text
