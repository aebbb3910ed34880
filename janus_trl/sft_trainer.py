"""SFT for Janus: cross-entropy on reasoning, image codes and answers, through the forward that RL scores with."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset, Value
from peft import PeftConfig
from torch.utils.data import DataLoader
from transformers import JanusProcessor, PreTrainedModel
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler
from trl import SFTTrainer
from trl.models.utils import unwrap_model_for_generation

from .configs import JanusSFTConfig
from .data_report import from_first_process
from .hub import check_write_access
from .image_codes import with_image_codes
from .loading import processor_for
from .model_card import write_model_card
from .modeling import JanusForInterleavedGeneration, bind_special_ids
from .picture_decoder import PictureDecoder
from .prompts import bind_prompt_template
from .reporting import guard_dashboards
from .sampling import Rollout, SamplingSettings, rollout, row_seed
from .saving import Checkpointing
from .sft_data import JointCollator, LossWeights, first_drawn, reasoning_tokens, refuse_edits, task_of
from .trainable import freeze_for_task, report_trained


class JanusSFTTrainer(Checkpointing, SFTTrainer):
    """`trl.SFTTrainer` on rows that end in a picture (`t2i`) or in a text (`i2t`), mixed in one run.

    Args:
        model: folder or Hub id of a stock Janus checkpoint, or a loaded `JanusForInterleavedGeneration`.
        args: a `JanusSFTConfig`.
        train_dataset: rows with `prompt`, and `image` (the target picture) with an optional `reasoning`, or
            `completion` (the answer, behind an optional `reasoning`) with optional input pictures `images`.
        eval_dataset: held-out rows of the same form.
        processing_class: a `JanusProcessor`; that of the model by default. It takes on `args.prompt_template`.
        peft_config: e.g. from `janus_trl.script_arguments.lora_config`.
    """

    _tag_names = ["trl", "sft", "janus"]

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: JanusSFTConfig,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        processing_class: JanusProcessor | None = None,
        callbacks: list | None = None,
        peft_config: PeftConfig | None = None,
    ):
        from_first_process(lambda: check_write_access(args))
        processing_class = processor_for(model, processing_class)
        bind_prompt_template(processing_class, args.prompt_template)
        refuse_edits(train_dataset, "train_dataset")
        refuse_edits(eval_dataset, "eval_dataset")
        init_kwargs = args.model_init_kwargs
        if isinstance(model, str):
            model = JanusForInterleavedGeneration.from_pretrained(model, **(init_kwargs or {}))
        bind_special_ids(model, processing_class)
        collator = JointCollator.of(model, processing_class, args.guidance_dropout)
        self._losses: dict[str, torch.Tensor] = {}
        self._length_sampler: LengthGroupedSampler | BatchRebalanceSampler | None = None
        self._eval_sampler: LengthGroupedSampler | None = None
        try:
            args.model_init_kwargs = None  # TRL refuses them beside a loaded model
            super().__init__(
                model=model,
                args=args,
                data_collator=collator,
                train_dataset=prepare(train_dataset, model, collator, args),
                eval_dataset=prepare(eval_dataset, model, collator, args),
                processing_class=processing_class,
                callbacks=callbacks,
                peft_config=peft_config,
            )
        finally:
            args.model_init_kwargs = init_kwargs
        guard_dashboards(self.callback_handler.callbacks)
        self.base_model.__dict__.pop("forward", None)  # TRL's fused head on the instance knows one vocabulary
        freeze_for_task(self.base_model, "both", with_adapter=is_peft_model(self.model))
        if self.accelerator.is_main_process:
            report_trained(self.base_model, args.learning_rate, self.is_deepspeed_enabled)

    @property
    def base_model(self) -> JanusForInterleavedGeneration:
        """The Janus model inside adapter and wrappers."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    @cached_property
    def task(self) -> str:
        """`t2i`, `i2t` or `both`, as the training rows are."""
        return task_of(self.train_dataset)

    def create_model_card(self, model_name: str | None = None, dataset_name: str | None = None, tags=None) -> None:
        """TRL's card speaks of text generation; this one is about Janus."""
        if self.accelerator.is_main_process:
            write_model_card(self, "SFT", self.task, model_name, reasoning_length=self._trained_length())

    @cached_property
    def reasoning_tokens(self) -> dict[str, float]:
        """How long the reasonings of the training rows are; see `janus_trl.sft_data.reasoning_tokens`."""
        return reasoning_tokens(self.train_dataset, self.processing_class.tokenizer)

    def _trained_length(self) -> int | None:
        """`max_reasoning_length`; if unset that of the training rows, None without pictures to draw."""
        given = self.args.max_reasoning_length
        return self.reasoning_tokens.get("max") if given is None else given

    def _facts(self) -> dict[str, Any]:
        """With the length that `generate` and `evaluate` need to sample what was taught."""
        facts = super()._facts()
        sampling = {**facts["sampling"], "max_reasoning_length": self._trained_length()}
        return {**facts, "sampling": sampling, "reasoning_tokens": self.reasoning_tokens}

    # Loss ------------------------------------------------------------------------------------------------------------

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """TRL's loss, divided by the number of labels as there, with the log-prob of each label times its weight."""
        args, labels = self.args, inputs["labels"][:, 1:]
        weights = LossWeights(args.text_loss_weight, args.image_loss_weight, args.begin_of_image_loss_weight)
        weights = weights.of(labels, self.base_model)

        def weighted(**kwargs):
            outputs = model(**kwargs)
            if not kwargs.get("fused_lm_head"):  # TRL asks for logits too where `compute_metrics` needs them
                return outputs
            self._count_losses(outputs.log_probs.detach(), weights, labels)
            outputs.log_probs = outputs.log_probs * weights
            return outputs

        return super().compute_loss(weighted, inputs, return_outputs, num_items_in_batch)

    def _count_losses(self, log_probs: torch.Tensor, weights: torch.Tensor, labels: torch.LongTensor) -> None:
        """Add to the sum of losses and the number of labels of each modality, of all ranks; collective.

        Last comes the sum of the loss that is trained on, which is weighted. A loader repeats held-out rows where they
        do not fill the last batch of every rank: these count once.
        """
        is_code, is_text = labels >= self.base_model.vocab_size, (labels >= 0) & (labels < self.base_model.vocab_size)
        losses = -log_probs.double()
        parts = [part.sum(1) for at in (is_text, is_code) for part in (losses.masked_fill(~at, 0), at.double())]
        trained = losses * weights
        if self.args.loss_type == "dft":  # as in TRL
            trained = trained * log_probs.double().exp()
        rows = torch.stack([*parts, trained.sum(1)], 1)  # [B, 5]
        if self.model.training:
            mode, counted = "train", self.accelerator.reduce(rows.sum(0))
        else:
            mode, counted = "eval", self.accelerator.gather_for_metrics(rows).sum(0)
        self._losses[mode] = self._losses.get(mode, 0) + counted

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        """As in transformers, but the loss is the mean over all labels, as that of a training step.

        There it is the mean of the means of batches: it changes with the batch size, the number of processes and
        which rows are together, and a label of a short answer counts more than one of a picture.
        """
        self._losses.pop("eval", None)  # of a prediction, which logs nothing
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if "eval" in self._losses:
            _, texts, _, images, trained = self._losses["eval"].tolist()
            output.metrics[f"{metric_key_prefix}_loss"] = trained / max(texts + images, 1)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds `loss/text` and `loss/image`: the mean negative log-prob of a label since the last log, unweighted."""
        mode = "train" if self.model.training else "eval"
        if mode in self._losses:
            text, texts, image, images, _ = self._losses.pop(mode).tolist()
            means = {"text": text / texts if texts else None, "image": image / images if images else None}
            self._metrics[mode].update({f"loss/{name}": [mean] for name, mean in means.items() if mean is not None})
        super().log(logs, start_time)

    # Data ------------------------------------------------------------------------------------------------------------

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader:
        """As in transformers, but what is measured has to repeat: no held-out row is blanked, and their order is kept.

        Entropy and accuracy are those of batches, so they depend on which rows are together.
        """
        collator = self.data_collator
        self.data_collator = replace(collator, guidance_dropout=0.0)
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = collator
            if self._eval_sampler is not None:  # with workers that stay, that of the evaluation before
                self._eval_sampler.generator.manual_seed(self._data_seed())

    def _get_eval_sampler(self, eval_dataset: Dataset):
        sampler = super()._get_eval_sampler(eval_dataset)
        self._eval_sampler = None
        if isinstance(sampler, LengthGroupedSampler):
            sampler.lengths = list(sampler.lengths)  # a column would be read row by row
            self._eval_sampler = sampler
        return sampler

    def _get_train_sampler(self, train_dataset: Dataset | None = None):
        """With a generator of its own: the global one moves with the blanked rows, apart on every rank."""
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.lengths = list(sampler.lengths)  # a column would be read row by row
            sampler.generator = torch.Generator()
            self._length_sampler = sampler
        elif isinstance(sampler, BatchRebalanceSampler):
            sampler.seed = self._data_seed()  # transformers seeds it with 42
            self._length_sampler = sampler
        return sampler

    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _run_epoch(self, model, epoch, *args, **kwargs):
        """Shuffle and blank by seed and epoch, so that a resumed run sees the rows of a straight one."""
        seed, sampler = self._data_seed(), self._length_sampler
        self.data_collator.set_epoch(seed, epoch)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.generator.manual_seed(seed + epoch)
        elif sampler is not None:  # a resumed loader of several processes does not reach it
            sampler.set_epoch(epoch)
        return super()._run_epoch(model, epoch, *args, **kwargs)

    # Samples ---------------------------------------------------------------------------------------------------------

    def sample_rows(self, rows: int) -> list[dict]:
        """Draw the first held-out `t2i` rows with fixed seeds: `prompt`, `image`, `reasoning`; every rank calls it."""
        inputs = first_drawn(self.eval_dataset, rows)
        if not inputs:
            return []
        length = self._reasoning_length(inputs)
        # One more for the `<begin_of_image>` that ends a reasoning.
        settings = SamplingSettings("t2i", length and length + 1, self.args.eval_guidance_scale)
        result = self._sample([row["prompt"] for row in inputs], settings)
        texts = self.processing_class.batch_decode(result.completion_ids, skip_special_tokens=True)
        return [
            {"image": picture, "prompt": row["prompt"], "reasoning": text}
            for row, picture, text in zip(inputs, result.images, texts, strict=True)
        ]

    def _reasoning_length(self, rows: list[dict[str, str]]) -> int:
        """`max_reasoning_length`; if unset the most tokens among the reasonings of `rows`."""
        if self.args.max_reasoning_length is not None:
            return self.args.max_reasoning_length
        tokenizer = self.processing_class.tokenizer
        texts = [row["reasoning"] for row in rows]
        return max((len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts), default=0)

    def _sample(self, prompts: list[str], settings: SamplingSettings) -> Rollout:
        """One completion per prompt with the current weights, the same on every rank."""
        seeds = [row_seed(self.args.seed, "samples", i) for i in range(len(prompts))]
        checkpointing = self.args.gradient_checkpointing_kwargs
        with (
            unwrap_model_for_generation(
                self.model_wrapped, self.accelerator, gradient_checkpointing_kwargs=checkpointing
            ) as model,
            self.accelerator.autocast(),
        ):
            base = model.get_base_model() if is_peft_model(model) else model
            decoder = PictureDecoder(base, torch.float32)  # as `generate` and `evaluate` decode
            return rollout(base, self.processing_class, prompts, settings, seeds, decoder=decoder)


def prepare(
    dataset: Dataset | None, model: JanusForInterleavedGeneration, collator: JointCollator, args: JanusSFTConfig
) -> Dataset | None:
    """Rows with codes in the place of target pictures, and for grouping with their lengths."""
    dataset = with_image_codes(dataset, model, args.codes_cache_dir, device=args.device)
    grouped, name = args.train_sampling_strategy in ("group_by_length", "batch_rebalance"), args.length_column_name
    if dataset is None or not grouped:
        return dataset
    if name in dataset.column_names:
        kind = dataset.features[name]
        whole = isinstance(kind, Value) and kind.dtype.startswith(("int", "uint"))
        if whole and not dataset.data.column(name).null_count:
            return dataset
        dataset = dataset.remove_columns(name)  # `length` says something else in this data set
    return dataset.add_column(name, collator.lengths(dataset))
