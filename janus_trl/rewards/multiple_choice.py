"""Multiple choice: which option a completion settles on, and whether it is the right one.

The order of reading follows MCExactMatch of UniRL (tag, lone letter, phrase, standalone letter). Beyond that: the last
explicit statement wins, two different letters are no answer, and an article ("A red fox") is not a letter.
"""

import logging
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from janus_trl.rewards.calling import completion_text

logger = logging.getLogger(__name__)

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Four options are assumed where a data set does not list them.
DEFAULT_OPTIONS = 4
# Share of answers that may be unreadable before a run is refused.
MAX_UNUSABLE_SHARE = 0.01

_HEDGE = object()  # a statement that names two different options
_TAG = re.compile(r"<\s*answer\s*>(.*?)(?=<\s*/\s*answer\s*>|<\s*answer\s*>|\Z)", re.I | re.S)
_BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{)?([^{}]*)\}")
_PUNCTUATION = r"(?:[\s*_\"'`“”‘’(\[{$:,]|\\boxed|\\text(?:bf)?|\\math(?:rm|bf))*"
_FILLER = (
    r"(?:the|option|choice|letter|answer|most likely|likely|probably|possibly|maybe|perhaps|clearly|definitely|"
    r"certainly|therefore|thus|either|both|simply|just|correct|following)\b"
)
_WRAPPER = rf"(?:{_PUNCTUATION}{_FILLER})*{_PUNCTUATION}"
_LEAD, _QUOTES, _WORD = (re.compile(pattern, re.I) for pattern in (_WRAPPER, _PUNCTUATION, _FILLER))
_NOUN = r"(?:(?<![^\W_])(?:answer|option|choice|antwort|lösung|respuesta|réponse|risposta|resposta|ответ)|答案)"
_TAIL = r"(?:[ \t]+(?:choice|option|letter|here|to (?:the|this) (?:question|problem)))?"
_COPULA = r"(?:(?:['’]s|is|was|are|(?:must|should|would|will|to) be|ist|es|est|è|é)\b|:|=|->|→|是|为)"
# "Answer: B", "**Answer:** B", "the correct option is (B)"; then the statement is read from where the match ends.
_STRONG = re.compile(rf"{_NOUN}{_TAIL}[\s*_\"'`]*{_COPULA}", re.I)
_WEAK = re.compile(
    r"\b(?:I|I'll|I'd|I would)[ \t]+(?:think|believe|guess|choose|pick|select|say|go with|go for)\b"
    r"(?:[ \t]+(?:that|it's|it is|it must be))*",
    re.I,
)
_VERDICT = re.compile(  # "B is correct", "(B) is the right answer", but not "A is right of B"
    r"(?<![\w'’])([A-Z])[)\]*_\"'.]*[ \t]+(?:is|must be|would be)[ \t]+(?:the[ \t]+)?"
    r"(?:(?:correct|right|best)[ \t]+(?:answer|option|choice|one)\b|(?:correct|right)(?=[ \t]*(?:[.,;:!)\n]|\Z))"
    r"|answer\b)"
)
_CONNECTOR = re.compile(r"(?:[\s)\]}*_\"'`.]*(?:\bor\b|\band\b|\boder\b|\bvs\b|/|\||&|,)|[ \t]+(?=[A-Z]\b))" + _WRAPPER)
# Words after which a capital "A" or "I" is a letter and not an article or a pronoun.
_AFTER_LETTER = re.compile(
    r"[ \t]+(?:because|since|as|due|given|for|so|is|was|which|that|in|based|and|or|but|not|oder|vs)\b", re.I
)
_STANDALONE = re.compile(r"(?<![\w'’.\-])([A-Z])(?![\w'’]|[-.][^\W_])")
_NEGATION = re.compile(
    r"(?:\bnot|n['’]t|\bcannot|\bnever|\bthan|\bexcept)(?:[ \t]+be)?[ \t]+(?:option[ \t]+)?[(\[*]*$", re.I
)
_REJECTED = re.compile(r"[)\]*\"']*[ \t]+(?:is|are)[ \t]+(?:wrong|incorrect|not|false)\b", re.I)


def extract_choice(text: str, choices: Sequence[str] | None = None) -> str | None:
    """The option that `text` settles on.

    Read in this order, and the first kind found decides: the last `<answer>` block (its end tag may be missing); the
    whole text as a letter, a number counted from 1, or an option's text; the last statement such as "the answer is B";
    the last `\\boxed{B}`; a leading label such as "B) red"; a letter on a line of its own; the only letter that is
    standing alone. After `</think>` only the rest counts. Numbers count as positions only if no option's text begins
    with a number.

    Args:
        text: The completion.
        choices: The option texts, in order; None for four options without texts.

    Returns:
        A letter from "A" on, or None: no answer, or several different ones ("A or B").

    Raises:
        ValueError: More than 26 options.
    """
    texts = _option_texts(choices)
    text = unicodedata.normalize("NFKC", text)
    text = text.rpartition("</think>")[2]
    blocks = [block.strip() for block in _TAG.findall(text) if block.strip()]
    return _read(blocks[-1], texts) if blocks else _read(text.strip(), texts)


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
    texts = _option_texts(choices)
    if answer is None or isinstance(answer, bool):
        return None
    if isinstance(answer, int):
        by_index = LETTERS[answer] if 0 <= answer < len(texts) else None
        by_text = _match_text(str(answer), texts)
        # "2" among the options 1, 2, 3: index and text disagree, and either may be meant.
        return by_index if by_text in (None, by_index) else None if by_index else by_text
    if not isinstance(answer, str):
        return None
    answer = unicodedata.normalize("NFKC", answer).strip()
    return _read_lone(answer, texts) or _match_text(answer, texts) or _read_label(answer, texts)


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


def _option_texts(choices: Sequence[str] | None) -> list[str]:
    if choices is None or len(choices) == 0:
        return [""] * DEFAULT_OPTIONS
    if len(choices) > len(LETTERS):
        raise ValueError(f"choices has {len(choices)} options; at most {len(LETTERS)} can be lettered.")
    return [_normalize(str(choice)) for choice in choices]


def _normalize(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(text.split()).strip(" .,;:!?*_\"'`“”‘’()[]{}$")


def _read(text: str, texts: list[str]) -> str | None:
    found = _read_lone(text, texts) or _match_text(text, texts)
    if found:
        return found
    statement, stated = _last_statement(text, texts)
    if statement is not None:
        return None if statement is _HEDGE else statement
    boxed = [_read_lone(content, texts) or _match_text(content, texts) for content in _BOXED.findall(text)]
    found = next((letter for letter in reversed(boxed) if letter), None) or _read_label(text, texts)
    # "The answer is 45 at point A" has stated something that is no option: a letter elsewhere does not count.
    found = found or _read_outer_line(text, texts)
    return found or (None if stated else _read_standalone(text, texts))


def _read_lone(text: str, texts: list[str]) -> str | None:
    """A text that is nothing but a letter or a position, wrapped as in "(B)", "**b.**" or "Option B"."""
    rest = text[_LEAD.match(text).end() :]
    match = re.fullmatch(r"([A-Za-z]|\d{1,2})[\s)\]}*_\"'`“”‘’.:,;!$]*", rest)
    return _to_letter(match[1], texts) if match else None


def _to_letter(symbol: str, texts: list[str]) -> str | None:
    if symbol.isdigit():
        numeric = any(re.match(r"[-+$]?\d", text) for text in texts)
        position = int(symbol)
        return LETTERS[position - 1] if 1 <= position <= len(texts) and not numeric else None
    letter = symbol.upper()
    return letter if letter in LETTERS[: len(texts)] else None


def _match_text(text: str, texts: list[str]) -> str | None:
    wanted = _normalize(text)
    found = [LETTERS[i] for i, option in enumerate(texts) if option and option == wanted]
    return found[0] if len(found) == 1 else None


def _last_statement(text: str, texts: list[str]) -> tuple[Any, bool]:
    """The last statement that names an option (or `_HEDGE`), and whether there was any statement of an answer."""
    strong = [match.end() for match in _STRONG.finditer(text)]
    found = [(end, _read_statement(text[end:], texts)) for end in strong]
    found += [(match.end(), _read_statement(text[match.end() :], texts)) for match in _WEAK.finditer(text)]
    found += [(match.end(), _to_letter(match[1], texts)) for match in _VERDICT.finditer(text)]
    named = [letter for _, letter in sorted(found, key=lambda item: item[0]) if letter is not None]
    return (named[-1] if named else None), bool(strong)


def _read_statement(rest: str, texts: list[str]) -> Any:
    """What follows "the answer is": an option, `_HEDGE` for two different ones, or None."""
    letter, length = None, 0
    while letter is None:
        rest = rest[_QUOTES.match(rest).end() :]
        letter, length = _option_at_start(rest, texts)
        filler = _WORD.match(rest)
        if letter is None and not filler:
            return None
        # Word by word, as "the cat" or "both" may be an option's text.
        rest = rest if letter else rest[filler.end() :]
    connector = _CONNECTOR.match(rest, length) if letter else None
    if connector:
        other, _ = _option_at_start(rest[connector.end() :], texts)
        if other and other != letter:
            return _HEDGE
    return letter


def _option_at_start(rest: str, texts: list[str]) -> tuple[str | None, int]:
    """The option that `rest` begins with (a letter, an option's text, a position), and the length of its mention."""
    symbol = re.match(r"([A-Za-z])(?![\w'’]|-\w)", rest)
    letter = _to_letter(symbol[1], texts) if symbol else None
    if letter and not _is_word(rest, 0, texts):
        return letter, 1
    line = unicodedata.normalize("NFKC", rest.partition("\n")[0]).casefold()
    starts = [(len(t), LETTERS[i]) for i, t in enumerate(texts) if t and re.match(re.escape(t) + r"(?![\w])", line)]
    if starts:
        length, by_text = max(starts)
        return (by_text if texts.count(line[:length]) == 1 else None), length
    number = re.match(r"(\d{1,2})(?=[\s)\]}*_\"'`.:,;!$]*(?:\n|\Z|[.:]\s))", rest)
    return (_to_letter(number[1], texts), len(number[1])) if number else (None, 0)


def _is_word(text: str, position: int, texts: list[str]) -> bool:
    """Whether the single letter at `position` is an article or a pronoun ("A red fox", "I see") and not an option."""
    symbol, after = text[position], text[position + 1 :]
    if symbol.upper() not in "AI" or not re.match(r"[ \t]+[^\W\d_]", after):
        return False
    own_text = texts[LETTERS.index(symbol.upper())]
    sentence = re.split(r"[.,;:!?()\n]", after, maxsplit=1)[0]
    if own_text and _normalize(sentence) == own_text:
        return False  # "Answer: A red fox" where option A is "red fox"
    return symbol.islower() or not _AFTER_LETTER.match(after)


def _read_label(text: str, texts: list[str]) -> str | None:
    """A leading label: "B) red", "(B) red", "B. red", "B: red", "B - red"; labels of several options are no answer."""
    labels = re.findall(r"(?m)(?:^|\s)[(\[*]*([A-Za-z])(?:\*{0,2}[)\]:]|\.(?=\s))", text)
    letters = {_to_letter(label, texts) for label in labels} - {None}
    first = re.match(r"[\s(\[*\"']*([A-Za-z])(?:\*{0,2}[)\]:]|\.(?=\s)|[ \t]+[-–—](?=\s))", text)
    letter = _to_letter(first[1], texts) if first else None
    return letter if letter and letters <= {letter} else None


def _read_outer_line(text: str, texts: list[str]) -> str | None:
    """A letter that is the whole first or last line, beside an explanation; None if the two differ."""
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    found = {_read_lone(line, texts) for line in (lines[0], lines[-1]) if not line.strip().isdigit()} - {None}
    return found.pop() if len(found) == 1 else None


def _read_standalone(text: str, texts: list[str]) -> str | None:
    """The only capital letter of an option that stands alone; None if there are none or several different ones."""
    found = set()
    for match in _STANDALONE.finditer(text):
        denied = _REJECTED.match(text, match.end()) or _NEGATION.search(text[: match.start()])
        if match[1] in LETTERS[: len(texts)] and not _is_word(text, match.start(), texts) and not denied:
            found.add(match[1])
    return found.pop() if len(found) == 1 else None


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
