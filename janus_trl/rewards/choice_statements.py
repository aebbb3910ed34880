"""Finding where a text settles on an option: statements, boxes, labels, and letters that stand alone.

The order of reading follows MCExactMatch of UniRL (tag, lone letter, phrase, standalone letter). Beyond that: the last
explicit statement wins, two different letters are no answer, and an article ("A red fox") or the name of a thing
("angle B", "vitamin C") is not a letter.
"""

import re
import unicodedata
from typing import Any

from janus_trl.rewards.choice_symbols import CJK, FOREIGN, LETTERS, ORDINAL, ROMAN, match_text, normalize, to_letter

_REACH = 200  # characters in which a statement must name its option
_HEDGE = object()  # a statement that names two different options
_BOXED = re.compile(r"\\f?boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textit|bf|rm)\s*|\\[ ,;!]|[{}]")
# After a letter: no further letter, no "-day", no "'s" (but Turkish "B'dir").
_END = rf"(?![^\W{CJK}]|['’](?!d[ıiuü]r\b|t[ıiuü]r\b)\w|-\w)"
_SYMBOL = rf"([A-Za-z{FOREIGN}])"
# "③" is a label wherever an option may stand, but not in "③式" (equation) or "①③" (two statements that hold).
_CIRCLED = r"([①-⑳])(?![①-⑳式步题題])"
_PUNCTUATION = r"(?:[\s*_\"'`“”‘’(\[{<$:,「『【《]|\\f?boxed|\\text(?:bf)?|\\math(?:rm|bf))*"
_FILLER = (
    r"(?:(?:the|option|choice|letter|answer|most likely|likely|probably|possibly|maybe|perhaps|clearly|definitely|"
    r"certainly|therefore|thus|either|both|simply|just|correct|following|la|el|die|opción|opção|letra|réponse|"
    r"вариант|a(?=[ \t]+(?:letra|opção|alternativa)\b))\b|选项|选择|选|選項|選択肢)"
)
_WRAPPER = rf"(?:{_PUNCTUATION}{_FILLER})*{_PUNCTUATION}"
_LEAD, _QUOTES, _WORD = (re.compile(pattern, re.I) for pattern in (_WRAPPER, _PUNCTUATION, _FILLER))
_LATIN_NOUN = (
    r"(?<![^\W_])(?:answer|ans|option|choice|antwort|lösung|respuesta|réponse|risposta|resposta|opción|opção|opzione|"
    r"alternativa|antwoord|odpowiedź|cevap|đáp án|jawaban(?:nya)?|ответ|вариант|απάντηση)(?![^\W_])"
)
# Nouns after which the option may follow without a copula.
_OTHER_NOUN = unicodedata.normalize(
    "NFKC",
    r"(?:答案|正解|解答|答え|正しい選択肢|选项|選項|정답|(?<!\w)답|الإجابة|الجواب|ה?תשובה|उत्तर|คำตอบ|(?<!\w)cevap|"
    r"(?<![不没未])(?:故选|应选|当选|选择|選擇|选+|選+))",
)
_TAIL = (
    r"(?:[ \t]+(?:choice|option|letter|here|to (?:the|this) (?:question|problem)(?: above)?|that fits best|"
    r"correcta?|correcte|correta|corretta|juste|đúng|الصحيحة|الصحيح|הנכונה))?"
)
_COPULA = (
    r"(?:(?:['’]s|is|was|are|(?:must|should|would|will|to) be|ist|lautet|es|est|è|é|to|là|adalah)\b|"
    r"[ \t]*(?::|=|->|→|[—–]|-(?=[ \t]))|是|为|為)"
)
_LINK = r"(?:[：:】\s]|是|为|為|は|が|은|는|هي|هو|היא|הוא|คือ|है)*"
# "Answer: B", "**Answer:** B", "the correct option is (B)"; then the statement is read from where the match ends.
_STRONG = re.compile(rf"{_LATIN_NOUN}{_TAIL}[\s*_\"'`]*{_COPULA}|{_OTHER_NOUN}{_TAIL}{_LINK}", re.I)
_WEAK = re.compile(
    r"\b(?:I|I'll|I'd|I would|I will|I'm|I am)[ \t]+(?:think|believe|guess|choose|pick|select|say|go with|go for|"
    r"going with|going for)\b(?:[ \t]+(?:that|it's|it is|it must be))*"
    r"|\b(?:it|that|this|the correct one)(?:['’]s|[ \t]+(?:is|must be|would be|has to be))\b"
    r"|\brichtig ist\b|\bich wähle\b|\bje choisis\b|\belijo\b|\bc['’]est\b|正しいのは",
    re.I,
)
_RIGHT = (
    r"(?:correct|right|richtig|korrekt|correcte|correcta|correto|correta|corretta|corretto|bonne|juste|верный|верно)"
)
# "B is correct", "(B) is the right answer", but not "A is right of B" or "③ is correct" (which may be a statement).
_VERDICT = re.compile(
    r"(?<![\w'’])([A-Z])[)\]*_\"'.]*[ \t]+(?:is|must be|would be|ist|est|es|è|é)[ \t]+(?:(?:the|die|la|a)[ \t]+)?"
    rf"(?:(?:{_RIGHT}|best)[ \t]+(?:answer|option|choice|one|antwort|réponse|respuesta|resposta)\b"
    rf"|{_RIGHT}(?=[ \t]*(?:[.,;:!)\n]|\Z|because\b|since\b|as\b|weil\b|car\b))|answer\b)"
    r"|(?<!\w)([A-Z])[)\]]?(?:选项|選項)?(?:是?正确(?!的?选项)|是?正確|が正解|가 정답|이 정답)"
    r"|(?:\A|\n)\s*([A-Z])(?:です|입니다)"
    rf"|\b({ORDINAL})[ \t]+(?:answer|option|choice|one)[ \t]+is[ \t]+(?:the[ \t]+)?(?:correct|right)\b"
    rf"|(?<!\w)([①-⑳])(?:[ \t]+is[ \t]+the[ \t]+(?:{_RIGHT}[ \t]+)?(?:answer|option|choice)\b"
    r"|是正确(?:答案|选项)|是正確(?:答案|選項)|が正解|[이가] 정답)"
)
_OR = (
    r"(?:\b(?i:or|and|oder|und|ou|et|o|y|e|vs|hoặc|atau|veya|lub|или|и|أو|או|หรือ)\b"
    r"|[/|&,;、]|或者?|和|及|与|还是|または|か|と|또는|와|과)"
)
# The last two: a space alone ("B C"), and an explanation in brackets ("blue (C)", "B: red").
_CONNECTOR = re.compile(
    rf"(?:[\s)\]}}*_\"'`.]*{_OR}(?:\s*{_OR})*|[)\]]?[ \t]+\(?(?=[A-Z]\b|[①-⑳])|"
    rf"[)\]*]*[ \t]*(?P<open>[(:])){_WRAPPER}"
)
# Words after which a capital "A" or "I" is a letter and not an article or a pronoun.
_AFTER_LETTER = re.compile(
    r"[ \t]+(?:because|since|as|due|given|for|so|is|was|which|that|in|based|and|or|but|not|oder|ou|o|und|vs)\b", re.I
)
# Predicates that are written to a number without a space: "3입니다", "3です".
_PREDICATE = r"(?=입니다|이다|이에요|예요|です|だ(?!\w)|である)"
_CLAUSE = re.compile(r"[ \t]+(?:is|are|was|would|could|can|has|does|doesn['’]t|isn['’]t|cannot)\b", re.I)
_STANDALONE = re.compile(r"(?<![\w'’.\-])([A-Z])(?![\w'’]|[-.][^\W_])")
# What may stand before a letter that is chosen: nothing, a mark, or one of these words ("angle B" is no choice).
_BEFORE = re.compile(
    r"(?:\A|[.!?:;,\n>|、。，：]|(?<![^\W_])(?:is|be|so|thus|hence|therefore|then|choose|chose|choosing|pick|picked|select|"
    r"selected|guess|say|with|for|option|choice|answer|ans|letter|only|but|option|alternativa|opción|opção|letra|"
    r"réponse|antwort|respuesta|['’]s|ist|est|es|è|é|là|adalah))[\s*_\"'`“‘(\[{$#]*\Z",
    re.I,
)
# What may follow it: an end, a mark, or the reason.
_AFTER = re.compile(
    r"[)\]*_\"'`”’}$]*(?:\s*\Z|\s*[.,;:!?\n<(—–]|[ \t]+(?:because|since|as|due|given|for|so|rather|instead|not|"
    r"here|over|and|or|but|based|weil|car|porque)\b|[ \t]+-[ \t])",
    re.I,
)
_DENIED = re.compile(
    r"(?:\b(?:not|cannot|never|neither|nor|except|than|nicht|kein|wrong|incorrect|false)\b|n['’]t\b)"
    r"(?:(?!\bbut\b)[^.!?;:\n,])*\Z",
    re.I,
)
_DENIED_NOUN = re.compile(r"(?:wrong|incorrect|false|worst|falsche|mauvaise|错误的?|不正确的?)[ \t]*\Z", re.I)
_REJECTED = re.compile(r"[)\]*\"']*[ \t]+(?:is|are)[ \t]+(?:wrong|incorrect|not|false|the wrong)\b", re.I)


# "not A but C", "nicht A, sondern C", "不是A而是C" after "the answer is".
_NOT_BUT = re.compile(
    r"\s*(?:(?:not|nicht|no|pas)\b[^.!?;:\n]{1,80}?\b(?:but(?: rather| instead)?|sondern|sino|mais)\b"
    r"|不是[^。.!?;:\n]{1,80}?而是)",
    re.I,
)
_EQUATION_LEFT = re.compile(r"[\s$\\(*∠]*([A-Za-zθ])[ \t]*=(?=[ \t]*[-+$\d])")
_EQUATION = re.compile(
    r"(?:(?:so|thus|hence|therefore|then|and|we get|we have|∴|=>)[,:]?[ \t]+)*[\s$\\(*∠]*"
    r"(?<![^\W_])([A-Za-zθ])[ \t]*=[ \t]*([-+$]?\d[^=,;\n]*)",
    re.I,
)


def read_option(text: str, texts: list[str]) -> str | None:
    """The option that `text` settles on; see `multiple_choice.extract_choice`."""
    found = read_lone(text, texts) or match_text(text, texts)
    if found:
        return found
    statement, stated = _last_statement(text, texts)
    if statement is not None:
        return None if statement is _HEDGE else statement
    boxed = [read_boxed(content, texts) for content in _BOXED.findall(text)]
    found = next((letter for letter in reversed(boxed) if letter), None) or read_label(text, texts)
    # "The answer is 45 at point A" has stated something that is no option: a letter elsewhere does not count.
    found = found or _read_outer_line(text, texts)
    return found or (None if stated else _read_standalone(text, texts) or _read_equation(text, texts))


def read_lone(text: str, texts: list[str]) -> str | None:
    """A text that is nothing but a letter or a position, wrapped as in "(B)", "**b.**", "Option B" or "2번"."""
    rest = text[_LEAD.match(text).end() :].lstrip("#|> \t\n")
    rest = rest[_LEAD.match(rest).end() :]
    rest = re.sub(r"<[|/][^<>]*>\s*\Z", "", rest)  # an end token that was not cut off
    match = re.fullmatch(rf"({_SYMBOL}|[①-⑳]|\d\d?|{ROMAN})(?:번)?[\s)\]}}>*_\"'`“”‘’.:,;!$」』】》。]*", rest, re.I)
    return to_letter(match[1], texts) if match else None


def read_boxed(content: str, texts: list[str]) -> str | None:
    """What stands in `\\boxed{}`: a letter, an option's text, or both if they agree."""
    content = _COMMAND.sub("", content)
    return read_lone(content, texts) or match_text(content, texts) or read_label(content, texts)


def boxed_contents(text: str) -> list[str]:
    """The contents of all `\\boxed{}`."""
    return _BOXED.findall(text)


def _last_statement(text: str, texts: list[str]) -> tuple[Any, bool]:
    """The last statement that names an option (or `_HEDGE`), and whether there was any statement of an answer."""
    found, stated = [], False
    for match in _STRONG.finditer(text):
        stated = True
        if not _DENIED_NOUN.search(text[: match.start()]):
            rest = _past_denial(text[match.end() : match.end() + _REACH], texts)
            found.append((match.end(), _read_statement(rest, texts)))
    for match in _WEAK.finditer(text):
        if not _DENIED.search(text[: match.start()]):
            found.append((match.end(), _read_statement(text[match.end() : match.end() + _REACH], texts)))
    for match in _VERDICT.finditer(text):
        if not _DENIED.search(text[: match.start()]):
            found.append((match.end(), to_letter(next(filter(None, match.groups())), texts)))
    named = [letter for _, letter in sorted(found, key=lambda item: item[0]) if letter is not None]
    return (named[-1] if named else None), stated


def _past_denial(rest: str, texts: list[str]) -> str:
    """What follows "the answer is", without "not A but" and "x =" before the option."""
    denial, equation = _NOT_BUT.match(rest), _EQUATION_LEFT.match(rest)
    if equation and not to_letter(equation[1], texts):
        return rest[equation.end() :]
    return rest[denial.end() :] if denial else rest


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
    connector = _CONNECTOR.match(rest, length)
    if connector:
        other_rest = rest[connector.end() :]
        other, other_length = _option_at_start(other_rest, texts)
        number = bool(connector["open"]) and other_rest[:1].isdecimal()  # "B (3)" may give the value
        if other and other != letter and not number and not _CLAUSE.match(other_rest, other_length):
            return _HEDGE
    return letter


def _option_at_start(rest: str, texts: list[str]) -> tuple[str | None, int]:
    """The option that `rest` begins with (a letter, an option's text, a position), and the length of its mention."""
    symbol = re.match(f"{_SYMBOL}{_END}|{_CIRCLED}", rest)
    letter = to_letter(symbol[symbol.lastindex], texts) if symbol else None
    if letter and not _is_word(rest, 0, texts):
        return letter, 1
    line = unicodedata.normalize("NFKC", rest.partition("\n")[0]).casefold()
    starts = [
        (len(t), LETTERS[i]) for i, t in enumerate(texts) if t and re.match(re.escape(t) + _END + r"(?![.,]\d)", line)
    ]
    if starts:
        length, by_text = max(starts)
        return (by_text if texts.count(line[:length]) == 1 else None), length
    number = re.match(
        rf"(\d{{1,2}})(?:번|番|{_PREDICATE}|(?=[\s)\]}}*_\"'`.:,;!$]*(?:\n|\Z|[.:]\s|。)))|({ROMAN})(?!\w)"
        rf"|({ORDINAL})(?=[ \t]+(?:answer|option|choice|one)\b)",
        rest,
        re.I,
    )
    return (to_letter(number[number.lastindex], texts), number.end()) if number else (None, 0)


def _is_word(text: str, position: int, texts: list[str]) -> bool:
    """Whether the single letter at `position` is an article or a pronoun ("A red fox", "I see") and not an option."""
    symbol, after = text[position], text[position + 1 :]
    if symbol.upper() not in "AIEO" or not re.match(r"[ \t]+[^\W\d_]", after):
        return False
    if symbol in "EO":
        return False  # capital conjunctions of Romance languages hardly ever follow "the answer is"
    own = LETTERS.index(symbol.upper())
    own_text = texts[own] if own < len(texts) else ""
    sentence = re.split(r"[.,;:!?()\n]", after, maxsplit=1)[0]
    if own_text and normalize(sentence) == own_text:
        return False  # "Answer: A red fox" where option A is "red fox"
    return symbol.islower() or not _AFTER_LETTER.match(after)


def read_label(text: str, texts: list[str]) -> str | None:
    """A leading label: "B) red", "(B) red", "B. red", "B: red", "B - red"; labels of several options are no answer."""
    labels = re.findall(rf"(?m)(?:^|\s)[(\[*]*{_SYMBOL}(?:\*{{0,2}}[)\]:]|\.(?=\s|\w\w|[{CJK}]))", text)
    letters = {to_letter(label, texts) for label in labels} - {None}
    first = re.match(
        rf"[\s(\[*\"'#]*{_SYMBOL}(?:\*{{0,2}}[)\]:]|\.(?=\s|\*|[{CJK}])|[*]*[ \t]+[-–—](?=\s))|\s*(\d{{1,2}})[.)][ \t]"
        rf"|[\s(\[*]*{_CIRCLED}[.:)\]、*]*[ \t]*",
        text,
    )
    letter = to_letter(first[first.lastindex], texts) if first else None
    if not letter or not letters <= {letter}:
        return None
    # "2. blue" and "② blue" need the option's text, as lists are numbered, too.
    return letter if first[1] or normalize(text[first.end() :]) == texts[LETTERS.index(letter)] != "" else None


def _read_outer_line(text: str, texts: list[str]) -> str | None:
    """A letter that is the whole first or last line, beside an explanation; None if the two differ."""
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    found = {read_lone(line, texts) for line in (lines[0], lines[-1]) if not line.strip().isdigit()} - {None}
    return found.pop() if len(found) == 1 else None


def _read_equation(text: str, texts: list[str]) -> str | None:
    """The option that a last clause like "so x = 45" gives a variable; None if x has other options' values, too."""
    lines = text.strip().splitlines() or [""]
    clauses = [clause.strip() for clause in re.split(r"[,;]\s|\.\s", lines[-1]) if clause.strip(" .")]
    last = _EQUATION.fullmatch(clauses[-1]) if clauses else None
    if last is None or to_letter(last[1], texts):  # "A = 45" may define the option's own letter
        return None
    values = re.findall(rf"(?<!\w){last[1]}[ \t]*=[ \t]*([-+$]?\d[^\s=,;]*)", text)
    found = {match_text(value.rstrip("\\)]$*. "), texts) for value in [*values, last[2]]} - {None}
    return found.pop() if len(found) == 1 and match_text(last[2].rstrip("\\)]$*. "), texts) else None


def _read_standalone(text: str, texts: list[str]) -> str | None:
    """The only capital letter of an option that stands as a choice; None if there is none, or several of them."""
    matches = [
        match
        for match in _STANDALONE.finditer(text)
        if match[1] in LETTERS[: len(texts)]
        and not _is_word(text, match.start(), texts)
        and not _REJECTED.match(text, match.end())
        and not _DENIED.search(text[: match.start()])
    ]
    for one, other in zip(matches, matches[1:]):
        if one[1] != other[1] and _CONNECTOR.fullmatch(text, one.end(), other.start()):
            return None  # "A or B"
    found = {m[1] for m in matches if _BEFORE.search(text[: m.start()]) and _AFTER.match(text, m.end())}
    return found.pop() if len(found) == 1 else None
