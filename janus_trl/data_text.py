"""Control strings in users' texts: `<begin_of_image>` in a prompt must stay text, and not become the control token."""

import re
from collections.abc import Sequence
from functools import lru_cache

import datasets
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

TEXT_COLUMNS = ("prompt", "reasoning", "completion")


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The strings that the tokenizer reads as control tokens, with their ids.

    These are its special tokens, and added tokens in angle brackets (role marks such as `<|User|>` are not always
    flagged as special). Other added tokens, in DeepSeek's tokenizers letters such as "ö", are plain text.
    """
    added = tokenizer.added_tokens_decoder
    names = {token.content for token in added.values() if token.special or re.fullmatch(r"<.+>", token.content)}
    names |= set(tokenizer.all_special_tokens)
    return {name: tokenizer.convert_tokens_to_ids(name) for name in sorted(names) if len(name) > 1}


def neutralise(text: str, control: Sequence[str]) -> str:
    """`text` with a space behind the first character of each control string: `< begin_of_image>`."""
    pattern = _pattern(tuple(control))
    while control and pattern.search(text):
        text = pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
    return text


@lru_cache(maxsize=8)
def _pattern(control: tuple[str, ...]) -> re.Pattern:
    return re.compile("|".join(re.escape(name) for name in sorted(control, key=len, reverse=True)))


def count_control_strings(dataset: datasets.Dataset, control: Sequence[str]) -> int:
    """Rows of which a text column holds a control string; goes through all rows in batches."""
    pattern = "|".join(rf"\Q{name}\E" for name in control)
    columns = [name for name in TEXT_COLUMNS if dataset.features.get(name) == datasets.Value("string")]
    count = 0
    for table in dataset.select_columns(columns).with_format("arrow").iter(10_000) if columns and control else ():
        found = None
        for name in columns:
            here = pc.fill_null(pc.match_substring_regex(table[name], pattern), False)
            found = here if found is None else pc.or_(found, here)
        count += pc.sum(found).as_py() or 0
    return count
