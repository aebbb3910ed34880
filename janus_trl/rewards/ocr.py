"""Text rendering: is the text that a prompt quotes readable in the picture? (the OCR reward of arXiv:2505.05470)"""

import importlib.util
import logging
import re
import unicodedata
from collections.abc import Callable
from typing import Any

from janus_trl.rewards.plugins import import_callable

logger = logging.getLogger(__name__)

INSTALL = "pip install 'janus_trl[ocr]'"
# "straight", “curly”, „low“, «angled», 「corner」 and 『double corner』; apostrophes are no quotes.
_QUOTED = re.compile(r'"([^"]*)"|[“„]([^“”„]+)[”“]|«([^«»]+)»|「([^「」]+)」|『([^『』]+)』')


class OCR:
    """1 - min(distance, length) / length of the quoted text, with the edit distance to what is read in the picture.

    Case and spaces do not count. Text that contains the quoted one scores 1, whatever stands around it; several quoted
    texts are all to be contained, or else compared in their order as one. A prompt that quotes nothing is None.

    Args:
        engine: `rapidocr` or `easyocr` (installed packages), `auto` for the first of them that is there, or the
            `module:function` of your own, which gets an RGB PIL picture and returns its text.

    Raises:
        ValueError: No such engine, or none installed.
    """

    def __init__(self, engine: str = "auto"):
        self._make = _engine_maker(engine)
        self._read: Callable[[Any], str] | None = None

    def load(self) -> None:
        """Start the engine, unless that is done already."""
        if self._read is None:
            self._read = self._make()

    def __call__(self, prompts: list[str], generated_images: list, **columns: Any) -> list[float | None]:
        """One value per row; `prompts` are the captions, `generated_images` RGB PIL pictures."""
        self.load()
        return [self._score(*row) for row in zip(prompts, generated_images, strict=True)]

    def _score(self, prompt: str, image: Any) -> float | None:
        wanted = quoted_texts(prompt)
        if not wanted:
            return None
        text = self._read(image)
        if not isinstance(text, str):
            raise ValueError(f"reward 'ocr': the engine returned {text!r:.60}; expected the text as a string.")
        return text_score(wanted, text)


def quoted_texts(prompt: str) -> list[str]:
    """The texts between double quotes, in order; those without a letter, digit or sign are left out."""
    found = ("".join(groups) for groups in _QUOTED.findall(prompt))
    return [text for text in found if _plain(text)]


def text_score(wanted: list[str], read: str) -> float:
    """From 0 (nothing alike) to 1 (all there)."""
    read, targets = _plain(read), [_plain(text) for text in wanted]
    if all(target in read for target in targets):
        return 1.0
    target = "".join(targets)
    # Each letter that is too much costs one: from twice the length on nothing is left.
    distance = len(target) if len(read) >= 2 * len(target) else edit_distance(target, read)
    return 1.0 - min(distance, len(target)) / len(target)


def edit_distance(one: str, other: str) -> int:
    """Levenshtein distance: insertions, deletions and replacements of single characters."""
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        diagonal, row[0] = row[0], i
        for j, other_letter in enumerate(other, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (letter != other_letter))
    return row[-1]


def check_rows(dataset: Any) -> None:
    """Look at the prompts before training.

    Raises:
        ValueError: No prompt quotes a text.
    """
    prompts = list(dataset["prompt"])
    quoting = sum(isinstance(prompt, str) and bool(quoted_texts(prompt)) for prompt in prompts)
    if prompts and quoting == 0:
        raise ValueError(
            f"reward 'ocr': none of {len(prompts)} prompts quotes a text; write it in double quotes: a sign \"OPEN\"."
        )
    if quoting < len(prompts):
        logger.warning(
            "reward 'ocr': %d of %d prompts quote no text; they get no value.", len(prompts) - quoting, len(prompts)
        )


def _plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def _engine_maker(engine: str) -> Callable[[], Callable[[Any], str]]:
    if engine != "auto" and engine not in _ENGINES:
        if ":" not in engine and "." not in engine:
            raise ValueError(
                f"reward 'ocr': engine is '{engine}'; valid: auto, {', '.join(_ENGINES)}, or module:function."
            )
        return import_callable(engine, "ocr", "engine")
    wanted = list(_ENGINES) if engine == "auto" else [engine]
    present = [name for name in wanted if importlib.util.find_spec(name) is not None]
    if not present:
        raise ValueError(
            f"reward 'ocr': {' or '.join(wanted)} is not installed. Run {INSTALL}, or set `engine: module:function`."
        )
    return _ENGINES[present[0]]


def _rapidocr() -> Callable[[Any], str]:
    import numpy as np
    from rapidocr import RapidOCR

    engine = RapidOCR(params={"Global.log_level": "warning"})

    def read(image: Any) -> str:
        # The package reads arrays as BGR.
        return " ".join(engine(np.asarray(image.convert("RGB"))[:, :, ::-1]).txts or ())

    return read


def _easyocr() -> Callable[[Any], str]:
    import easyocr
    import numpy as np

    # On the CPU: it wraps its networks in DataParallel over all GPUs, and fails on every rank but the first
    # (JaidedAI/EasyOCR#1456).
    reader = easyocr.Reader(["en"], gpu=False, verbose=False)
    return lambda image: " ".join(reader.readtext(np.asarray(image.convert("RGB")), detail=0))


_ENGINES: dict[str, Callable[[], Callable[[Any], str]]] = {"rapidocr": _rapidocr, "easyocr": _easyocr}
