"""Checks of what is sampled: images that share a reasoning."""

import math

from .config_checks import at_least


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
