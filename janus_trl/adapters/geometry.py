"""Multiple choice out of a numeric answer: options that are close in value, lettered, with the right letter kept."""

import math
import random
import re
from collections.abc import Sequence
from typing import Any

from janus_trl.rewards.multiple_choice import LETTERS, gold_letter

INSTRUCTION = "Answer with the letter only."
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
# What may stand around a number without changing it: degrees, units, spaces.
_DECORATION = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\circ|\\degree|°|\\[,;:! ]|\\text\s*\{[^}]*\}|\\left|\\right|\$")
_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|(\\[a-zA-Z]+)|(.))")


def lettered(question: str, choices: Sequence[str]) -> str:
    """The question, its options as "A) ...", and the request for a letter."""
    lines = "\n".join(f"{LETTERS[i]}) {choice}" for i, choice in enumerate(choices))
    return f"{question}\n\n{lines}\n\n{INSTRUCTION}"


def letter_in(answer: Any, choices: Sequence[str], texts_first: bool = False) -> str | None:
    """The letter of an answer given as letter, position or text; None if it names no option.

    With `texts_first` an answer that is the text of an option is never read as a letter or position.
    """
    if len(choices) > len(LETTERS):
        return None
    texts = [choice.strip() for choice in choices]
    if texts_first and str(answer).strip() in texts:
        return LETTERS[texts.index(str(answer).strip())]
    return gold_letter(answer, texts)


def value_of(text: str) -> float | None:
    """The value of a number as Geometry3K writes it: `7.5`, `2 \\sqrt { 21 }`, `\\frac { 36 } { 5 }`, `60^\\circ`.

    Sums, differences, products and quotients of these are read too; None for anything else.
    """
    plain = _DECORATION.sub(" ", _THOUSANDS.sub("", text)).strip()
    tokens = [number or command or other for number, command, other in _TOKEN.findall(plain)]
    try:
        value, rest = _sum(tokens)
    except (IndexError, ValueError, ZeroDivisionError):
        return None
    return value if not rest and math.isfinite(value) else None


def _sum(tokens: list[str]) -> tuple[float, list[str]]:
    sign, tokens = (-1, tokens[1:]) if tokens[0] == "-" else (1, tokens)
    value, tokens = _product(tokens)
    value *= sign
    while tokens and tokens[0] in "+-":
        operator, (other, tokens) = tokens[0], _product(tokens[1:])
        value = value + other if operator == "+" else value - other
    return value, tokens


def _product(tokens: list[str]) -> tuple[float, list[str]]:
    value, tokens = _factor(tokens)
    while tokens and tokens[0] not in ("+", "-", "}", ")"):
        divides = tokens[0] in ("/", "\\div")
        if divides or tokens[0] in ("*", "\\times", "\\cdot"):
            tokens = tokens[1:]
        other, tokens = _factor(tokens)
        value = value / other if divides else value * other
    return value, tokens


def _factor(tokens: list[str]) -> tuple[float, list[str]]:
    head, rest = tokens[0], tokens[1:]
    if head in "{(":
        value, rest = _sum(rest)
        if rest[0] != {"{": "}", "(": ")"}[head]:
            raise ValueError(rest[0])
        return value, rest[1:]
    if head in ("\\sqrt", "√"):
        value, rest = _factor(rest)
        return math.sqrt(value), rest
    if head in ("\\frac", "\\dfrac", "\\tfrac"):
        above, rest = _factor(rest)
        below, rest = _factor(rest)
        return above / below, rest
    return (math.pi if head in ("\\pi", "π") else float(head)), rest


def distractors(answer: str, count: int, rng: random.Random) -> list[str] | None:
    """Wrong answers in the same form and close in value: one number of the answer is moved by a third at most.

    Returns:
        `count` texts whose values differ from the right one and from each other, or None if `answer` is no number.
    """
    right = value_of(answer)
    answer = _THOUSANDS.sub("", answer)
    numbers = list(_NUMBER.finditer(answer))
    if right is None or not numbers:
        return None
    found: dict[str, float] = {}
    for attempt in range(400):
        match = rng.choice(numbers)
        # The reach grows with the attempts: small whole numbers have few neighbours.
        text = answer[: match.start()] + _moved(match[0], 1 / 3 + attempt / 100, rng) + answer[match.end() :]
        value = value_of(text)
        if value is None or value * right < 0:
            continue
        if all(abs(value - other) > 1e-6 * max(1.0, abs(other)) for other in (right, *found.values())):
            found[text] = value
        if len(found) == count:
            return list(found)
    return None


def _moved(number: str, share: float, rng: random.Random) -> str:
    """A positive number with as many decimals, at most `share` (and at least 3 units of the last place) away."""
    decimals = len(number.partition(".")[2])
    units = round(float(number) * 10**decimals)
    reach = max(3, math.floor(units * share))
    moved = units + rng.choice((-1, 1)) * rng.randint(1, reach)
    return f"{max(moved, 1) / 10**decimals:.{decimals}f}"
