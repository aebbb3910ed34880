"""Rollouts as values: settings, rows, random streams, assembly of completions, pictures, replay."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence

from .modeling import JanusForInterleavedGeneration


@dataclass(frozen=True)
class SamplingSettings:
    """What a rollout samples.

    Attributes:
        task: `t2i` or `i2t`.
        max_text_length: most text tokens: reasoning before the image (`t2i`, 0: image at once) or answer (`i2t`).
        guidance_scale: w of `u + w (c - u)` on image logits, >= 1; at 1 the unconditional stream is not run.
        temperature, image_temperature: of text and of image codes.
        logp_guidance: which log-probs of the codes are returned: `guided` (as sampled) or `conditional`.
        greedy: take the likeliest id instead of sampling.
        batch_size: rows at a time, which bounds memory; all if None.
        images_per_reasoning: so many rows after one another share a prompt and one sampled reasoning (`t2i`).
    """

    task: str = "t2i"
    max_text_length: int = 0
    guidance_scale: float = 1.0
    temperature: float = 1.0
    image_temperature: float = 1.0
    logp_guidance: str = "guided"
    greedy: bool = False
    batch_size: int | None = None
    images_per_reasoning: int = 1


@dataclass
class Rollout:
    """Rows of a rollout, as lists because their lengths differ.

    Attributes:
        prompt_ids: ids of each prompt, without padding.
        completion_ids: joint ids: text, `<begin_of_image>`, codes, `<end_of_image>`, eos (`t2i`) or text (`i2t`).
        logprobs: log-probs of the sampled ids, 0 where `env_mask` is 0.
        env_mask: 1 where the id was sampled, 0 where it was forced.
        images: the decoded pictures (`t2i`), else empty.
    """

    prompt_ids: list[list[int]] = field(default_factory=list)
    completion_ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    env_mask: list[list[int]] = field(default_factory=list)
    images: list[Image.Image] = field(default_factory=list)

    def extend(self, other: "Rollout") -> None:
        """Append the rows of `other`."""
        for name, rows in vars(self).items():
            rows.extend(getattr(other, name))


def row_seed(*parts: int | str) -> int:
    """A 63-bit seed from what identifies a row, e.g. `row_seed(seed, "train", step, row)`; equal on all machines."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def row_uniforms(seeds: list[int], length: int) -> torch.Tensor:
    """One uniform number in [0, 1) per row and step, `[len(seeds), length]`, float32 on CPU, drawn ahead."""
    rows = [torch.rand(length, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows) if rows else torch.empty(0, length)


def check_blocks(prompts: list, settings: SamplingSettings) -> None:
    """Refuse rows that cannot share reasonings as `images_per_reasoning` says.

    Raises:
        ValueError: if the rows, or the rows at a time, are no whole blocks, or a block has different prompts.
    """
    block = settings.images_per_reasoning
    if block == 1:
        return
    sizes = {"rows": len(prompts), "batch_size": settings.batch_size or len(prompts)}
    for name, size in sizes.items():
        if size % block:
            raise ValueError(f"{name} = {size} must be a multiple of images_per_reasoning = {block}.")
    if any(prompts[i] != prompts[i - i % block] for i in range(len(prompts))):
        raise ValueError(f"images_per_reasoning = {block}: so many prompts after one another must be the same.")


def check_finite(result: Rollout, any_rank: Callable[[bool], bool] = bool) -> None:
    """Refuse a rollout whose weights or activations overflowed; collective where `any_rank` is.

    Raises:
        FloatingPointError: with the rows of this rank, if a log-prob is not finite on any rank.
    """
    rows = [row for row, logps in enumerate(result.logprobs) if not all(map(math.isfinite, logps))]
    if any_rank(bool(rows)):
        where = f"rows {rows[:5]} of {len(result.logprobs)}" if rows else "rows of another rank"
        raise FloatingPointError(
            f"The rollout has non-finite log-probabilities ({where}): weights or activations overflowed; lower "
            "learning_rate, or go back to an earlier checkpoint."
        )


def repeated(rows: list, times: int) -> list:
    """Every row `times` times, after one another."""
    return [row for row in rows for _ in range(times)]


def answers(prompts: list[list[int]], text: tuple) -> Rollout:
    """Rows of text alone; `text` holds padded ids, padded log-probs and the number of ids of each row."""
    ids, logps, counts = text
    return Rollout(
        prompt_ids=prompts,
        completion_ids=[row[:count] for row, count in zip(ids, counts, strict=True)],
        logprobs=[row[:count] for row, count in zip(logps, counts, strict=True)],
        env_mask=[[1] * count for count in counts],
    )


def interleave(
    model: JanusForInterleavedGeneration,
    prompts: list[list[int]],
    text: tuple,
    codes: torch.LongTensor,
    code_logps: torch.Tensor,
    decode: Callable[[torch.LongTensor], list[Image.Image]] | None = None,
) -> Rollout:
    """Rows of text and codes; `<begin_of_image>` where it was not sampled, `<end_of_image>` and eos are forced.

    Args:
        text: padded ids, padded log-probs and the number of ids of each row.
        codes, code_logps: `[B, N]`.
        decode: turns the codes into pictures; none are made if None.
    """
    special, result = model.special_ids, Rollout(prompt_ids=prompts)
    if decode is not None:
        result.images = decode(codes)
    end = [i for i in (special.end_of_image, special.eos[0]) if i is not None]
    joint = (codes + model.vocab_size).tolist()
    for ids, logps, count, row, row_logps in zip(*text, joint, code_logps.tolist(), strict=True):
        opened = count > 0 and ids[count - 1] == special.begin_of_image
        forced = [] if opened else [special.begin_of_image]
        result.completion_ids.append(ids[:count] + forced + row + end)
        result.logprobs.append(logps[:count] + [0.0] * len(forced) + row_logps + [0.0] * len(end))
        result.env_mask.append([1] * count + [0] * len(forced) + [1] * len(row) + [0] * len(end))
    return result


def text_is_cut(ids: list[int], env_mask: list[int], model: JanusForInterleavedGeneration) -> bool:
    """Whether the text of a completion used up its budget: an answer without eos, or a reasoning that was cut off.

    A reasoning ends by itself where eos or `<begin_of_image>` was sampled; a completion without reasoning has no text
    to cut.
    """
    special = model.special_ids
    opens = next((i - 1 for i, token in enumerate(ids) if token >= model.vocab_size), None)
    if opens is None:
        return not ids or ids[-1] not in (*special.eos, special.pad)  # TRL's rule
    return opens > 0 and not env_mask[opens] and ids[opens - 1] not in special.eos


@torch.no_grad()
def score_rollout(
    model: JanusForInterleavedGeneration, rows: Rollout, settings: SamplingSettings
) -> list[torch.Tensor]:
    """The replay of a text-only-prompt rollout: log-probs of each completion, `[len(completion)]` per row."""
    lengths = [len(ids) for ids in rows.completion_ids]
    device = model.lm_head.weight.device
    ids = [torch.tensor(p + c, device=device) for p, c in zip(rows.prompt_ids, rows.completion_ids, strict=True)]
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    ids = pad_sequence(ids, batch_first=True, padding_value=model.special_ids.pad)
    scores = model(
        input_ids=ids,
        attention_mask=mask,
        labels=ids.masked_fill(mask == 0, -100),
        fused_lm_head=True,
        guidance_scale=settings.guidance_scale,
        temperature=settings.temperature,
        image_temperature=settings.image_temperature,
        logp_guidance=settings.logp_guidance,
    ).log_probs
    ends = [len(p) + n - 1 for p, n in zip(rows.prompt_ids, lengths, strict=True)]
    return [row[end - n : end] for row, end, n in zip(scores, ends, lengths, strict=True)]
