"""A chunk of rows on the decode engine: what `sampling` does plainly, with the prompts of a group prefilled once."""

import torch
from torch.nn.utils.rnn import pad_sequence

from .engine import DecodeEngine
from .modeling import JanusForInterleavedGeneration
from .picture_decoder import PictureDecoder
from .prompts import different_prompts, encode_prompts
from .rollouts import Rollout, SamplingSettings, answers, interleave, repeated, row_uniforms


class EngineChunk:
    """One chunk of rows on `engine`, whose weights are up to date."""

    def __init__(
        self,
        engine: DecodeEngine,
        model: JanusForInterleavedGeneration,
        settings: SamplingSettings,
        seeds: list[int],
        any_rank,
        progress: bool,
        decode: PictureDecoder | None,
    ):
        self.engine, self.model, self.settings, self.any_rank = engine, model, settings, any_rank
        self.progress, self.decode, self.draws = progress, decode, settings.task == "t2i"
        self.special, self.device = model.special_ids, model.lm_head.weight.device
        self.codes = model.num_image_codes if self.draws else 0
        # Text and image each have their own stretch of the row's stream, as in the plain path.
        self.uniforms = row_uniforms(seeds, settings.max_text_length + self.codes)

    def run(self, processor, prompts: list, images: list | None, capacity: int) -> Rollout:
        """Sample; `capacity` is the size of a whole chunk, for which buffers are made."""
        times = self.settings.images_per_reasoning
        prompts, images = prompts[::times], images[::times] if images else None
        different, where = different_prompts(prompts, images)
        pictures = [images[i] for i in different] if images else None
        batch = encode_prompts(processor, [prompts[i] for i in different], pictures, self.draws)
        encoded = zip(batch["input_ids"], batch["attention_mask"], strict=True)
        different = [ids[mask.bool()] for ids, mask in encoded]
        self._start(different, where, batch["pixel_values"], capacity)
        text = self._text(len(where))
        prompts = [different[i].tolist() for i in where]
        if not self.draws:
            return answers(prompts, text)
        if times > 1:
            self.engine.repeat_rows(len(prompts), times, self.uniforms)
            prompts, *text = (repeated(rows, times) for rows in (prompts, *text))
        return interleave(self.model, prompts, text, *self._image(prompts, text), self.decode)

    def _start(self, different: list[torch.Tensor], where: list[int], pixel_values, capacity: int) -> None:
        ids = pad_sequence(different, batch_first=True, padding_value=self.special.pad).to(self.device)  # [U, P]
        pixel_values = None if pixel_values is None else pixel_values.to(self.device)
        embeds = self.model.embed_joint_ids(ids) if self.draws else self.model.embed_prompts(ids, pixel_values)
        streams, steps = 2 if self._guided() else 1, self.uniforms.shape[1]
        self.engine.reserve(capacity, streams, ids.shape[1] + steps + 1, steps)
        self.engine.start(
            embeds,
            torch.tensor([len(row) for row in different], device=self.device),
            torch.tensor(where, device=self.device),
            self.uniforms[:: self.settings.images_per_reasoning],
            self.special,
            self.special.forbidden_in_text(self.draws),
            self.special.begin_of_image if self.draws else None,
        )

    def _guided(self) -> bool:
        return self.draws and self.settings.guidance_scale != 1.0

    def _text(self, count: int) -> tuple[list[list[int]], list[list[float]], list[int]]:
        settings, state, length = self.settings, self.engine.state, self.settings.max_text_length
        counts = self.engine.text(length, settings.greedy, settings.temperature, self.any_rank, self.progress)
        return state.ids[:count, :length].tolist(), state.logps[:count, :length].tolist(), counts[:count].tolist()

    def _image(self, prompts: list[list[int]], text: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        if self._guided():
            self._prefill_unconditional(prompts, text)
        opener = self.model.embed_joint_ids(torch.tensor([[self.special.begin_of_image]], device=self.device))
        first, state = self.settings.max_text_length, self.engine.state
        self.engine.image(opener[0, 0], first, self.codes, self.settings, self.progress)
        columns = slice(first, first + self.codes)
        return state.ids[: len(prompts), columns], state.logps[: len(prompts), columns]

    def _prefill_unconditional(self, prompts: list[list[int]], text: tuple) -> None:
        """Usually one row serves all, since each is bos and pads."""
        rows = []
        for prompt, ids, count in zip(prompts, text[0], text[2], strict=True):
            fed = [i for i in ids[:count] if i != self.special.begin_of_image]
            rows.append(self.model.unconditional_ids(torch.tensor(prompt + fed)))
        longest = max(rows, key=len)
        shared = all(torch.equal(row, longest[: len(row)]) for row in rows)
        ids = longest.unsqueeze(0) if shared else pad_sequence(rows, batch_first=True, padding_value=self.special.pad)
        where = torch.zeros(len(rows), dtype=torch.int64) if shared else torch.arange(len(rows))
        self.engine.unconditional(self.model.embed_joint_ids(ids.to(self.device)), where.to(self.device))
