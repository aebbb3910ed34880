"""Rollout: reasoning, then image codes with guidance; or a text answer about pictures.

Each row samples on its own random stream (`row_uniforms`), so a rollout does not depend on the batch it is part of,
on the number of processes or on chunking. Log-probs are those of the distribution that was sampled and equal the
replay of `JanusForInterleavedGeneration.forward` up to rounding.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from PIL import Image
from tqdm.auto import tqdm
from transformers import DynamicCache, ProcessorMixin

from .modeling import FORBIDDEN_LOGIT, JanusForInterleavedGeneration, SpecialIds, guide


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
    """

    task: str = "t2i"
    max_text_length: int = 0
    guidance_scale: float = 1.0
    temperature: float = 1.0
    image_temperature: float = 1.0
    logp_guidance: str = "guided"
    greedy: bool = False
    batch_size: int | None = None


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


def sample_ids(log_probs: torch.Tensor, uniforms: torch.Tensor) -> torch.LongTensor:
    """Inverse-CDF sampling: `[B, K]` log-probs (float32) and `[B]` uniforms -> `[B]` ids.

    The target is kept below the total, so that an id of probability 0 is never chosen whatever the rounding.
    """
    cdf = log_probs.exp().cumsum(-1)
    total = cdf[:, -1]
    target = torch.minimum(uniforms.to(cdf) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target.unsqueeze(-1), right=True).squeeze(-1)


def encode_prompts(processor: ProcessorMixin, prompts: list, images: list[list[Image.Image]] | None = None) -> dict:
    """Chat template, left padding and input pictures -> `input_ids`, `attention_mask` `[B, P]`, `pixel_values`.

    Args:
        prompts: user texts, or conversations in TRL's form (their pictures are taken from the messages).
        images: pictures of each row, for prompts that are texts.
    """
    conversations = [_conversation(p, images[i] if images else []) for i, p in enumerate(prompts)]
    texts = [processor.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in conversations]
    pictures = [[part["image"] for m in c for part in m["content"] if part["type"] == "image"] for c in conversations]
    has_pictures = any(pictures)
    encoded = processor(
        text=texts, images=pictures if has_pictures else None, padding=True, padding_side="left", return_tensors="pt"
    )
    return {
        "input_ids": encoded["input_ids"],
        "attention_mask": encoded["attention_mask"],
        "pixel_values": encoded["pixel_values"] if has_pictures else None,
        "num_images": [len(row) for row in pictures],
    }


def _conversation(prompt: str | list[dict], images: list[Image.Image]) -> list[dict]:
    """A conversation whose contents are lists of typed parts, in which None-valued keys are dropped."""
    if isinstance(prompt, str):
        parts = [{"type": "image", "image": image} for image in images]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]
    messages = []
    for message in prompt:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [{key: value for key, value in part.items() if value is not None} for part in parts]
        messages.append({"role": message["role"], "content": parts})
    return messages


@torch.no_grad()
def rollout(
    model: JanusForInterleavedGeneration,
    processor: ProcessorMixin,
    prompts: list,
    settings: SamplingSettings,
    seeds: list[int],
    images: list[list[Image.Image]] | None = None,
    any_rank: Callable[[bool], bool] = bool,
    progress: bool = False,
) -> Rollout:
    """Sample one completion per prompt.

    Args:
        model: the unwrapped model; under ZeRO-3 its weights are gathered, or `any_rank` agrees on the stops.
        prompts: user texts or conversations; see `encode_prompts`.
        seeds: one seed per row, see `row_seed`.
        any_rank: whether a flag is true on any rank; needed where every forward is a collective.
        progress: show a bar over the tokens.

    Returns:
        A `Rollout` with one row per prompt, in order.
    """
    result, size = Rollout(), settings.batch_size or max(len(prompts), 1)
    with _evaluating(model):
        for start in range(0, len(prompts), size):
            rows = slice(start, start + size)
            batch = encode_prompts(processor, prompts[rows], images[rows] if images else None)
            sampler = _Sampler(model, settings, seeds[rows], any_rank, progress)
            result.extend(sampler.run(batch))
    return result


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode (no dropout while sampling), restored afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class _Sampler:
    """One chunk of rows. The slots of the cache are the columns of `self.mask`; a row that ended leaves holes."""

    def __init__(self, model, settings: SamplingSettings, seeds: list[int], any_rank, progress: bool):
        self.model, self.settings, self.any_rank, self.progress = model, settings, any_rank, progress
        self.special: SpecialIds = model.special_ids
        self.device = model.lm_head.weight.device
        self.draws = settings.task == "t2i"
        # Text and image each have their own stretch of the row's stream: where the text stops does not move the codes.
        length = settings.max_text_length
        uniforms = row_uniforms(seeds, length + (model.num_image_codes if self.draws else 0)).to(self.device)
        self.text_uniforms, self.image_uniforms = uniforms[:, :length], uniforms[:, length:]

    def run(self, batch: dict) -> Rollout:
        """Prefill, text, and for `t2i` the codes and their pictures."""
        input_ids, self.mask = batch["input_ids"].to(self.device), batch["attention_mask"].to(self.device)
        self.fed = input_ids  # ids in the slots of the cache, [B, slots]
        self.lengths = self.mask.sum(-1)  # positions used by each row, [B]
        self.cache = DynamicCache()
        pixel_values = batch["pixel_values"]
        if pixel_values is not None:
            pixel_values = pixel_values.to(self.device)
        embeds = self.model._embed_with_images(input_ids, pixel_values, False) if not self.draws else None
        if embeds is None:
            embeds = self.model.embed_joint_ids(input_ids)
        position_ids = (self.mask.cumsum(-1) - 1).clamp(min=0)
        last = self._forward(embeds, position_ids, self.cache)  # [B, H]
        text = self._sample_text(last)
        prompts = [ids[keep.bool()].tolist() for ids, keep in zip(input_ids, batch["attention_mask"], strict=True)]
        if not self.draws:
            ids, logps, counts = text
            rows = [slice(count) for count in counts]
            return Rollout(
                prompt_ids=prompts,
                completion_ids=[row[keep] for row, keep in zip(ids, rows, strict=True)],
                logprobs=[row[keep] for row, keep in zip(logps, rows, strict=True)],
                env_mask=[[1] * count for count in counts],
            )
        codes, code_logps = self._sample_codes()
        return self._interleave(prompts, text, codes, code_logps)

    def _forward(self, embeds: torch.Tensor, position_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Append `embeds` `[B, T, H]` to the cache; hidden state of the last one, `[B, H]`."""
        mask = self.mask if len(embeds) == len(self.mask) else self.mask.repeat(2, 1)
        out = self.model.model.language_model(
            inputs_embeds=embeds, attention_mask=mask, position_ids=position_ids, cache=cache, use_cache=True
        )
        return out.last_hidden_state[:, -1]

    def _sample_text(self, last: torch.Tensor) -> tuple[list[list[int]], list[list[float]], list[int]]:
        """Text ids, their log-probs (both padded) and the number of ids of each row.

        A sampled `<begin_of_image>` is not fed here: the image stage feeds it for all rows at once. A sampled eos is
        fed for `t2i`, where the sequence goes on behind it.
        """
        rows = len(last)
        alive = torch.ones(rows, dtype=torch.bool, device=self.device)
        counts = torch.zeros(rows, dtype=torch.long, device=self.device)
        bias = torch.zeros(self.model.vocab_size, device=self.device)
        bias[self.special.forbidden_in_text(self.draws)] = FORBIDDEN_LOGIT
        eos = torch.tensor(self.special.eos, device=self.device)
        ids, logps = [], []
        for step in tqdm(range(self.settings.max_text_length), desc="text", leave=False, disable=not self.progress):
            logits = (self.model.lm_head(last).float() + bias) / self.settings.temperature
            log_probs = logits.log_softmax(-1)
            token = log_probs.argmax(-1) if self.settings.greedy else sample_ids(log_probs, self.text_uniforms[:, step])
            logp = log_probs.gather(-1, token.unsqueeze(-1)).squeeze(-1)
            ids.append(token.masked_fill(~alive, self.special.pad))
            logps.append(logp.masked_fill(~alive, 0))
            counts += alive
            ends = torch.isin(token, eos)
            opens_image = (token == self.special.begin_of_image) if self.draws else ends
            fed = alive & ~opens_image
            alive = fed & ~ends
            if not self.any_rank(bool(fed.any())):
                break
            self._append(ids[-1], fed)
            last = self._forward(
                self.model.embed_joint_ids(ids[-1].unsqueeze(1)), (self.lengths - 1).unsqueeze(1), self.cache
            )
            if not self.any_rank(bool(alive.any())):
                break
        if not ids:
            return [[] for _ in range(rows)], [[] for _ in range(rows)], [0] * rows
        return torch.stack(ids, 1).tolist(), torch.stack(logps, 1).tolist(), counts.tolist()

    def _append(self, ids: torch.LongTensor, fed: torch.Tensor) -> None:
        """One more slot: `ids` `[B]` where `fed`, a masked hole elsewhere."""
        self.mask = torch.cat([self.mask, fed.long().unsqueeze(1)], 1)
        self.fed = torch.cat([self.fed, ids.unsqueeze(1)], 1)
        self.lengths = self.lengths + fed

    def _sample_codes(self) -> tuple[torch.LongTensor, torch.Tensor]:
        """Codes and their log-probs, `[B, N]` each, on the cache of the text (no second prefill of that stream)."""
        guided, rows = self.settings.guidance_scale != 1.0, len(self.fed)
        if guided:
            self._prefill_unconditional()
        everyone = torch.ones(rows, dtype=torch.bool, device=self.device)
        token = torch.full((rows,), self.special.begin_of_image, device=self.device)
        codes, logps = [], []
        total = self.model.num_image_codes
        for step in tqdm(range(total), desc="image codes", leave=False, disable=not self.progress):
            self._append(token, everyone)
            embeds = self.model.embed_joint_ids(token.unsqueeze(1))
            positions = (self.lengths - 1).unsqueeze(1)
            if guided:
                embeds, positions = embeds.repeat(2, 1, 1), positions.repeat(2, 1)
            hidden = self.model.image_head_hidden(self._forward(embeds, positions, self.cache))  # [B or 2B, D]
            code, logp = self._next_code(hidden, guided, step)
            codes.append(code)
            logps.append(logp)
            token = code + self.model.vocab_size
        return torch.stack(codes, 1), torch.stack(logps, 1)

    def _next_code(self, hidden: torch.Tensor, guided: bool, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        project, temperature = self.model.model.generation_head.vision_head, self.settings.image_temperature
        conditional = mixed = hidden
        if guided:
            conditional, unconditional = hidden.chunk(2)
            mixed = guide(conditional, unconditional, self.settings.guidance_scale)
        log_probs = (project(mixed).float() / temperature).log_softmax(-1)
        code = log_probs.argmax(-1) if self.settings.greedy else sample_ids(log_probs, self.image_uniforms[:, step])
        if guided and self.settings.logp_guidance == "conditional":
            log_probs = (project(conditional).float() / temperature).log_softmax(-1)
        return code, log_probs.gather(-1, code.unsqueeze(-1)).squeeze(-1)

    def _prefill_unconditional(self) -> None:
        """Run the unconditional stream over the same slots and put its cache under the conditional one: `2B` rows."""
        cache = DynamicCache()
        ids = self.model.unconditional_ids(self.fed)
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        self._forward(self.model.embed_joint_ids(ids), positions, cache)
        for ours, other in zip(self.cache.layers, cache.layers, strict=True):
            ours.keys = torch.cat([ours.keys, other.keys])
            ours.values = torch.cat([ours.values, other.values])

    def _interleave(self, prompts: list, text: tuple, codes: torch.LongTensor, code_logps: torch.Tensor) -> Rollout:
        """Joint completions; `<begin_of_image>` where it was not sampled, `<end_of_image>` and eos are forced."""
        special, result = self.special, Rollout(prompt_ids=prompts, images=decode_codes(self.model, codes))
        end = [i for i in (special.end_of_image, special.eos[0]) if i is not None]
        joint = (codes + self.model.vocab_size).tolist()
        for ids, logps, count, row, row_logps in zip(*text, joint, code_logps.tolist(), strict=True):
            opened = count > 0 and ids[count - 1] == special.begin_of_image
            forced = [] if opened else [special.begin_of_image]
            result.completion_ids.append(ids[:count] + forced + row + end)
            result.logprobs.append(logps[:count] + [0.0] * len(forced) + row_logps + [0.0] * len(end))
            result.env_mask.append([1] * count + [0] * len(forced) + [1] * len(row) + [0] * len(end))
        return result


def decode_codes(model: JanusForInterleavedGeneration, codes: torch.LongTensor) -> list[Image.Image]:
    """Image codes `[B, N]` -> RGB pictures of the size in the config, values clamped to -1 … 1 and rounded."""
    pixels = model.decode_image_tokens(codes).float().clamp(-1, 1)  # [B, S, S, 3]
    pixels = ((pixels + 1) * 127.5).round().to(torch.uint8).cpu().numpy()
    return [Image.fromarray(picture) for picture in pixels]
