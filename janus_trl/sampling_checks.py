"""Checks of what is sampled: tasks of a mixed run, images that share a reasoning."""

import json
import math
from collections.abc import Mapping

from .config_checks import at_least, did_you_mean

TASKS = ("t2i", "i2t")


def check_task_proportions(config) -> None:
    """Set `task_proportions` to one share per task, or None for a single task.

    Raises:
        ValueError: shares without `task: both`, an unknown or missing task, a share that is no number above 0, or
            shares that do not sum to 1.
    """
    given = config.task_proportions
    if config.task != "both":
        if given is not None:
            raise ValueError(f"task_proportions = {given} needs task: both, but task = {config.task!r}. Remove one.")
        return
    example = "Write e.g. task_proportions: {t2i: 0.5, i2t: 0.5}."
    if isinstance(given, str):  # from the command line
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ValueError(f"task_proportions = {given!r} is not valid JSON ({error}). {example}") from error
    given = dict.fromkeys(TASKS, 0.5) if given is None else given
    if not isinstance(given, Mapping):
        raise ValueError(f"task_proportions = {given!r} must map each task to its share. {example}")
    for name in given:
        if name not in TASKS:
            raise ValueError(
                f"task_proportions names {name!r}; tasks are: {', '.join(TASKS)}.{did_you_mean(name, TASKS)}"
            )
    shares = {task: _share(task, given, example) for task in TASKS}
    if not math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6):
        raise ValueError(f"task_proportions = {dict(given)} sum to {sum(shares.values()):g}, not to 1. {example}")
    config.task_proportions = shares


def _share(task: str, given: Mapping, example: str) -> float:
    try:
        share = float(given[task])
    except (KeyError, TypeError, ValueError):
        share = math.nan
    if not (math.isfinite(share) and share > 0):
        raise ValueError(
            f"task_proportions: the share of {task!r} is {given.get(task)!r}, but must be a number above 0 (for one "
            f"task alone set task: {task}). {example}"
        )
    return share


def check_images_per_reasoning(config) -> None:
    """Refuse images that cannot share a reasoning, or groups in which no two reasonings are compared.

    Raises:
        ValueError: naming field, value, rule and fix.
    """
    at_least(config, "images_per_reasoning", 1, "1 samples a reasoning for every image")
    images, group = config.images_per_reasoning, config.num_generations
    if images == 1:
        return
    if config.task == "i2t" or config.max_reasoning_length == 0:
        other = "task = 'i2t'" if config.task == "i2t" else "max_reasoning_length = 0"
        raise ValueError(
            f"images_per_reasoning = {images} needs a reasoning before an image, but {other}. "
            "Set images_per_reasoning: 1, or task: t2i with max_reasoning_length above 0."
        )
    if group % images or group < 2 * images:
        raise ValueError(
            f"images_per_reasoning = {images} must divide num_generations = {group} into at least 2 reasonings, which "
            f"the group compares. Set num_generations: {max(2, math.ceil(group / images)) * images}."
        )
    size = config.rollout_batch_size
    if size is not None and size % images:
        raise ValueError(
            f"rollout_batch_size = {size} must be a multiple of images_per_reasoning = {images}: the images of one "
            f"reasoning are drawn together. Set rollout_batch_size: {math.ceil(size / images) * images}."
        )


def check_rows_of_a_process(config) -> None:
    """Refuse a reasoning whose images would lie on two processes; called when the batch sizes are settled.

    Raises:
        ValueError: naming field, value, rule and fix.
    """
    rows, images = config.per_device_train_batch_size * config.steps_per_generation, config.images_per_reasoning
    if rows % images:
        raise ValueError(
            f"images_per_reasoning = {images} must divide the {rows} completions that a process samples at a time "
            f"(per_device_train_batch_size {config.per_device_train_batch_size} x {config.steps_per_generation}). "
            f"Set per_device_train_batch_size: {math.ceil(config.per_device_train_batch_size / images) * images}."
        )
