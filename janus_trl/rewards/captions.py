"""The caption that a picture is scored against, and what is said about captions before training."""

import logging
import unicodedata
from collections.abc import Sequence
from typing import Any, Literal

from janus_trl.rewards.calling import completion_text

logger = logging.getLogger(__name__)

# `both` joins them as T2I-R1 (arXiv:2505.00703) prompts its picture: "{prompt}. {reasoning}".
RewardPrompt = Literal["prompt", "reasoning", "both"]


def captions_of(prompts: Sequence, completions: Sequence | None, reward_prompt: RewardPrompt) -> list[str]:
    """One caption per row: the user's text, the text that the model wrote before the picture, or both.

    Args:
        prompts: The user's texts, without template (as strings or as messages, whose last one counts).
        completions: What the model wrote; needed unless `reward_prompt` is `prompt`.
        reward_prompt: `prompt`, `reasoning` or `both`.
    """
    asked = [prompt if isinstance(prompt, str) else completion_text(prompt[-1:]) for prompt in prompts]
    if reward_prompt == "prompt":
        return asked
    if completions is None:
        raise ValueError(f"reward_prompt is '{reward_prompt}', which needs the completions; pass `completions`.")
    written = [completion_text(completion).strip() for completion in completions]
    if reward_prompt == "reasoning":
        return written
    return [f"{a.rstrip(' .')}. {w}" if w else a for a, w in zip(asked, written, strict=True)]


def check_rows(dataset: Any) -> None:
    """Warn about captions outside the Latin script: the text towers were trained on English."""
    prompts = [str(prompt) for prompt in dataset["prompt"]]
    foreign = sum(any(c.isalpha() and not unicodedata.name(c, "").startswith("LATIN") for c in p) for p in prompts)
    if foreign:
        logger.warning(
            "%.1f %% of the prompts (%d of %d) are not in Latin script; rewards that compare picture and caption with "
            "CLIP (pickscore, hps_v2, clip_score) were trained on English, and their scores are noise for them.",
            100 * foreign / len(prompts),
            foreign,
            len(prompts),
        )
