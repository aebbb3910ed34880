"""Arguments of the trainers, refused before weights load where they cannot work."""

from dataclasses import dataclass, field

from trl import GRPOConfig, SFTConfig

from .config_checks import (
    at_least,
    check_base_model_id,
    check_batch_sizes,
    check_prompt_template,
    check_report_to,
    check_reward_options,
    check_stop_on_no_signal,
    check_world_size,
    one_of,
    refuse_unsupported,
    select_backend,
    started_processes,
)
from .loss_checks import check_loss_options
from .sampling_checks import check_images_per_reasoning, check_rows_of_a_process, check_task_proportions

# Options of transformers that neither trainer can honour: the value that is allowed, and why no other is.
_ALWAYS_UNSUPPORTED = {
    "use_liger_kernel": (False, "it replaces the forward that scores joint ids"),
    "fp16": (False, "Janus was trained in bf16, whose range float16 does not have; use bf16"),
}

# TRL options that change what is sampled without changing what is scored, or that bring another sampler.
_UNSUPPORTED = {
    "use_vllm": (False, "vLLM has no Janus image generation; the rollout of janus_trl is used"),
    "use_transformers_continuous_batching": (False, "the rollout of janus_trl is used"),
    **_ALWAYS_UNSUPPORTED,
    "cast_lm_head_to_fp32": (False, "log-probs are accumulated in float32 anyway"),
    "top_p": (1.0, "the loss scores the full softmax, so sampling has to use it too"),
    "top_k": (0, "the loss scores the full softmax, so sampling has to use it too"),
    "min_p": (None, "the loss scores the full softmax, so sampling has to use it too"),
    "repetition_penalty": (1.0, "the loss scores the full softmax, so sampling has to use it too"),
}

_UNSUPPORTED_IN_SFT = {
    **_ALWAYS_UNSUPPORTED,
    "label_smoothing_factor": (0.0, "transformers computes it from logits of one vocabulary, joint ids have two"),
}

TEMPLATE_HELP = (
    "Text with `{prompt}` around every user text, e.g. an instruction that asks for a plan; rewards get the user text "
    "alone. Unset: the one that the checkpoint was trained with, or none."
)
BASE_MODEL_HELP = (
    "Hub id of the base, written into adapters and model cards; unset: model_name_or_path, if that is a Hub id."
)


@dataclass
class JanusGRPOConfig(GRPOConfig):
    """`trl.GRPOConfig` with the options of Janus rollouts; all options of TRL and transformers work as there.

    Raises:
        ValueError: naming field, value, rule and fix, before any weights are loaded.
    """

    task: str = field(
        default="t2i",
        metadata={"help": "`t2i` (text, then an image), `i2t` (a text answer about pictures), or `both` in one run."},
    )
    task_proportions: dict[str, float] | str | None = field(
        default=None,
        metadata={"help": "both: share of the rollouts of each task, e.g. {t2i: 0.7, i2t: 0.3}; unset: halves."},
    )
    max_reasoning_length: int = field(
        default=0, metadata={"help": "t2i: most text tokens before the image; 0 opens the image at once."}
    )
    images_per_reasoning: int = field(
        default=1,
        metadata={"help": "t2i: pictures that are drawn from one sampled reasoning; divides num_generations."},
    )
    guidance_scale: float = field(
        default=5.0,
        metadata={"help": "w of u + w (c - u) on image logits, >= 1. At 1 the unconditional stream is not run."},
    )
    logp_guidance: str = field(
        default="guided",
        metadata={
            "help": "Which log-prob of an image code is trained: `guided`, the distribution that was sampled, or "
            "`conditional`, half the forward but another distribution than the sampled one."
        },
    )
    detach_unconditional: bool = field(
        default=False, metadata={"help": "Run the unconditional stream of the replay without gradient."}
    )
    image_temperature: float = field(default=1.0, metadata={"help": "Temperature of image codes."})
    eval_guidance_scale: float | None = field(
        default=None, metadata={"help": "guidance_scale in evaluation and sample grids; that of training if unset."}
    )
    dynamic_sampling: bool = field(
        default=False,
        metadata={"help": "Replace prompts whose completions all have the same reward by new ones (DAPO)."},
    )
    dynamic_sampling_max_rounds: int = field(
        default=3,
        metadata={"help": "Most rounds of new prompts; groups that are still flat are used with advantage 0."},
    )
    rollout_batch_size: int | None = field(
        default=None, metadata={"help": "Rows that are sampled at a time on each process; all if unset."}
    )
    use_cuda_graphs: bool = field(
        default=True, metadata={"help": "On a GPU, capture a decode step as a CUDA graph (off: for debugging)."}
    )
    keep_rollout_buffers: bool = field(
        default=True,
        metadata={
            "help": "On a GPU, keep caches, captured graphs and copies of weights between rollouts. Off frees them "
            "before the loss and captures again (Janus-Pro-7B: caches of 0.47 MiB a position, row and stream, 18 GiB "
            "for 32 guided rows; copies of 13 GiB under ZeRO-3, 11 GiB with LoRA, none else)."
        },
    )
    vq_dtype: str = field(
        default="float32",
        metadata={
            "help": "Precision in which codes become pictures: `float32` or `bfloat16`.",
            "choices": ["float32", "bfloat16"],
        },
    )
    vq_batch_size: int = field(
        default=4, metadata={"help": "Pictures that are decoded at a time (about 0.4 GiB each in float32)."}
    )
    sample_steps: int = field(
        default=0, metadata={"help": "Write a grid of held-out samples every so many steps; 0: at start and end."}
    )
    num_samples: int = field(default=8, metadata={"help": "Held-out prompts in the sample grid; 0: no grid."})
    prompt_template: str | None = field(default=None, metadata={"help": TEMPLATE_HELP})
    on_reward_error: str = field(
        default="raise",
        metadata={"help": "A reward that raises: `raise` ends the run, `none` leaves the rows out and counts them."},
    )
    reward_timeout: float | None = field(
        default=600.0,
        metadata={"help": "Seconds for a call of an async reward; its rows are left out. null: no limit."},
    )
    monitor: bool = field(
        default=True, metadata={"help": "Say once, in a sentence, why the run is not learning and what to try."}
    )
    monitor_window: int = field(
        default=100,
        metadata={"help": "Steps after which a reward that does not rise is reported, and of `signal/drift_to_noise`."},
    )
    no_signal_patience: int = field(
        default=10, metadata={"help": "Steps in a row without any learning signal before it is reported."}
    )
    stop_on_no_signal: bool = field(
        default=False, metadata={"help": "End the training when there is no learning signal at all."}
    )
    base_model_id: str | None = field(default=None, metadata={"help": BASE_MODEL_HELP})

    # The loss, text and image codes apart. Text: reasoning, answers, sampled `<begin_of_image>` and eos.
    text_loss_weight: float = field(default=1.0, metadata={"help": "Weight of text in the gradient of the loss."})
    image_loss_weight: float = field(default=1.0, metadata={"help": "Weight of image codes in it."})
    epsilon_text: float | None = field(default=None, metadata={"help": "`epsilon` and `epsilon_high` of text."})
    epsilon_image: float | None = field(default=None, metadata={"help": "The same of image codes."})
    epsilon_high_text: float | None = field(default=None, metadata={"help": "`epsilon_high` of text alone."})
    epsilon_high_image: float | None = field(default=None, metadata={"help": "`epsilon_high` of image codes alone."})
    entropy_coef_text: float = field(
        default=0.0,
        metadata={
            "help": "TRL's `entropy_coef` for text: > 0 rewards entropy, < 0 penalises it; start of the control."
        },
    )
    entropy_coef_image: float = field(default=0.0, metadata={"help": "The same for image codes."})
    entropy_target_text: float | None = field(
        default=None,
        metadata={"help": "Nats, at most ln V: the coefficient of text follows the entropy (ReasonGen-R1 used 2.0)."},
    )
    entropy_target_image: float | None = field(
        default=None, metadata={"help": "The same for image codes (ReasonGen-R1 used 7.0; ln 16384 is 9.7)."}
    )
    entropy_coef_lr: float = field(default=5e-5, metadata={"help": "Learning rate of the controlled coefficients."})
    entropy_coef_limit: float = field(
        default=5e-3, metadata={"help": "Controlled coefficients stay within plus and minus this."}
    )
    rollout_correction: str = field(
        default="none",
        metadata={
            "help": "Weight each id by replay over rollout probability: `none`, `truncate` (clamp the ratio to the "
            "bounds) or `mask` (leave out ids whose ratio is outside): TRL's correction for vLLM, by token."
        },
    )
    rollout_correction_max: float = field(default=3.0, metadata={"help": "Upper bound of that ratio."})
    rollout_correction_min: float | None = field(default=None, metadata={"help": "Lower bound of it; unset: none."})

    # TRL and transformers defaults, set on purpose
    log_multimodal: bool = field(
        default=False, metadata={"help": "Unsupported: ranks without pictures would hang. Grids are written instead."}
    )
    disable_dropout: bool = field(
        default=True, metadata={"help": "Dropout would make the replay differ from the rollout."}
    )
    remove_unused_columns: bool | None = field(
        default=False, metadata={"help": "Keep every column: reward functions get them by name."}
    )
    num_generations_eval: int | None = field(default=1, metadata={"help": "Completions of each prompt in evaluation."})

    def __post_init__(self):
        self._check_fields()
        check_batch_sizes(
            processes=started_processes(),
            per_device=self.per_device_train_batch_size,
            accumulation=self.gradient_accumulation_steps,
            steps_per_generation=self.steps_per_generation,
            generation_batch_size=self.generation_batch_size,
            num_generations=self.num_generations,
        )
        select_backend(self)
        super().__post_init__()
        check_world_size(self)
        check_rows_of_a_process(self)

    def _check_fields(self) -> None:
        one_of(self, "task", ("t2i", "i2t", "both"))
        check_task_proportions(self)
        check_images_per_reasoning(self)
        at_least(self, "dynamic_sampling_max_rounds", 1, "set dynamic_sampling: false to sample once")
        one_of(self, "logp_guidance", ("guided", "conditional"))
        at_least(self, "guidance_scale", 1, "1 is no guidance, Janus was published with 5")
        at_least(self, "eval_guidance_scale", 1, "1 is no guidance, Janus was published with 5")
        at_least(self, "max_reasoning_length", 0, "0 opens the image at once")
        at_least(self, "rollout_batch_size", 1, "leave it unset to sample all rows at once")
        one_of(self, "vq_dtype", ("float32", "bfloat16"))
        at_least(self, "vq_batch_size", 1, "pictures that are decoded at a time")
        at_least(self, "sample_steps", 0, "0 draws the grid at start and end only")
        at_least(self, "num_samples", 0, "0 draws no grid")
        at_least(self, "monitor_window", 10, "a trend over fewer steps is noise; 100 is the default")
        at_least(self, "no_signal_patience", 2, "single steps without signal are normal; 10 is the default")
        check_stop_on_no_signal(self)
        check_report_to(self)
        check_prompt_template(self)
        check_reward_options(self)
        check_loss_options(self)
        check_base_model_id(self)
        for name in ("temperature", "image_temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be > 0. Use 1.0 to sample the model as it is.")
        refuse_unsupported(self, _UNSUPPORTED)
        if self.log_multimodal:
            raise ValueError("log_multimodal = True is not supported: sample grids are written instead. Remove it.")


@dataclass
class JanusSFTConfig(SFTConfig):
    """`trl.SFTConfig` for rows of reasoning, image codes and answers.

    Raises:
        ValueError: naming field, value, rule and fix.
    """

    guidance_dropout: float = field(
        default=0.1,
        metadata={"help": "Share of t2i rows whose prompt and reasoning are blanked as guidance blanks them."},
    )
    text_loss_weight: float = field(
        default=1.0, metadata={"help": "Weight of the loss of reasoning, answers, `<end_of_image>` and eos."}
    )
    image_loss_weight: float = field(default=1.0, metadata={"help": "Weight of the loss of image codes."})
    begin_of_image_loss_weight: float = field(
        default=1.0,
        metadata={"help": "Weight of the loss of `<begin_of_image>`; 0 where it is always forced (no reasoning)."},
    )
    prompt_template: str | None = field(default=None, metadata={"help": TEMPLATE_HELP})
    base_model_id: str | None = field(default=None, metadata={"help": BASE_MODEL_HELP})
    codes_cache_dir: str | None = field(
        default=None,
        metadata={"help": "Folder of the cache of image codes; `janus_trl_codes` in the cache of datasets if unset."},
    )
    num_samples: int = field(
        default=8, metadata={"help": "Held-out t2i prompts in the grid of each evaluation; 0: no grid."}
    )
    eval_guidance_scale: float = field(
        default=5.0, metadata={"help": "guidance_scale in sample grids, >= 1; the default of JanusGRPOConfig."}
    )
    max_reasoning_length: int | None = field(
        default=None,
        metadata={"help": "Most text tokens before the image in sample grids; unset: the longest in their rows."},
    )
    train_sampling_strategy: str = field(
        default="group_by_length",
        metadata={
            "help": "Batches of rows of like length, which saves padding; `random` mixes tasks in every batch.",
            "choices": ["random", "sequential", "group_by_length", "batch_rebalance"],
        },
    )
    remove_unused_columns: bool | None = field(default=False, metadata={"help": "The collator reads raw columns."})
    max_length: int | None = field(default=None, metadata={"help": "Unsupported: image codes cannot be cut."})

    def __post_init__(self):
        if not 0 <= self.guidance_dropout <= 1:
            raise ValueError(f"guidance_dropout = {self.guidance_dropout} must lie in 0 … 1. 0.1 is usual.")
        if self.max_length is not None or self.packing:
            raise ValueError("max_length and packing are not supported: image codes cannot be cut. Remove them.")
        refuse_unsupported(self, _UNSUPPORTED_IN_SFT)
        self._check_fields()
        self.dataset_kwargs = {**(self.dataset_kwargs or {}), "skip_prepare_dataset": True}
        select_backend(self)
        super().__post_init__()
        check_world_size(self)

    def _check_fields(self) -> None:
        weights = ("text_loss_weight", "image_loss_weight", "begin_of_image_loss_weight")
        for name in weights:
            at_least(self, name, 0, "0 leaves these labels out of the loss")
        at_least(self, "num_samples", 0, "0 draws no grid")
        at_least(self, "eval_guidance_scale", 1, "1 is no guidance, Janus was published with 5")
        at_least(self, "max_reasoning_length", 0, "0 opens the image at once")
        check_report_to(self)
        check_prompt_template(self)
        check_base_model_id(self)
        if self.loss_type == "dft" and any(getattr(self, name) != 1 for name in weights):
            raise ValueError(
                f"loss_type = 'dft' is not supported with weights of labels ({', '.join(weights)}): they would change "
                "the probabilities it multiplies with. Set loss_type: nll or all weights to 1."
            )
