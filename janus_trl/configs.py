"""Arguments of the trainers and scripts, and every check that needs no weights."""

import difflib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from peft import LoraConfig
from trl import GRPOConfig, ModelConfig, SFTConfig

# The seven projections of the language model; anchored, because bare names match the vision tower too (UniRL#228).
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

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


@dataclass
class JanusGRPOConfig(GRPOConfig):
    """`trl.GRPOConfig` with the options of Janus rollouts; all options of TRL and transformers work as there.

    Raises:
        ValueError: naming field, value, rule and fix, before any weights are loaded.
    """

    task: str = field(
        default="t2i", metadata={"help": "`t2i` (text, then an image) or `i2t` (a text answer about pictures)."}
    )
    max_reasoning_length: int = field(
        default=0, metadata={"help": "t2i: most text tokens before the image; 0 opens the image at once."}
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
    rollout_batch_size: int | None = field(
        default=None, metadata={"help": "Rows that are sampled at a time on each process; all if unset."}
    )
    use_cuda_graphs: bool = field(
        default=True, metadata={"help": "On a GPU, capture a decode step as a CUDA graph (off: for debugging)."}
    )
    keep_rollout_buffers: bool = field(
        default=True,
        metadata={
            "help": "On a GPU, keep caches and graphs between rollouts. Off frees the caches before the loss "
            "(Janus-Pro-7B: 0.5 MiB a position, row and stream, 20 GiB for 32 guided rows) and captures again."
        },
    )
    sample_steps: int = field(
        default=0, metadata={"help": "Write a grid of held-out samples every so many steps; 0: at start and end."}
    )
    num_samples: int = field(default=8, metadata={"help": "Held-out prompts in the sample grid; 0: no grid."})
    prompt_template: str | None = field(default=None, metadata={"help": TEMPLATE_HELP})

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
            processes=int(os.environ.get("WORLD_SIZE", 1)),
            per_device=self.per_device_train_batch_size,
            accumulation=self.gradient_accumulation_steps,
            steps_per_generation=self.steps_per_generation,
            generation_batch_size=self.generation_batch_size,
            num_generations=self.num_generations,
        )
        select_backend(self)
        super().__post_init__()
        check_world_size(self)

    def _check_fields(self) -> None:
        one_of(self, "task", ("t2i", "i2t"))
        one_of(self, "logp_guidance", ("guided", "conditional"))
        at_least(self, "guidance_scale", 1, "1 is no guidance, Janus was published with 5")
        at_least(self, "eval_guidance_scale", 1, "1 is no guidance, Janus was published with 5")
        at_least(self, "max_reasoning_length", 0, "0 opens the image at once")
        at_least(self, "rollout_batch_size", 1, "leave it unset to sample all rows at once")
        at_least(self, "sample_steps", 0, "0 draws the grid at start and end only")
        at_least(self, "num_samples", 0, "0 draws no grid")
        check_prompt_template(self)
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
        check_prompt_template(self)
        if self.loss_type == "dft" and any(getattr(self, name) != 1 for name in weights):
            raise ValueError(
                f"loss_type = 'dft' is not supported with weights of labels ({', '.join(weights)}): they would change "
                "the probabilities it multiplies with. Set loss_type: nll or all weights to 1."
            )


@dataclass
class JanusScriptArguments:
    """Data, rewards and the kind of run."""

    dataset_name: str = field(
        default=None,
        metadata={"help": "`tiny` (embedded), a .txt/.jsonl/.csv/.parquet file, a folder, or a Hub id."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    dataset_format: str | None = field(
        default=None,
        metadata={
            "help": "Published layout: prompts, reasongen_rl, reasongen_sft, t2i_r1, geneval, geometry3k or "
            "vqa; unset for rows that have our columns."
        },
    )
    dataset_mixture: list[str] | None = field(
        default=None,
        metadata={
            "help": "Instead of dataset_name: mappings {name, weight} with task, config, format, train_split, "
            "test_split and the column fields where they differ."
        },
    )
    dataset_seed: int = field(default=0, metadata={"help": "Seed of a mixture's order and of a layout's choices."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split that is trained on."})
    dataset_test_split: str | None = field(default=None, metadata={"help": "Held-out split for evaluation and grids."})
    dataset_streaming: bool = field(default=False, metadata={"help": "Unsupported: groups need a sampler."})
    max_train_rows: int | None = field(default=None, metadata={"help": "Use the first so many training rows."})
    max_test_rows: int | None = field(default=None, metadata={"help": "Use the first so many held-out rows."})
    text_column: str = field(default="prompt", metadata={"help": "Column of the user's text."})
    image_column: str | None = field(default=None, metadata={"help": "i2t: column of the picture or pictures."})
    answer_column: str = field(default="answer", metadata={"help": "i2t: column of the gold answer."})
    choices_column: str | None = field(default=None, metadata={"help": "i2t: column of the option texts."})
    validate_rows: int = field(
        default=1000, metadata={"help": "Rows looked at before weights load, evenly spaced; 0: none, -1: all."}
    )
    bad_rows: str = field(
        default="error",
        metadata={"help": "`error` refuses data with a bad row; `skip` drops such rows, which checks them all."},
    )
    max_image_pixels: int | None = field(
        default=None, metadata={"help": "Larger pictures are refused; PIL's limit of 179 million pixels if unset."}
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={"help": "Names, dotted paths (my_pkg.mod.fn, module:function) or mappings {name, weight, args}."},
    )
    dry_run: bool = field(default=False, metadata={"help": "Check recipe, data and rewards, say what it is, exit 0."})
    num_processes: int | None = field(default=None, metadata={"help": "dry_run: processes the run will have."})


def one_of(config, name: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not in `allowed`, suggesting the nearest."""
    value = getattr(config, name)
    if value not in allowed:
        raise ValueError(f"{name} = {value!r} must be one of: {', '.join(allowed)}.{did_you_mean(value, allowed)}")


def check_prompt_template(config) -> None:
    """Refuse a `prompt_template` that has no place for the user's text."""
    template = config.prompt_template
    if template is not None and "{prompt}" not in template:
        raise ValueError(
            f"prompt_template = {template!r} must contain {{prompt}}, the place of the user's text. "
            'Write e.g. prompt_template: "Plan the picture first. {prompt}", or leave it unset.'
        )


def did_you_mean(name, known: Iterable[str]) -> str:
    """The question whether the nearest of `known` was meant, with a leading space; empty if none is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def refuse_unsupported(config, unsupported: dict[str, tuple]) -> None:
    """Refuse every field of `unsupported` (name -> allowed value, reason) that has another value."""
    for name, (allowed, reason) in unsupported.items():
        if getattr(config, name) != allowed:
            raise ValueError(
                f"{name} = {getattr(config, name)!r} is not supported: {reason}. Set {name}: {allowed} or remove it."
            )


def at_least(config, name: str, bound: float, hint: str) -> None:
    """Refuse a value below `bound`; None passes."""
    value = getattr(config, name)
    if value is not None and not value >= bound:
        raise ValueError(f"{name} = {value} must be >= {bound} ({hint}).")


def check_batch_sizes(
    processes: int,
    per_device: int,
    accumulation: int,
    num_generations: int,
    steps_per_generation: int | None = None,
    generation_batch_size: int | None = None,
) -> None:
    """The completions of a generation batch have to be whole groups.

    Raises:
        ValueError: with the sum and two fixes.
    """
    if num_generations < 2:
        raise ValueError(
            f"num_generations = {num_generations}: GRPO compares the completions of one prompt, so a group needs at "
            "least 2. Set num_generations: 8."
        )
    unit = per_device * processes
    whole = math.lcm(unit, num_generations)  # the smallest batch of whole groups that all processes fill
    if generation_batch_size is not None:
        total, terms = generation_batch_size, f"generation_batch_size {generation_batch_size}"
        fix = f"generation_batch_size: {math.ceil(total / whole) * whole}"
    else:
        steps = steps_per_generation or accumulation
        name = "steps_per_generation" if steps_per_generation else "gradient_accumulation_steps"
        total = unit * steps
        terms = f"{processes} processes x per_device_train_batch_size {per_device} x {name} {steps} = {total}"
        size = math.ceil(total / whole) * whole
        fix = f"{name}: {size // unit} ({size} completions a {'rollout' if steps_per_generation else 'step'})"
    if total % num_generations == 0:
        return
    divisors = [g for g in range(2, total + 1) if total % g == 0]
    nearest = min(divisors, key=lambda g: abs(g - num_generations)) if divisors else None
    fixes = [fix]
    fixes.append(f"num_generations: {nearest}" if nearest else f"per_device_train_batch_size: {num_generations}")
    raise ValueError(
        f"{terms} completions do not divide into groups of num_generations = {num_generations} "
        f"(the batch size counts completions, not prompts). Set {' or '.join(fixes)}."
    )


def select_backend(config) -> None:
    """Set what a machine without GPU needs, before transformers starts the process group.

    accelerate otherwise believes in one process, silently, when several run on CPU; and bf16 defaults to on.
    """
    if torch.cuda.is_available():
        return
    with_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        config.ddp_backend = config.ddp_backend or "gloo"
    config.use_cpu = not with_deepspeed
    if config.bf16 is None and not config.fp16:
        config.bf16 = False


def check_world_size(config) -> None:
    """Refuse to train as several independent processes that each believe to be alone."""
    started = int(os.environ.get("WORLD_SIZE", 1))
    if config.world_size != started:
        raise ValueError(
            f"{started} processes were started, but accelerate sees {config.world_size}. "
            "Launch with one of the files in accelerate_configs/ (accelerate launch --config_file …)."
        )


def lora_config(model_args: ModelConfig) -> LoraConfig | None:
    """LoRA on the language model, or None without `use_peft`.

    `lora_target_modules` names projections (the default: all seven); the adapters never reach the vision tower or the
    heads, whatever the names match there.

    Raises:
        ValueError: on a name that is no projection of the language model.
    """
    if not model_args.use_peft:
        return None
    names = model_args.lora_target_modules or PROJECTIONS
    names = PROJECTIONS if names in ("all-linear", ["all-linear"]) else [names] if isinstance(names, str) else names
    if unknown := sorted(set(names) - set(PROJECTIONS)):
        raise ValueError(
            f"lora_target_modules: {unknown} are no projections of the language model. Use any of: "
            f"{', '.join(PROJECTIONS)}; or leave it unset for all of them.{did_you_mean(unknown[0], PROJECTIONS)}"
        )
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=rf"model\.language_model\.layers\.\d+\.(self_attn|mlp)\.({'|'.join(sorted(names))})",
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        bias="none",
    )
