"""Checks of the options of the loss: each error names field, value, rule and fix."""

import math

from transformers import JanusConfig

from .config_checks import at_least, one_of

MODALITIES = ("text", "image")


def check_loss_options(config) -> None:
    """Refuse weights, clip ranges, entropy options and corrections of a `JanusGRPOConfig` that cannot work.

    Raises:
        ValueError: naming field, value, rule and fix.
    """
    for name in MODALITIES:
        _finite_at_least_0(config, f"{name}_loss_weight", "0 leaves these ids out of the loss")
        for field in (f"epsilon_{name}", f"epsilon_high_{name}"):
            _above_0(config, field, "0.2 is TRL's; leave it unset for epsilon and epsilon_high")
    if config.text_loss_weight == config.image_loss_weight == 0:
        raise ValueError("text_loss_weight and image_loss_weight are both 0: nothing is trained. Set one above 0.")
    _check_clipping(config)
    _check_entropy(config)
    _check_correction(config)
    _check_trained(config)


def _check_trained(config) -> None:
    """Refuse a run whose only modality has no weight, and entropy targets of a modality that it never samples."""
    alone = {"i2t": "text", "t2i": None if config.max_reasoning_length else "image"}.get(config.task)
    if alone is None:
        return
    name, other = f"{alone}_loss_weight", "image" if alone == "text" else "text"
    why = f"task = {config.task!r}" + (
        f" with max_reasoning_length = {config.max_reasoning_length}" * (alone == "image")
    )
    if getattr(config, name) == 0:
        raise ValueError(f"{name} = 0.0: {why} samples nothing else, so nothing is trained. Set it above 0.")
    if getattr(config, f"entropy_target_{other}") is not None:
        raise ValueError(
            f"entropy_target_{other} = {getattr(config, f'entropy_target_{other}')} has no effect: {why} samples no "
            f"{other}. Remove it."
        )


def _above_0(config, name: str, hint: str) -> None:
    value = getattr(config, name)
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} = {value} must be a finite number > 0 ({hint}).")


def _finite_at_least_0(config, name: str, hint: str) -> None:
    at_least(config, name, 0, hint)
    if math.isinf(getattr(config, name)):
        raise ValueError(f"{name} = {getattr(config, name)} must be finite. 1.0 is TRL's loss.")


def _check_clipping(config) -> None:
    fields = [f"epsilon{high}_{name}" for high in ("", "_high") for name in MODALITIES]
    found = [name for name in fields if getattr(config, name) is not None]
    if not found:
        return
    if config.importance_sampling_level != "token":
        raise ValueError(
            f"{found[0]} = {getattr(config, found[0])} needs importance_sampling_level: token, since a ratio of the "
            f"whole row ({config.importance_sampling_level!r}) has no modality. Set it, or remove {found[0]}."
        )
    if config.loss_type == "cispo" and not found[0].startswith("epsilon_high"):
        raise ValueError(
            f"{found[0]} = {getattr(config, found[0])} is a distance from 1, and loss_type = 'cispo' caps the ratio "
            f"itself at epsilon_high. Set {found[0].replace('epsilon', 'epsilon_high')}, e.g. 5.0."
        )
    if config.loss_type in ("sapo", "vespo"):
        raise ValueError(
            f"{found[0]} = {getattr(config, found[0])} has no effect with loss_type = {config.loss_type!r}, which does "
            f"not clip. Set loss_type: dapo, or remove {found[0]}."
        )


def _check_entropy(config) -> None:
    _above_0(config, "entropy_coef_lr", "ReasonGen-R1 trained with 5e-5")
    _above_0(config, "entropy_coef_limit", "ReasonGen-R1 trained with 5e-3")
    wanted = []
    for name in MODALITIES:
        coefficient, target = getattr(config, f"entropy_coef_{name}"), getattr(config, f"entropy_target_{name}")
        if not math.isfinite(coefficient):
            raise ValueError(f"entropy_coef_{name} = {coefficient} must be a finite number. 0.0 is none.")
        _above_0(config, f"entropy_target_{name}", "nats; leave it unset for no control")
        if target is not None and abs(coefficient) > config.entropy_coef_limit:
            raise ValueError(
                f"entropy_coef_{name} = {coefficient} is where the control of entropy_target_{name} starts, so it must "
                f"lie within ± entropy_coef_limit = {config.entropy_coef_limit}. Lower it, or raise the limit."
            )
        wanted += [name] if coefficient != 0 or target is not None else []
    if wanted and (config.entropy_coef != 0 or config.use_adaptive_entropy):
        raise ValueError(
            f"entropy_coef = {config.entropy_coef}, use_adaptive_entropy = {config.use_adaptive_entropy} act on text "
            f"and image codes together, and the {wanted[0]} entropy has options of its own here. Set entropy_coef: 0.0 "
            "and use_adaptive_entropy: false, or remove entropy_coef_* and entropy_target_*."
        )


def _check_correction(config) -> None:
    one_of(config, "rollout_correction", ("none", "truncate", "mask"))
    _above_0(config, "rollout_correction_max", "3.0 is TRL's for vLLM")
    at_least(config, "rollout_correction_min", 0, "leave it unset for no lower bound")
    low, high = config.rollout_correction_min, config.rollout_correction_max
    if config.rollout_correction != "none" and not (low or 0) <= 1 <= high:
        raise ValueError(
            f"rollout_correction_min = {low}, rollout_correction_max = {high} must have 1 between them, the ratio "
            "where sampler and trainer agree. 3.0 and unset are TRL's for vLLM."
        )
    if low is not None and not low < high:
        raise ValueError(f"rollout_correction_min = {low} must be < rollout_correction_max = {high}. Lower it.")


def check_entropy_targets(args, config: JanusConfig) -> None:
    """Refuse a target that no distribution of the model reaches.

    Args:
        args: a `JanusGRPOConfig`.
        config: that of the checkpoint, which is read before its weights.

    Raises:
        ValueError: if a target is above the logarithm of the number of text ids, or of image codes.
    """
    counts = {"text": config.text_config.vocab_size, "image": config.vq_config.num_embeddings}
    for name, count in counts.items():
        target = getattr(args, f"entropy_target_{name}")
        if target is not None and target > math.log(count):
            raise ValueError(
                f"entropy_target_{name} = {target} must be <= ln {count} = {math.log(count):.3f} nats, the entropy of "
                f"{count} equally likely {'codes' if name == 'image' else 'ids'}. Lower it; entropy/{name} of the "
                "first steps is a good start."
            )
