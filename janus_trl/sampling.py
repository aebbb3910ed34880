"""Rollout: reasoning, then image codes with guidance; or a text answer about pictures.

Each row samples on its own random stream (`row_uniforms`), so a rollout does not depend on the batch it is part of,
on the number of processes or on chunking. Log-probs are those of the distribution that was sampled and equal the
replay of `JanusForInterleavedGeneration.forward` up to rounding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from PIL import Image
from tqdm.auto import tqdm
from transformers import DynamicCache, ProcessorMixin

from .engine import DecodeEngine
from .engine_sampling import EngineChunk
from .modeling import FORBIDDEN_LOGIT, JanusForInterleavedGeneration, SpecialIds, guide
from .picture_decoder import PictureDecoder
from .prompts import encode_prompts
from .rollout_memory import free_bytes, out_of_memory_message
from .rollouts import (
    Rollout,
    SamplingSettings,
    answers,
    check_blocks,
    check_finite,
    interleave,
    repeated,
    row_seed,
    row_uniforms,
    score_rollout,
)
from .sampling_kernels import sample_ids

__all__ = ["Rollout", "SamplingSettings", "rollout", "row_seed", "row_uniforms", "score_rollout"]


@torch.no_grad()
def rollout(
    model: JanusForInterleavedGeneration,
    processor: ProcessorMixin,
    prompts: list,
    settings: SamplingSettings,
    seeds: list[int],
    images: list[list[Image.Image]] | None = None,
    any_rank: Callable[[bool], bool] = bool,
    any_rank_fails: Callable[[bool], bool] | None = None,
    progress: bool = False,
    engine: DecodeEngine | None = None,
    decoder: PictureDecoder | None = None,
    decode: bool = True,
    capacity: int = 0,
) -> Rollout:
    """Sample one completion per prompt.

    Args:
        model: the unwrapped model; under ZeRO-3 its weights are gathered, or `any_rank` agrees on the stops.
        prompts: user texts or conversations; see `encode_prompts`.
        seeds: one seed per row, see `row_seed`.
        any_rank: whether a flag is true on any rank; needed where every forward is a collective.
        any_rank_fails: the same for the one check at the end, so that all ranks raise together; `any_rank` if None.
        progress: show a bar over the tokens.
        engine: decodes with fixed buffers and captured steps, its weights up to date; without one, plainly.
        decoder: turns codes into pictures; by default the model's own, in the precision of its weights.
        decode: make pictures at all (`t2i`).
        capacity: rows that the engine keeps room for at least. It steps over all of them, and the roundings of a
            product may depend on their number.

    Returns:
        A `Rollout` with one row per prompt, in order.

    Raises:
        FloatingPointError: on all ranks, if a log-prob is NaN or infinite on any.
        torch.OutOfMemoryError: saying which `rollout_batch_size` was used and which would fit.
        ValueError: if rows that are to share a reasoning do not come in whole blocks of one prompt.
    """
    check_blocks(prompts, settings)
    result, size = Rollout(), min(settings.batch_size or len(prompts), len(prompts)) or 1
    draws = settings.task == "t2i"
    decode = (decoder or PictureDecoder(model)) if decode and draws else None
    failure = None
    with _evaluating(model):
        for start in range(0, len(prompts), size):
            rows = slice(start, start + size)
            pictures = images[rows] if images else None
            try:
                if engine is not None:
                    chunk = EngineChunk(engine, model, settings, seeds[rows], any_rank, progress, decode)
                    result.extend(chunk.run(processor, prompts[rows], pictures, max(size, capacity)))
                else:
                    sampler = _Sampler(model, settings, seeds[rows], any_rank, progress, decode)
                    # Rows that share a reasoning are one row until the image.
                    first = slice(None, None, settings.images_per_reasoning)
                    pictures = pictures[first] if pictures else None
                    result.extend(sampler.run(encode_prompts(processor, prompts[rows][first], pictures, draws)))
            except torch.OutOfMemoryError as error:
                failure = error.with_traceback(None)  # the frames hold the tensors that did not fit
                break
    if failure is not None:
        if engine is not None:
            engine.release()
        raise torch.OutOfMemoryError(_out_of_memory(model, processor, prompts, images, settings)) from failure
    check_finite(result, any_rank_fails or any_rank)
    return result


def _out_of_memory(model, processor, prompts: list, images: list | None, settings: SamplingSettings) -> str:
    weight = model.lm_head.weight
    longest = encode_prompts(processor, prompts, images, settings.task == "t2i")["input_ids"].shape[1]
    free = free_bytes(weight.device)
    return out_of_memory_message(model.config, settings, len(prompts), longest, free, weight.element_size())


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode (no dropout while sampling), restored afterwards."""
    training = model.training
    if training:  # else the walk over all modules would cost some ms
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()


class _Sampler:
    """One chunk of rows. The slots of the cache are the columns of `self.mask`; a row that ended leaves holes."""

    def __init__(self, model, settings: SamplingSettings, seeds: list[int], any_rank, progress: bool, decode):
        self.model, self.settings, self.any_rank = model, settings, any_rank
        self.progress, self.decode = progress, decode
        self.special: SpecialIds = model.special_ids
        self.device = model.lm_head.weight.device
        self.draws = settings.task == "t2i"
        # Text and image each have their own stretch of the row's stream: where the text stops does not move the codes.
        length = settings.max_text_length
        uniforms = row_uniforms(seeds, length + (model.num_image_codes if self.draws else 0)).to(self.device)
        self.images_per_reasoning = settings.images_per_reasoning
        self.text_uniforms = uniforms[:: self.images_per_reasoning, :length]
        self.image_uniforms = uniforms[:, length:]

    def run(self, batch: dict) -> Rollout:
        """Prefill, text, and for `t2i` the codes and their pictures."""
        input_ids, self.mask = batch["input_ids"].to(self.device), batch["attention_mask"].to(self.device)
        self.fed = input_ids  # ids in the slots of the cache, [B, slots]
        self.lengths = self.mask.sum(-1)  # positions used by each row, [B]
        self.cache = DynamicCache()
        pixel_values = batch["pixel_values"]
        if pixel_values is not None:
            pixel_values = pixel_values.to(self.device)
        embeds = (
            self.model.embed_joint_ids(input_ids) if self.draws else self.model.embed_prompts(input_ids, pixel_values)
        )
        position_ids = (self.mask.cumsum(-1) - 1).clamp(min=0)
        last = self._forward(embeds, position_ids, self.cache)  # [B, H]
        text = self._sample_text(last)
        prompts = [ids[keep.bool()].tolist() for ids, keep in zip(input_ids, batch["attention_mask"], strict=True)]
        if not self.draws:
            return answers(prompts, text)
        codes, code_logps = self._sample_codes()
        prompts, *text = (repeated(rows, self.images_per_reasoning) for rows in (prompts, *text))
        return interleave(self.model, prompts, tuple(text), codes, code_logps, self.decode)

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
        guided = self.settings.guidance_scale != 1.0
        if guided:
            self._prefill_unconditional()
        self._repeat_rows(self.images_per_reasoning)
        rows = len(self.fed)
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

    def _repeat_rows(self, times: int) -> None:
        """From here on each row is `times` rows with the same past: `B` or `2B` rows of the cache, `B` of the rest."""
        if times == 1:
            return
        for layer in self.cache.layers:
            layer.keys, layer.values = (x.repeat_interleave(times, 0) for x in (layer.keys, layer.values))
        self.mask, self.fed, self.lengths = (x.repeat_interleave(times, 0) for x in (self.mask, self.fed, self.lengths))

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
