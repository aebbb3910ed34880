"""The rollouts of `JanusGRPOTrainer`: with which settings, seeds and weights a batch is sampled."""

import time

import torch
from accelerate.utils import is_peft_model
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import logging
from trl.models.utils import unwrap_model_for_generation

from .engine import DecodeEngine
from .engine_buffers import supports
from .sampling import Rollout, SamplingSettings, rollout, row_seed

logger = logging.get_logger(__name__)

# Where the decode engine samples; on a CPU the plain path is as fast.
ENGINE_DEVICES = ("cuda",)


class RolloutSampling:
    """Mixin that samples with the current weights of the trainer."""

    def sampling_settings(self, mode: str = "train", greedy: bool = False, task: str | None = None) -> SamplingSettings:
        """The settings of rollouts of a task (that of the batch at hand) in `train` or `eval` mode."""
        task = task or self.batch_task
        args, draws = self.args, task == "t2i"
        return SamplingSettings(
            task=task,
            max_text_length=args.max_reasoning_length if draws else args.max_completion_length,
            guidance_scale=self._guidance_scale(mode),
            temperature=args.temperature,
            image_temperature=args.image_temperature,
            logp_guidance=args.logp_guidance,
            greedy=greedy,
            batch_size=args.rollout_batch_size,
            images_per_reasoning=args.images_per_reasoning if draws and mode == "train" else 1,
        )

    def _guidance_scale(self, mode: str) -> float:
        scale = self.args.eval_guidance_scale if mode == "eval" else None
        return self.args.guidance_scale if scale is None else scale

    def sample(self, prompts: list, seeds: list[int], settings: SamplingSettings) -> Rollout:
        """Sample with the current weights; collective under ZeRO-3, so every rank calls it."""
        engine = self._engine = self._new_engine() if self._engine is None else self._engine
        # The engine gathers matrix by matrix into its own buffers; the plain path needs the whole model.
        gather = self.args.ds3_gather_for_generation and engine is None
        if self._sharded() and not self.args.ds3_gather_for_generation:
            self._say_what_sharded_sampling_costs(len(prompts), settings)
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=gather,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            self.accelerator.autocast(),
        ):
            base = model.get_base_model() if is_peft_model(model) else model
            if engine is not None:
                engine.load_weights(base, with_text=settings.max_text_length > 0)
            result = rollout(
                base,
                self.processing_class,
                prompts,
                settings,
                seeds,
                any_rank=bool if gather or engine is not None else self._any_rank,
                any_rank_fails=self._any_rank,
                progress=self.accelerator.is_main_process and not self.args.disable_tqdm,
                engine=engine,
                decoder=self._decoder,
            )
            if engine is not None and not self.args.keep_rollout_buffers:
                engine.release(with_weights=True)
            return result

    def _new_engine(self) -> DecodeEngine | None:
        """A decode engine; None where the plain path samples (CPU, or weights that must stay sharded)."""
        stays_sharded = self._sharded() and not self.args.ds3_gather_for_generation
        if self.accelerator.device.type not in ENGINE_DEVICES or stays_sharded or not supports(self.base_model):
            return None
        mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision)
        return DecodeEngine(mixed or self.base_model.lm_head.weight.dtype, self.args.use_cuda_graphs)

    def _sharded(self) -> bool:
        return self.is_deepspeed_enabled and is_deepspeed_zero3_enabled()

    def _say_what_sharded_sampling_costs(self, rows: int, settings: SamplingSettings) -> None:
        codes = self.base_model.num_image_codes if settings.task == "t2i" else 0
        chunks = -(-rows // (settings.batch_size or rows))
        logger.warning_once(
            f"ds3_gather_for_generation = False: every decoded token gathers all layers. A rollout takes up to "
            f"{chunks * (settings.max_text_length + codes)} forwards of the whole model ({chunks} chunks of "
            f"{settings.max_text_length} text tokens and {codes} codes): slow, but without a whole copy on a GPU."
        )

    def _any_rank(self, flag: bool) -> bool:
        return bool(self.accelerator.gather(torch.tensor([flag], device=self.accelerator.device)).any())

    def _row_seeds(self, mode: str, rows: int) -> list[int]:
        """One seed per row from (seed, step, position in the global batch): equal for any number of processes."""
        first = self.accelerator.process_index * rows
        if mode == "train":
            parts = self._batch_parts()
            parts += ("round", self.sampling_round) if self.sampling_round else ()
            return [row_seed(self.args.seed, mode, *parts, first + i) for i in range(rows)]
        first += self._eval_rows_seen
        self._eval_rows_seen += rows * self.accelerator.num_processes
        return [row_seed(self.args.seed, mode, first + i) for i in range(rows)]


def sample_for_trl(prompts: list, trainer: RolloutSampling) -> dict[str, list]:
    """TRL's `rollout_func`."""
    mode, start = "train" if trainer.model.training else "eval", time.perf_counter()
    trainer._memory.end("update", trainer._metrics[mode])  # the optimizer's step, if one was made
    result = trainer.sample(prompts, trainer._row_seeds(mode, len(prompts)), trainer.sampling_settings(mode))
    trainer._metrics[mode]["time/rollout_s"].append(time.perf_counter() - start)
    trainer._memory.end("rollout", trainer._metrics[mode])
    output = {name: getattr(result, name) for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")}
    return {**output, "generated_images": result.images} if trainer.batch_task == "t2i" else output
