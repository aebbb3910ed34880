"""Format reward: the completion carries one tagged block, and is not too long."""

import re
from typing import Any

from janus_trl.rewards.calling import completion_text


class FormatReward:
    """1.0 if the completion has exactly one `<tag>...</tag>` with something inside, else 0.0.

    Args:
        tag: Name of the tag, without brackets.
        max_length: Longest completion allowed, in characters; None for no limit.

    Raises:
        ValueError: A tag that is not a plain name, or a limit below 1.
    """

    def __init__(self, tag: str = "answer", max_length: int | None = None):
        if not re.fullmatch(r"[A-Za-z_][\w-]*", tag):
            raise ValueError(f"reward 'format': tag is {tag!r}; give a plain name such as 'answer', without brackets.")
        if max_length is not None and max_length < 1:
            raise ValueError(f"reward 'format': max_length is {max_length}; it must be at least 1 character, or null.")
        self._opening = f"<{tag}>"
        self._closing = f"</{tag}>"
        self._max_length = max_length

    def __call__(self, completions: list, **columns: Any) -> list[float]:
        """One score per completion (a string or TRL's message form)."""
        return [self._score(completion_text(completion)) for completion in completions]

    def _score(self, text: str) -> float:
        if self._max_length is not None and len(text) > self._max_length:
            return 0.0
        if text.count(self._opening) != 1 or text.count(self._closing) != 1:
            return 0.0
        start, end = text.index(self._opening) + len(self._opening), text.index(self._closing)
        return 1.0 if text[start:end].strip() else 0.0
