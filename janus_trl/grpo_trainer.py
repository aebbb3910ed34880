"""GRPO for Janus: TRL's trainer, with our rollout in and our scores out."""

import time
from collections import defaultdict
from functools import partial

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset
from peft import PeftConfig
from transformers import JanusProcessor, PreTrainedModel
from trl import GRPOTrainer

from .configs import JanusGRPOConfig
from .data_report import from_first_process
from .engine import DecodeEngine
from .entropy_control import EntropyControl
from .group_filtering import GroupFilter
from .hub import check_write_access
from .loading import check_model, model_config, model_name, processor_for
from .loss_checks import check_entropy_targets
from .loss_metrics import RatioWarnings, loss_metrics
from .metrics import PhaseMemory
from .modality_loss import LossBatch
from .model_card import write_model_card
from .modeling import JanusForInterleavedGeneration, bind_special_ids
from .monitor import SignalMonitorCallback, monitor_settings
from .picture_decoder import PictureDecoder
from .prompts import bind_prompt_template
from .reporting import Attempts, guard_dashboards
from .reward_guard import guard
from .reward_settlement import settle
from .rollouts import text_is_cut
from .run_log import reward_trend
from .saving import RolloutCheckpointing
from .shared_reasoning import advantages_per_token, scored_rows
from .signal_metrics import signal_metrics
from .task_mixture import row_for_task, split_by_task
from .trainable import freeze_for_task, report_trained
from .trainer_batches import RolloutBatches
from .trainer_evaluation import HeldOutEvaluation
from .trainer_sampling import RolloutSampling, sample_for_trl
from .training_rows import held_out_rows, rows_of_tasks, training_rows, with_image_list


class JanusGRPOTrainer(RolloutBatches, RolloutSampling, HeldOutEvaluation, RolloutCheckpointing, GRPOTrainer):
    """`trl.GRPOTrainer` for `JanusForConditionalGeneration`: text, then image codes (`t2i`), or answers (`i2t`).

    Rollouts are sampled by `janus_trl.sampling.rollout`, and policy, old and reference log-probs come from
    `JanusForInterleavedGeneration.forward`; all the rest (groups, advantages, losses, clipping, KL, evaluation,
    saving) is TRL's.

    Args:
        model: folder or Hub id of a stock Janus checkpoint, or a loaded `JanusForInterleavedGeneration`.
        reward_funcs: functions with TRL's contract; for `t2i` they also get `generated_images`, a list of RGB PIL.
        args: a `JanusGRPOConfig`.
        train_dataset: rows with `prompt` (the user's text), `images` (a list, `i2t`), and columns for the rewards. For
            `both`, a mapping with one data set per task; rewards find the task of a row in the column `task`.
        eval_dataset: held-out rows of the same form.
        processing_class: a `JanusProcessor`; that of the model by default.
        peft_config: e.g. from `janus_trl.script_arguments.lora_config`.
    """

    _tag_names = ["trl", "grpo", "janus"]
    _name = "GRPO"

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs,
        args: JanusGRPOConfig,
        train_dataset: Dataset | dict[str, Dataset],
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: JanusProcessor | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        peft_config: PeftConfig | None = None,
    ):
        check_model(model)
        check_entropy_targets(args, model_config(model, args.model_init_kwargs))
        from_first_process(lambda: check_write_access(args))
        if args.beta != 0.0 and peft_config is None and not model_name(model):
            raise ValueError(
                f"beta = {args.beta} needs a reference model, but the model was built in memory. Save it and pass the "
                "folder, or set beta: 0.0."
            )
        prompts = args.generation_batch_size // args.num_generations
        columns_known = args.task != "both" and isinstance(train_dataset, Dataset)
        processing_class = processor_for(model, processing_class)
        bind_prompt_template(processing_class, args.prompt_template)
        self.task = self.batch_task = args.task  # of the run, and of the batch that is sampled or scored
        self.sampling_round, self.round_rewards, self.warned_flat_groups = 0, None, False  # see `GroupFilter`
        self._loss_batch: LossBatch | None = None
        self._engine: DecodeEngine | None = None
        self._train_sampler = None
        self._seconds = defaultdict(float)
        self._eval_rewards: dict[int, list[float]] = {}
        self._eval_rows_seen = 0
        self.evaluations: list[tuple[int, dict[int, float]]] = []  # (step, reward of each held-out row)
        # TRL loads policy and reference through `model_init_kwargs`; this makes both of our class. Not kept: the
        # arguments are serialised later. No device map: on one process TRL would spread the model over all GPUs.
        init_kwargs = args.model_init_kwargs
        if isinstance(model, str) or (args.beta != 0.0 and peft_config is None):
            ours = {"architecture": JanusForInterleavedGeneration, "device_map": None}
            args.model_init_kwargs = {**(init_kwargs or {}), **ours}
        try:
            super().__init__(
                model=model,
                reward_funcs=guard(
                    _as_list(reward_funcs),
                    args.on_reward_error,
                    args.reward_timeout,
                    *((args.task, train_dataset.column_names) if columns_known else ()),
                ),
                args=args,
                train_dataset=training_rows(train_dataset, args.task, prompts, args.dynamic_sampling),
                eval_dataset=held_out_rows(eval_dataset, args.task),
                processing_class=processing_class,
                callbacks=callbacks,
                optimizers=optimizers,
                peft_config=peft_config,
                rollout_func=sample_for_trl,
            )
        finally:
            args.model_init_kwargs = init_kwargs
        self.entropy_control = EntropyControl(args, self.accelerator)
        self._ratio_warnings = RatioWarnings(self.accelerator)
        self._adopt(self.model)
        if self.ref_model is not None:
            self._adopt(self.accelerator.unwrap_model(self.ref_model))
        text = self.task != "t2i" or args.max_reasoning_length > 0
        freeze_for_task(self.base_model, self.task, with_adapter=is_peft_model(self.model), text=text)
        if self.accelerator.is_main_process:
            report_trained(self.base_model, args.learning_rate, self.is_deepspeed_enabled)
        self._memory = PhaseMemory(self.accelerator.device)
        self._decoder = None
        if self.task != "i2t":
            # DeepSpeed casts and shards what it is given: keep a whole copy, of the precision asked for.
            dtype, size = getattr(torch, args.vq_dtype), args.vq_batch_size
            self._decoder = PictureDecoder(self.base_model, dtype, size, keep_copy=self.is_deepspeed_enabled)
        longest = args.max_reasoning_length + self.base_model.num_image_codes + 3
        self._longest = {"t2i": longest, "i2t": args.max_completion_length}  # dr_grpo divides by it
        if self.task == "t2i":
            self.max_completion_length = args.max_completion_length = longest
        self._pools = rows_of_tasks(self.train_dataset, self.task)
        self._attempts = Attempts()
        guard_dashboards(self.callback_handler.callbacks)
        if args.monitor:
            sizes = self.base_model.vocab_size, self.base_model.config.vq_config.num_embeddings
            self.add_callback(SignalMonitorCallback(monitor_settings(args, *sizes), args.stop_on_no_signal))

    def _adopt(self, model: PreTrainedModel) -> None:
        """Drop the fused head that TRL put on the instance (it knows one vocabulary), and tell the special ids."""
        base = model.get_base_model() if is_peft_model(model) else model
        base.__dict__.pop("forward", None)
        bind_special_ids(base, self.processing_class)

    @property
    def base_model(self) -> JanusForInterleavedGeneration:
        """The Janus model inside adapter and wrappers."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    # Rollout ---------------------------------------------------------------------------------------------------------

    def _generate(self, prompts):
        """TRL's; `completions/clipped_ratio` is about text, since an image always has all of its codes."""
        output = super()._generate(prompts)
        ids, env_mask = output[1], output[2]
        cut = [text_is_cut(row, mask, self.base_model) for row, mask in zip(ids, env_mask, strict=True)]
        cut = self.accelerator.gather(torch.tensor(cut, device=self.accelerator.device)).float().mean().item()
        self._metrics["train" if self.model.training else "eval"]["completions/clipped_ratio"][-1] = cut
        return output

    def _log_signal(self, output: dict) -> None:
        """Spread of the rewards of the rollout within and between groups; collective."""
        metrics = signal_metrics(
            self.round_rewards,
            self.reward_weights,
            self.reward_func_names,
            self.num_generations,
            output,
            self.accelerator,
        )
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _batch_parts(self) -> tuple[int, int]:
        """What identifies a generation batch: a step may hold several. On resume `_step` is a multiple of the step."""
        part = self._step % self.args.gradient_accumulation_steps // self.args.steps_per_generation
        return self.state.global_step, part

    def _generate_and_score_completions(self, inputs):
        start, mode = time.perf_counter(), "train" if self.model.training else "eval"
        self.batch_task = inputs[0]["task"] if self.task == "both" else self.task
        with self._split_metrics(mode):
            output = self._generate_rows(inputs)
            if mode == "train" and self.args.dynamic_sampling:
                pool = self._pools[self.batch_task]
                output = GroupFilter(self, self._generate_rows).fill(output, inputs, pool, self._batch_parts())
            if mode == "train":
                self._log_signal(output)  # of the rows that are trained on
            shared = self.sampling_settings(mode).images_per_reasoning
            if shared > 1:
                scored = scored_rows(self.round_rewards, self.accelerator.process_index, len(output["advantages"]))
                output["advantages"] = advantages_per_token(
                    output["advantages"], output["completion_ids"], self.base_model.vocab_size, shared, scored
                )
        self._seconds["generation"] += time.perf_counter() - start
        return output

    def _generate_rows(self, inputs: list[dict]) -> dict:
        """TRL's rollout, rewards and advantages of rows of this rank; collective."""
        form = row_for_task if self.task == "both" else with_image_list
        inputs = [form(row) for row in inputs]
        return super()._generate_and_score_completions(inputs)

    def _split_metrics(self, mode: str):
        return split_by_task(self._metrics[mode], self.batch_task if self.task == "both" else None)

    # Rewards ---------------------------------------------------------------------------------------------------------

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        mode, start = "train" if self.model.training else "eval", time.perf_counter()
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        rewards = settle(self.reward_funcs, rewards, self.reward_weights, self.accelerator, self._metrics[mode])
        self.round_rewards = rewards  # [N, functions] of all ranks
        self._metrics[mode]["time/reward_s"].append(time.perf_counter() - start)
        self._memory.end("reward", self._metrics[mode])
        if mode == "eval" and "row_id" in inputs[0]:
            ids = torch.tensor([row["row_id"] for row in inputs], device=rewards.device)
            totals = (rewards * self.reward_weights.to(rewards.device)).nansum(1)
            totals[rewards.isnan().all(1)] = torch.nan  # no reward could score the completion
            for row, total in zip(self.accelerator.gather(ids).tolist(), totals.tolist(), strict=True):
                of_row = self._eval_rewards.setdefault(row, [])
                if len(of_row) < self.num_generations_eval:  # the loader repeats the first rows to fill the ranks
                    of_row.append(total)
        return rewards

    # Scoring ---------------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        """TRL's body, calling the model with the settings of the rollout: replay equals rollout."""
        mode = "train" if self.model.training else "eval"
        scorer = partial(
            model,
            guidance_scale=self._guidance_scale(mode),
            temperature=self.args.temperature,
            image_temperature=self.args.image_temperature,
            logp_guidance=self.args.logp_guidance,
            detach_unconditional=self.args.detach_unconditional,
            **self._mixed_run_options(),
        )
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(scorer, *args, **kwargs)
        if entropies is not None and self._loss_batch is not None:
            logps = self._loss_batch.scored(logps, entropies)
        return logps, entropies, aux_loss

    def _mixed_run_options(self) -> dict[str, bool]:
        """Every trained sub-network in every forward, so that DDP and ZeRO find a gradient of each; 0 where unused."""
        if self.task != "both":
            return {}
        return {"all_modalities": not is_peft_model(self.model), "opens_image": self.batch_task == "t2i"}

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.task == "both":  # the batch was buffered; another may have been sampled since
            draws = bool((inputs["completion_ids"] >= self.base_model.vocab_size).any())
            self.batch_task = "t2i" if draws else "i2t"
            self.max_completion_length = self._longest[self.batch_task]
        with self._split_metrics("train" if self.model.training else "eval"):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _compute_loss(self, model, inputs):
        """TRL's loss, with weights, clip ranges and entropy terms by modality."""
        self._loss_batch = batch = LossBatch(inputs, self.base_model.vocab_size, self.args)
        with batch.clip_ranges(self):
            loss = super()._compute_loss(model, batch.inputs)
        self._loss_batch = None
        self._log_loss(batch)
        if self.entropy_control and self.model.training:
            loss = loss + self.entropy_control.loss(batch, self.current_gradient_accumulation_steps)
            if self.accelerator.sync_gradients:
                for name, value in self.entropy_control.step().items():
                    self._metrics["train"][name].append(value)
        return loss

    def _log_loss(self, batch: LossBatch) -> None:
        """Metrics of a micro-batch; collective."""
        training = self.model.training
        first = training and self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        found = loss_metrics(batch, self.accelerator, first)
        if training:
            self._ratio_warnings.check(found)
        for name, value in found.items():
            self._metrics["train" if training else "eval"][name].append(value)

    def _save_checkpoint(self, model, trial):
        self.state.stateful_callbacks["EntropyControl"] = self.entropy_control.state()  # in trainer_state.json
        super()._save_checkpoint(model, trial)

    def _init_training_state(self, *args, **kwargs):
        progress = super()._init_training_state(*args, **kwargs)
        self.entropy_control.load(self.state.stateful_callbacks.get("EntropyControl", {}))
        return progress

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's log with the trend of the reward; a table of completions that cannot be written ends no run."""
        metrics, with_table = self._metrics["train" if self.model.training else "eval"], self.log_completions
        for ending in ("/t2i", "/i2t") if self.task == "both" and self.model.training else ("",):
            key = f"reward{ending}"
            trend = reward_trend(self.state, metrics.get(key, []), self.args.monitor_window, key)
            if self.model.training and trend is not None:
                metrics[f"signal/drift_to_noise{ending}"] = [trend]
        self.log_completions = with_table and bool(metrics)  # the summary of a run has no completions of its own
        try:
            super().log(logs, start_time)
        except Exception as error:
            if metrics or not self.log_completions:  # TRL clears the metrics before it writes the table
                raise
            self._attempts.warn("The table of completions was not written", error)
        finally:
            self.log_completions = with_table

    def training_step(self, model, inputs, num_items_in_batch):
        start, before = time.perf_counter(), self._seconds["generation"]
        loss = super().training_step(model, inputs, num_items_in_batch)
        generating = self._seconds["generation"] - before
        self._metrics["train"]["time/loss_s"].append(time.perf_counter() - start - generating)
        self._memory.end("loss", self._metrics["train"])
        return loss

    def _get_grad_norm(self, model, grad_norm=None):
        """Stop at a non-finite gradient, before it reaches the weights: the logged loss would only read 0.0."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and not torch.isfinite(torch.as_tensor(norm)):
            raise FloatingPointError(
                f"Gradient norm {float(norm)} at step {self.state.global_step + 1}: training stopped. "
                f"Lower learning_rate ({self.args.learning_rate}), or check rewards and beta for non-finite values."
            )
        return norm

    def create_model_card(self, model_name: str | None = None, dataset_name: str | None = None, tags=None) -> None:
        """TRL's card speaks of text generation; this one is about Janus."""
        write_model_card(self, "GRPO", self.task, model_name)


def _as_list(value) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]
