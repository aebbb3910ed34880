"""Spellings of an option: Latin letters, letters of other alphabets, positions, roman numerals and ordinals."""

import re
import unicodedata
from collections.abc import Sequence

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


def plain_text(text: str) -> str:
    """Compatibility characters ("Ⓑ", "②", "Ｂ") in their plain form, without invisible ones and HTML emphasis."""
    text = "".join(map(_plain_symbol, unicodedata.normalize("NFKC", text)))
    return re.sub(r"<(b|strong|em|i|u)>([^<>]*)</\1>", r"\2", text, flags=re.I)


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


def option_texts(choices: Sequence[str] | None) -> list[str]:
    """The options' texts, normalised, without labels where all of them carry their own ("A. red", "B. blue").

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
    return [normalize(text) for text in texts]


def normalize(text: str) -> str:
    """Case, spaces and punctuation around it do not count when texts are compared."""
    text = plain_text(text).casefold()
    return " ".join(text.split()).strip(" .,;:!?*_\"'`“”‘’()[]{}<>$「」『』【】《》。，、：；！？")


def to_letter(symbol: str, texts: list[str]) -> str | None:
    """The option that a letter, a position, a roman numeral or an ordinal means; None if there is no such option.

    Positions and numerals count only if no option's text begins with a number.
    """
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
    numeric = any(re.match(r"[-+$]?\d", text) for text in texts)
    return LETTERS[position] if 0 <= position < len(texts) and not numeric else None


def match_text(text: str, texts: list[str]) -> str | None:
    """The only option whose text is `text`."""
    wanted = normalize(text)
    found = [LETTERS[i] for i, option in enumerate(texts) if option and option == wanted]
    return found[0] if len(found) == 1 else None
