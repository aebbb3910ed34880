"""Arguments of the scripts beside those of the trainers: data, rewards, kind of run, LoRA."""

from dataclasses import dataclass, field

from peft import LoraConfig
from trl import ModelConfig

from .config_checks import did_you_mean

# The seven projections of the language model; anchored, because bare names match the vision tower too (UniRL#228).
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


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
        metadata={
            "help": "Names, dotted paths (my_pkg.mod.fn, module:function) or mappings {name, weight, alias, args}."
        },
    )
    reward_batch_size: int | None = field(
        default=None, metadata={"help": "Rows that a neural reward scores at a time, unless its args say; 8 if unset."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Check recipe, data and rewards, say what it is, exit 0."})
    num_processes: int | None = field(
        default=None, metadata={"help": "dry_run: processes the run will have; those of accelerate_config if unset."}
    )
    accelerate_config: str | None = field(
        default=None, metadata={"help": "dry_run: file or name in accelerate_configs/ that the run will have."}
    )
    gpu_memory_gib: float | None = field(
        default=None, metadata={"help": "dry_run: compare the planned memory with it; the visible GPU's if unset."}
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
