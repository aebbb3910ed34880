"""Joint ids: one integer sequence for text and image codes, on top of transformers' Janus.

Text ids are `0 … V-1` (V: the text vocabulary size); image code `c` is `V + c`. The modality of a position is then
`id >= V`, and nothing else has to travel beside the ids.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import JanusForConditionalGeneration, PreTrainedModel, ProcessorMixin
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import FusedCausalLMOutput, maybe_gather_lm_head_ctx

from .repeats import distinct_rows

# Vocabulary columns per projection tile of TRL's kernel (its rows are at most 4096). TRL's own 32768 would hold all
# 16,384 image codes of a row at once, in a buffer twice as wide as the codebook.
VOCABULARY_CHUNK = 8192
# Added to the logit of an id that must not be sampled. Finite, because the entropy multiplies logits by probabilities
# and 0 * -inf is NaN; far below any logit, so that the probability is exactly 0 in float32 and in bfloat16.
FORBIDDEN_LOGIT = -1e30


@dataclass(frozen=True)
class SpecialIds:
    """Ids with a role in the Janus protocol; `eos` holds every id that ends a text."""

    pad: int
    bos: int
    eos: tuple[int, ...]
    image_placeholder: int
    begin_of_image: int
    end_of_image: int | None

    def forbidden_in_text(self, draws: bool) -> list[int]:
        """Ids that are no text: never sampled as text, and left out of the softmax when a text is scored.

        Args:
            draws: whether the text may open an image (`t2i`), i.e. whether `<begin_of_image>` may be sampled.
        """
        ids = {self.pad, self.bos, self.image_placeholder, self.end_of_image} - {None, *self.eos}
        return sorted(ids if draws else ids | {self.begin_of_image})


def bind_special_ids(model: PreTrainedModel, processor: ProcessorMixin) -> None:
    """Write the tokenizer's special ids into the model's generation config, where the forward finds them.

    Stock checkpoints name `<begin_of_image>` there already and leave `<end_of_image>` to the tokenizer.

    Raises:
        ValueError: if tokenizer and checkpoint disagree on an id: they do not belong together.
    """
    tokenizer, config = processor.tokenizer, model.generation_config
    tokens = {"boi_token_id": processor.image_start_token, "eoi_token_id": processor.image_end_token}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    known = dict(config.generation_kwargs or {}) if hasattr(config, "generation_kwargs") else {}
    placeholder = tokenizer.convert_tokens_to_ids(processor.image_token)
    pairs = [(f"generation_kwargs.{name}", known.get(name, value), tokens[name], value) for name, value in ids.items()]
    pairs.append(("image_token_id", model.config.image_token_id, processor.image_token, placeholder))
    for field, in_model, token, in_tokenizer in pairs:
        if in_model != in_tokenizer:
            raise ValueError(
                f"The checkpoint says {field} = {in_model}, but its tokenizer maps {token!r} to {in_tokenizer}. "
                "Load model and processor from the same folder or Hub id."
            )
    config.generation_kwargs = {**known, **ids}
    config.pad_token_id = tokenizer.pad_token_id
    config.bos_token_id = tokenizer.bos_token_id
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    config.eos_token_id = list(dict.fromkeys([tokenizer.eos_token_id, *(e for e in eos if e is not None)]))


def guide(conditional: torch.Tensor, unconditional: torch.Tensor, scale: float) -> torch.Tensor:
    """Classifier-free guidance `u + w (c - u)` on hidden states before the affine layer of the image head.

    The last layer is affine, so this equals guidance on the logits, with one projection for both streams. In float32,
    since `scale` multiplies the rounding of the difference.
    """
    c, u = conditional.float(), unconditional.float()
    return (u + scale * (c - u)).to(conditional.dtype)


class JanusForInterleavedGeneration(JanusForConditionalGeneration):
    """Stock Janus that also scores joint ids: `forward(..., labels=…, fused_lm_head=True)`.

    It has no parameter of its own, and `save_pretrained` writes a stock `JanusForConditionalGeneration` folder.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As in transformers, but a missing or unexpected weight is an error (peft#1579: a warning that nobody reads).

        Raises:
            ValueError: naming the first keys that are missing or unexpected.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if keys := sorted(map(str, info.get(kind) or [])):
                raise ValueError(
                    f"{pretrained_model_name_or_path}: {len(keys)} {kind.replace('_', ' ')}, the first: {keys[:3]}. "
                    "The folder does not hold a whole Janus checkpoint; training would start from random weights."
                )
        # Under ZeRO-3 transformers keeps renamings that no key needed too, and saving would revert them: other names.
        if (conversions := getattr(model, "_weight_conversions", None)) is not None:
            model._weight_conversions = [conversion for conversion in conversions if conversion.was_used()]
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory, *args, is_main_process: bool = True, **kwargs):
        """Write a stock folder: plain `JanusForConditionalGeneration.from_pretrained` loads it."""
        super().save_pretrained(save_directory, *args, is_main_process=is_main_process, **kwargs)
        self.config.architectures = [JanusForConditionalGeneration.__name__]
        if is_main_process:
            self.config.save_pretrained(save_directory)

    @property
    def vocab_size(self) -> int:
        """V, the number of text ids; ids from V on are image codes."""
        return self.config.text_config.vocab_size

    @property
    def num_image_codes(self) -> int:
        """Image codes of one picture (576 in Janus-Pro)."""
        return self.model.vqmodel.quantize.quant_state_dims[0] * self.model.vqmodel.quantize.quant_state_dims[1]

    @property
    def special_ids(self) -> SpecialIds:
        """Special ids as the generation config has them (see `bind_special_ids`)."""
        generation = self.generation_config
        extra = getattr(generation, "generation_kwargs", None) or {}
        eos = generation.eos_token_id
        return SpecialIds(
            pad=generation.pad_token_id,
            bos=generation.bos_token_id,
            eos=tuple(eos) if isinstance(eos, list) else (eos,),
            image_placeholder=self.config.image_token_id,
            begin_of_image=extra.get("boi_token_id"),
            end_of_image=extra.get("eoi_token_id"),
        )

    def text_bias(self, draws: bool, like: torch.Tensor) -> torch.Tensor:
        """Bias on text logits, `[V]`: `FORBIDDEN_LOGIT` where an id is no text, else 0."""
        bias = torch.zeros(self.vocab_size, device=like.device, dtype=like.dtype)
        bias[self.special_ids.forbidden_in_text(draws)] = FORBIDDEN_LOGIT
        return bias

    def embed_joint_ids(self, input_ids: torch.LongTensor) -> torch.Tensor:
        """Embeddings of joint ids `[B, L]` -> `[B, L, H]`, each id through the table of its modality."""
        is_code = input_ids >= self.vocab_size
        embeds = self.get_input_embeddings()(input_ids.masked_fill(is_code, 0))  # [B, L, H]
        if not is_code.any():
            return embeds
        codes = self.prepare_embeddings_for_image_generation(input_ids[is_code] - self.vocab_size)  # [N, H]
        return embeds.masked_scatter(is_code.unsqueeze(-1), codes.to(embeds.dtype))

    def unconditional_ids(self, input_ids: torch.LongTensor) -> torch.LongTensor:
        """The unconditional stream of guidance, `[B, L]`: everything but bos, `<begin_of_image>` and codes is pad.

        Positions and attention mask stay those of the conditional stream, as in transformers' `generate`.
        """
        special = self.special_ids
        kept = (input_ids == special.bos) | (input_ids == special.begin_of_image) | (input_ids >= self.vocab_size)
        return input_ids.masked_fill(~kept, special.pad)

    def image_head_hidden(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The image head up to its last, affine layer: `[..., H]` -> `[..., D]`; guidance mixes here, exactly."""
        head = self.model.generation_head
        return head.activation_fn(head.proj_out(hidden_states))

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        fused_lm_head: bool = False,
        guidance_scale: float = 1.0,
        temperature: float = 1.0,
        image_temperature: float = 1.0,
        logp_guidance: str = "guided",
        detach_unconditional: bool = False,
        all_modalities: bool = False,
        opens_image: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ):
        """Stock forward, or with `fused_lm_head=True` the scores of joint labels (the contract of TRL's fused head).

        Args:
            input_ids: joint ids `[B, L]`, left-padded.
            attention_mask: `[B, L]`, 0 on padding; position ids are its running count.
            pixel_values: input pictures `[N, 3, S, S]` for the image placeholders in `input_ids`, in order.
            labels: joint ids `[B, L]`, -100 where nothing is scored. Text labels are scored by `lm_head` with ids
                that are no text left out, image labels by the image head.
            guidance_scale: w of `u + w (c - u)` on image logits (Ho & Salimans 2022, arXiv 2207.12598, in the
                parametrisation of Janus); at 1 the unconditional stream is not run.
            temperature: text logits are divided by it.
            image_temperature: guided image logits are divided by it.
            logp_guidance: `guided` scores the distribution that was sampled, `conditional` the unguided one.
            detach_unconditional: run the unconditional stream of the language model without gradient. The image head
                still gets gradient through both streams; what is below it learns from the conditional one alone.
            all_modalities: run vision tower, image embeddings and image head even where the batch does not need
                them, so that all ranks of a mixed run use the same sub-networks.
            opens_image: whether text may open an image, as when it was sampled; None finds it from the ids, and takes
                it for true with `all_modalities`, whose batches hold both tasks.
            num_items_in_batch: divisor of the loss; the number of scored labels if absent.

        Returns:
            `FusedCausalLMOutput` with `log_probs`, `entropy`, `is_top1`, `label_mask` of shape `[B, L-1]`; all are 0
            where the label is -100 or an id that the text mask leaves out (a forced id: -inf would poison the loss).
        """
        if not fused_lm_head:
            stock = {"input_ids": input_ids, "attention_mask": attention_mask, "pixel_values": pixel_values}
            return super().forward(**stock, labels=labels, **kwargs)
        targets = labels[:, 1:]
        scored = targets != -100
        at_image = scored & (targets >= self.vocab_size)  # [B, L-1]
        draws = bool((input_ids >= self.vocab_size).any())
        guided = draws and guidance_scale != 1.0 and logp_guidance == "guided"
        hidden, unconditional = self._joint_hidden_states(
            input_ids, attention_mask, pixel_values, guided, detach_unconditional, all_modalities
        )

        # In a mixed run the mask must not depend on which other rows are in the batch: one for all.
        opens_image = draws or all_modalities if opens_image is None else opens_image
        text_hidden, bias = hidden[scored & ~at_image], self.text_bias(opens_image, hidden)
        text = _score(text_hidden, self.lm_head.weight, bias, targets[scored & ~at_image], temperature)
        forbidden = bias[targets[scored & ~at_image]] != 0
        text = [value.masked_fill(forbidden, 0) for value in text]
        fields = [value.new_zeros(scored.shape).masked_scatter(scored & ~at_image, value) for value in text]

        if draws or all_modalities:
            mixed = self.image_head_hidden(hidden[at_image])  # [N, D]
            if guided:
                mixed = guide(mixed, self.image_head_hidden(unconditional[at_image]), guidance_scale)
            head = self.model.generation_head.vision_head
            image = _score(mixed, head.weight, head.bias, targets[at_image] - self.vocab_size, image_temperature)
            fields = [field.masked_scatter(at_image, value) for field, value in zip(fields, image, strict=True)]

        log_probs, entropy, is_top1 = fields
        count = scored.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return FusedCausalLMOutput(
            loss=-log_probs.sum() / count, log_probs=log_probs, entropy=entropy, is_top1=is_top1, label_mask=scored
        )

    def _joint_hidden_states(
        self, input_ids, attention_mask, pixel_values, guided: bool, detach_unconditional: bool, all_modalities: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states `[B, L-1, H]` that predict the next ids: conditional, and unconditional where guided."""
        embeds = self.embed_prompts(input_ids, pixel_values, all_modalities)
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if not guided:
            return self._backbone(embeds, attention_mask)[:, :-1], None
        if detach_unconditional:
            with torch.no_grad():
                other = self._backbone(self.embed_joint_ids(self.unconditional_ids(input_ids)), attention_mask)
            return self._backbone(embeds, attention_mask)[:, :-1], other[:, :-1]
        other = self.embed_joint_ids(self.unconditional_ids(input_ids))
        both = self._backbone(torch.cat([embeds, other]), attention_mask.repeat(2, 1))  # [2B, L, H]
        conditional, unconditional = both[:, :-1].chunk(2)
        return conditional, unconditional

    def _backbone(self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        return self.model.language_model(
            inputs_embeds=inputs_embeds, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).last_hidden_state

    def embed_prompts(
        self, input_ids: torch.LongTensor, pixel_values: torch.Tensor | None, all_modalities: bool = False
    ) -> torch.Tensor:
        """Joint embeddings with the features of input pictures at their placeholders, `[B, L, H]`.

        A batch without image codes belongs to image-to-text: there the vision tower always runs, on a blank picture
        times 0 if no row has one, because a rank that skips it leaves the others waiting under ZeRO-3. Pictures that
        repeat, as in the completions of one group, go through it once.
        """
        draws = bool((input_ids >= self.vocab_size).any())
        embeds = self.embed_joint_ids(input_ids)
        if all_modalities and not draws:
            blank = self.prepare_embeddings_for_image_generation(input_ids.new_zeros(1))
            embeds = embeds + 0 * blank.sum().to(embeds.dtype)
        has_pictures = pixel_values is not None and len(pixel_values) > 0
        if draws and not has_pictures and not all_modalities:
            return embeds
        if has_pictures:
            different, which = distinct_rows(pixel_values)  # [U, 3, S, S], [N]
            features = self.model.get_image_features(different.to(embeds.dtype)).pooler_output  # [U, T, H]
            features = features[which].reshape(-1, embeds.shape[-1]).to(embeds.dtype)  # [N * T, H]
            at_picture = self.model.get_placeholder_mask(input_ids, embeds, features.unsqueeze(0))
            return embeds.masked_scatter(at_picture, features)
        size = self.config.vision_config.image_size
        blank = embeds.new_zeros(1, self.config.vision_config.num_channels, size, size)
        return embeds + 0 * self.model.get_image_features(blank).pooler_output.sum().to(embeds.dtype)


def _score(
    hidden: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, targets: torch.Tensor, temperature: float
) -> list[torch.Tensor]:
    """Log-prob, entropy and top-1 hit of `targets` `[N]` under `softmax((hidden @ weight.T + bias) / temperature)`.

    TRL's kernel projects in tiles, accumulates in float32 and recomputes in the backward: `[N, V]` never exists. The
    head's weight is read outside of its module call, so it is gathered under ZeRO-3.
    """
    if bias is not None and not isinstance(bias, nn.Parameter) and is_deepspeed_zero3_enabled():
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        # The kernel's backward asks weight and bias alike whether they are sharded; the text mask never is.
        bias.ds_status = ZeroParamStatus.AVAILABLE
    with maybe_gather_lm_head_ctx(weight, bias if isinstance(bias, nn.Parameter) else None):
        log_probs, entropy, _, _, top1 = ChunkedLogProbFunction.apply(
            hidden, weight, bias, targets, temperature, VOCABULARY_CHUNK, None, 1.0, ("entropy", "is_top1")
        )
    return [log_probs, entropy, top1.to(log_probs.dtype)]
