"""Spellings of an option: Latin letters, letters of other alphabets, positions, roman numerals and ordinals."""

import re
import unicodedata
from collections.abc import Callable, Sequence

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Four options are assumed where a data set does not list them.
DEFAULT_OPTIONS = 4

# Options are lettered in these orders, too: Cyrillic, Greek, Arabic, Hebrew, Devanagari, Thai, kana, Chinese, Hangul.
_ALPHABETS = ("абвгдежз", "αβγδεζηθ", "أبجدهو", "ابجدهو", "אבגדהו", "कखगघङच", "กขคงจฉ", "アイウエオカ", "あいうえお",
              "甲乙丙丁戊己", "가나다라마바", "ㄱㄴㄷㄹㅁㅂ")  # fmt: skip
# Letters that look like Latin ones: Cyrillic "В" is typed for "B", and is the third letter of its own alphabet.
_TWINS = dict(zip("авсенкморртхіαβεζηικμνορτυχ", "ABCEHKMOPPTXIABEZHIKMNOPTYX", strict=True))
_ROMAN = ("", "ii", "iii", "iv", "", "vi", "vii", "viii", "ix")  # single i, v and x are letters
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
FOREIGN = "".join(
    sorted(
        {letter for alphabet in _ALPHABETS for letter in alphabet + alphabet.upper()}
        | {*_TWINS, *map(str.upper, _TWINS)}
    )
)
# Characters that may follow a letter without a space: "Bです", "B가".
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
ROMAN = "|".join(sorted(filter(None, _ROMAN), key=len, reverse=True))
ORDINAL = "|".join(_ORDINALS)
# A label at the start of an option's own text: "B. ", "(B) ", "2) ".
_LABEL = re.compile(r"[(\[]?([A-Za-z]|\d{1,2})(?:[)\]][.:]?|[.:、](?=\s|[^\W\d]))\s*")
# Circled digits number options, and in running text steps and equations.
CIRCLED = "①②③④⑤⑥⑦⑧⑨⑩⑪⑫⑬⑭⑮⑯⑰⑱⑲⑳"
_ANY_CIRCLE = re.compile("[①-⑳Ⓐ-ⓩ❶-➓]")
_EMPHASIS = re.compile(r"<(b|strong|em|i|u)>([^<>]*)</\1>", re.I)
_CIRCLE_LABEL = re.compile(rf"({_ANY_CIRCLE.pattern})[.:)、]?\s*")
_BRACKETED = {ord(start) + i: f"({letter})" for start in "Ⓐⓐ" for i, letter in enumerate(LETTERS)}


def plain_text(text: str) -> str:
    """Compatibility characters ("Ⓑ", "②", "Ｂ") in their plain form, without invisible ones and HTML emphasis."""
    return _EMPHASIS.sub(r"\2", "".join(map(_plain_symbol, unicodedata.normalize("NFKC", text))))


def _plain_symbol(symbol: str) -> str:
    code = ord(symbol)
    if code < 0x2000:
        return symbol
    if 0x1F150 <= code < 0x1F16A or 0x1F170 <= code < 0x1F18A:  # white letters on black, which NFKC leaves
        return LETTERS[code - (0x1F150 if code < 0x1F16A else 0x1F170)]
    if 0x2776 <= code < 0x2794:  # white digits on black, and sans-serif ones
        return str((code - 0x2776) % 10 + 1)
    # Keycaps ("2️⃣") and marks of writing direction.
    return "" if code in (0xFE0F, 0x20E3) or unicodedata.category(symbol) == "Cf" else symbol


def plain_but_circled(text: str, plain: Callable[[str], str] = plain_text) -> str:
    """What `plain` makes of a text without its circled digits; they stay, "❸" as "③"."""
    parts = re.split("([①-⑳❶-➓])", text)
    parts[::2] = map(plain, parts[::2])
    parts[1::2] = [CIRCLED[int(plain_text(symbol)) - 1] for symbol in parts[1::2]]
    return "".join(parts)


def labelled_text(text: str, choices: Sequence[str] | None) -> str:
    """`plain_text` of a completion or an answer in which circled symbols stay labels: "③" as it is, "Ⓒ" as "(C)".

    Unless the options carry such labels in order, they are plain where they may mean something else: all of them if
    options' texts have circled symbols, digits also if a text begins with a number.
    """
    choices = () if choices is None else choices
    numbered = len(choices) > 0 and _without_circles(choices) is not None
    if not numbered and any(_ANY_CIRCLE.search(str(choice)) for choice in choices):
        return plain_text(text)
    text = text.translate(_BRACKETED)
    if not numbered and _are_numeric(option_texts(choices)):
        return plain_text(text)
    return _EMPHASIS.sub(r"\2", plain_but_circled(text))


def _without_circles(choices: Sequence[str]) -> list[str] | None:
    """The options' texts without their circled labels ("① red", "Ⓑ blue"), if all carry their own."""
    texts = [str(choice).strip() for choice in choices]
    labels = [_CIRCLE_LABEL.match(text) for text in texts]
    if not all(labels):
        return None
    rest = [text[label.end() :] for text, label in zip(texts, labels)]
    named = [plain_text(label[1]).upper() for label in labels]
    in_order = named in (list(LETTERS[: len(texts)]), [str(i + 1) for i in range(len(texts))])
    return rest if in_order and not any(map(_ANY_CIRCLE.search, rest)) else None


def option_texts(choices: Sequence[str] | None) -> list[str]:
    """The options' texts, normalised, without labels where all of them carry their own ("A. red", "② blue").

    Raises:
        ValueError: More than 26 options.
    """
    if choices is None or len(choices) == 0:
        return [""] * DEFAULT_OPTIONS
    if len(choices) > len(LETTERS):
        raise ValueError(f"choices has {len(choices)} options; at most {len(LETTERS)} can be lettered.")
    texts = [plain_text(str(choice)).strip() for choice in choices]
    labels = [_LABEL.match(text) for text in texts]
    if all(labels) and (
        [label[1].upper() for label in labels] == list(LETTERS[: len(texts)])
        or [label[1] for label in labels] == [str(i + 1) for i in range(len(texts))]
    ):
        texts = [text[label.end() :] for text, label in zip(texts, labels)]
    else:
        texts = _without_circles(choices) or texts
    return [normalize(text) for text in texts]


def normalize(text: str) -> str:
    """Case, spaces and punctuation around it do not count when texts are compared."""
    text = plain_text(text).casefold()
    return " ".join(text.split()).strip(" .,;:!?*_\"'`“”‘’()[]{}<>$「」『』【】《》。，、：；！？")


def to_letter(symbol: str, texts: list[str]) -> str | None:
    """The option that a letter, a position, a roman numeral or an ordinal means; None if there is no such option.

    Positions and numerals count only if no option's text begins with a number, circled digits always.
    """
    if len(symbol) == 1 and symbol in CIRCLED:
        return LETTERS[CIRCLED.index(symbol)] if CIRCLED.index(symbol) < len(texts) else None
    symbol = symbol.casefold()
    if symbol.isdecimal():
        return _at_position(int(symbol) - 1, texts)
    for positions in (_ROMAN, _ORDINALS):
        if symbol in positions and symbol:
            return _at_position(positions.index(symbol), texts)
    valid = LETTERS[: len(texts)]
    if len(symbol) == 1 and symbol.isascii():
        return symbol.upper() if symbol.upper() in valid else None
    readings = {LETTERS[alphabet.index(symbol)] for alphabet in _ALPHABETS if symbol in alphabet}
    readings = (readings | {_TWINS.get(symbol, "")}) & set(valid)
    return readings.pop() if len(readings) == 1 else None


def _at_position(position: int, texts: list[str]) -> str | None:
    return LETTERS[position] if 0 <= position < len(texts) and not _are_numeric(texts) else None


def _are_numeric(texts: list[str]) -> bool:
    return any(re.match(r"[-+$]?\d", text) for text in texts)


def match_text(text: str, texts: list[str]) -> str | None:
    """The only option whose text is `text`."""
    wanted = normalize(text)
    found = [LETTERS[i] for i, option in enumerate(texts) if option and option == wanted]
    return found[0] if len(found) == 1 else None
