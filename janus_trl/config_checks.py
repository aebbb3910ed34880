"""Checks of configuration values: each error names field, value, rule and fix."""

import difflib
import math
import os
import re
from collections.abc import Iterable

import torch
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)


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


def check_reward_options(config) -> None:
    """Refuse what the rewards cannot be called or summed with."""
    one_of(config, "on_reward_error", ("raise", "none"))
    if config.reward_timeout is not None and not config.reward_timeout > 0:
        raise ValueError(f"reward_timeout = {config.reward_timeout} must be > 0 seconds, or null for no limit.")
    weights = config.reward_weights or []
    if not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"reward_weights = {weights} must be finite numbers. Write e.g. reward_weights: [1.0, 0.5].")
    if weights and not any(weights):
        raise ValueError(
            f"reward_weights = {weights}: nothing would be trained on. A weight of 0 only logs a reward; give at least "
            "one another weight."
        )


def check_stop_on_no_signal(config) -> None:
    """Refuse to stop on what nobody looks for."""
    if config.stop_on_no_signal and not config.monitor:
        raise ValueError(
            "stop_on_no_signal = True needs monitor = True, which finds out. Set monitor: true, or remove "
            "stop_on_no_signal."
        )


def check_report_to(config) -> None:
    """Refuse a dashboard that is unknown or not installed: transformers would find out after the weights are loaded."""
    asked = [config.report_to] if isinstance(config.report_to, str) else list(config.report_to or [])
    if not asked or asked in (["none"], ["all"]):
        return  # and import none of them
    available = get_available_reporting_integrations()
    for name in asked:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ["none", "all", *sorted(INTEGRATION_TO_CALLBACK)]
            raise ValueError(f"report_to = {name!r} must be one of: {', '.join(known)}.{did_you_mean(name, known)}")
        if name not in available and name != "flyte":  # which has no check of its own
            raise ValueError(
                f"report_to = {name!r} is not installed. Install it (pip install {name}), or set report_to: none; "
                "sample grids, curve.png and trainer_state.json are written to output_dir anyway."
            )


def check_base_model_id(config) -> None:
    """Refuse a `base_model_id` that is no Hub id."""
    name = config.base_model_id
    if name is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(
            f"base_model_id = {name!r} must be a Hub id, owner/name, under which others find the base. Write e.g. "
            "base_model_id: deepseek-community/Janus-Pro-1B, or leave it unset."
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


def started_processes() -> int:
    """Of this run, over all machines; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1))


def select_backend(config) -> None:
    """Set what a machine without GPU needs, before transformers starts the process group.

    accelerate otherwise believes in one process, silently, when several run on CPU; and bf16 defaults to on.

    Raises:
        ValueError: bf16 with DeepSpeed on CPUs: transformers' message asks for `use_cpu`, which it must not have then.
    """
    if torch.cuda.is_available():
        return
    with_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if started_processes() > 1:
        config.ddp_backend = config.ddp_backend or "gloo"
    if with_deepspeed and config.bf16:
        raise ValueError(
            f"bf16 = {config.bf16}, but no GPU is visible: DeepSpeed trains in float32 on CPU processes. Set bf16: "
            "false, or launch with accelerate_configs/ddp.yaml."
        )
    config.use_cpu = not with_deepspeed
    if config.bf16 is None and not config.fp16:
        config.bf16 = False


def check_world_size(config) -> None:
    """Refuse to train as several independent processes that each believe to be alone."""
    started = started_processes()
    if config.world_size != started:
        raise ValueError(
            f"{started} processes were started, but accelerate sees {config.world_size}. "
            "Launch with one of the files in accelerate_configs/ (accelerate launch --config_file …)."
        )
