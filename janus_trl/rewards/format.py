"""Format reward: the completion carries its tagged blocks, each once and in order, and has a length within limits."""

import re
from collections.abc import Sequence
from typing import Any

from janus_trl.rewards.calling import completion_text


class FormatReward:
    """1.0 if the completion has every `<tag>...</tag>` exactly once, in order and with something inside, else 0.0.

    Args:
        tag: Name of the tag, without brackets.
        tags: Instead of `tag`, several names in their order: `[think, answer]`.
        max_length: Longest completion allowed, in characters; None for no limit.
        min_length: Shortest completion allowed, in characters.
        nothing_else: Whether text outside of the blocks is refused; spaces and line ends are not text.

    Raises:
        ValueError: No tag, one that is not a plain name or is given twice, a limit below 1, limits that exclude all.
    """

    def __init__(
        self,
        tag: str = "answer",
        max_length: int | None = None,
        tags: list[str] | None = None,
        min_length: int = 0,
        nothing_else: bool = False,
    ):
        tags = [tag] if tags is None else tags
        _check_tags(tags)
        for name, value in (("max_length", max_length), ("min_length", min_length or 1)):
            if value is not None and value < 1:
                raise ValueError(
                    f"reward 'format': {name} is {value}; it must be at least 1 character, or "
                    f"{'null' if name == 'max_length' else '0'}."
                )
        if max_length is not None and min_length > max_length:
            raise ValueError(f"reward 'format': min_length {min_length} is more than max_length {max_length}.")
        self._tags, self._nothing_else = tags, nothing_else
        self._shortest, self._longest = min_length, max_length

    def __call__(self, completions: list, **columns: Any) -> list[float]:
        """One score per completion (a string or TRL's message form)."""
        return [self._score(completion_text(completion)) for completion in completions]

    def _score(self, text: str) -> float:
        if len(text) < self._shortest or (self._longest is not None and len(text) > self._longest):
            return 0.0
        position, outside = 0, ""
        for tag in self._tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if text.count(opening) != 1 or text.count(closing) != 1:
                return 0.0
            start, end = text.index(opening), text.index(closing)
            # Each block after the one before: nested or crossing blocks are out of order.
            if start < position or not text[start + len(opening) : end].strip():
                return 0.0
            outside += text[position:start]
            position = end + len(closing)
        outside += text[position:]
        return 0.0 if self._nothing_else and outside.strip() else 1.0


def _check_tags(tags: Sequence[str]) -> None:
    for tag in tags:
        if not isinstance(tag, str) or not re.fullmatch(r"[A-Za-z_][\w-]*", tag):
            raise ValueError(f"reward 'format': tag is {tag!r}; give a plain name such as 'answer', without brackets.")
    if not tags or len(set(tags)) < len(tags):
        raise ValueError(f"reward 'format': tags is {list(tags)!r}; give one name or several different ones.")
