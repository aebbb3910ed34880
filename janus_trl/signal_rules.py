"""The ways in which a run is silently dead, read off its log: one rule per cause, one plain sentence per finding.

A rule gets the training rows of the log so far (`training_rows`) and returns a sentence, or None. Numbers are judged
over steps, not over rows, so that `logging_steps` does not change when a rule speaks.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .run_log import (
    TASKS,
    Row,
    always,
    drift_over_noise,
    drift_per_step,
    last_steps,
    logging_interval,
    rows_by_task,
    series,
)

MOST_PROMPT_VARIANCE = 0.8  # UniRL#141 learned nothing at 0.89; the tiny runs have 0.1 to 0.5
LARGE_KL = 1.0  # nats a token: with 576 codes the reference finds a picture e^-576 as likely
HUGE_KL = 1e3  # a single row of it is enough: a few tokens left the support of the reference (torchforge#664)
ROUNDING_DRIFT = 0.05  # twice the bfloat16 drift measured at guidance 1
SPIKE = 10.0  # gradient norm over the median of the window
COLLAPSED = 0.05  # entropy below this share of its start
SURE = 2.33  # one-sided 99 %
COPIES = "all completions of a prompt are the same"
LESS_COPIES = "Raise temperature, lower learning_rate, or go back to an earlier checkpoint."


@dataclass(frozen=True)
class SignalSettings:
    """What the rules know beside the log.

    Args:
        window: steps after which a reward that does not rise is called dead, and over which trends are taken.
        patience: steps in a row without any signal before the monitor speaks.
        scale_rewards: as in `GRPOConfig`.
        mask_truncated_completions: as in `GRPOConfig`.
        guidance_scale: w of the guidance whose log-probs are trained; None if other log-probs than the sampled ones
            are trained on purpose.
        max_entropy: ln(vocabulary size) of `text` and `image`.
    """

    window: int = 100
    patience: int = 10
    scale_rewards: str = "group"
    mask_truncated_completions: bool = False
    guidance_scale: float | None = 1.0
    max_entropy: Mapping[str, float] = field(default_factory=dict)


# Nothing to learn from -----------------------------------------------------------------------------------------------


def unscorable(rows: Sequence[Row], settings: SignalSettings) -> str | None:
    """No reward function gave a number."""
    recent = last_steps(rows, settings.patience)
    if not recent or any(isinstance(row["reward"], int | float) and math.isfinite(row["reward"]) for row in recent):
        return None
    return (
        f"No completion of the last {settings.patience} steps could be scored, so nothing is learned: every reward "
        "function returned None. Check the columns that the rewards read."
    )


def no_signal(rows: Sequence[Row], settings: SignalSettings) -> str | None:
    """All groups are flat: every advantage is 0."""
    recent = last_steps(rows, settings.patience)
    if not always(recent, "signal/flat_groups", lambda share: share > 1 - 1e-9) or not series(recent, "reward"):
        return None
    start = f"No group of the last {settings.patience} steps had any spread of rewards, so nothing is learned: "
    if always(recent, "signal/duplicates", lambda share: share > 0.99):
        return f"{start}{COPIES}. {LESS_COPIES}"
    rewards = series(recent, "reward")  # a rollout of one prompt has no spread between groups, but the steps have
    mean, between = statistics.fmean(rewards), max(series(recent, "signal/between_group_std"))
    between = max(between, statistics.pstdev(rewards))
    if between > 1e-6 * abs(mean):
        return (
            f"{start}rewards differ between prompts (standard deviation {between:.2g}) but never between the "
            "completions of one. Check that the reward reads the completion, use a finer one, or a larger "
            "num_generations."
        )
    return (
        f"{start}every completion got the reward {mean:.4g}. Check the reward on a few completions by hand, use a "
        "finer one, or easier (harder) prompts."
    )


def no_signal_of_a_task(rows: Sequence[Row], settings: SignalSettings) -> str | None:
    """In a run of both tasks, all groups of one are flat, while the other learns."""
    parts = rows_by_task(rows)
    if len(parts) < 2 or not last_steps(rows, settings.patience) or no_signal(rows, settings):
        return None
    for task, part in zip(TASKS, parts, strict=True):
        patience = math.ceil(settings.patience * len(rows) / len(part))  # as many rollouts of the task
        if sentence := no_signal(part, replace(settings, patience=patience)):
            return f"Task {task}: {sentence[0].lower()}{sentence[1:]}"
    return None


def zero_gradient(rows: Sequence[Row], settings: SignalSettings) -> str | None:
    """Rewards differ within groups, and still no gradient arrives."""
    recent = last_steps(rows, settings.patience)
    if not always(recent, "grad_norm", lambda norm: norm <= 1e-9):
        return None
    if not always(recent, "signal/within_group_std", lambda std: std > 0) or not always(
        recent, "signal/flat_groups", lambda share: share < 1
    ):
        return None
    start = (
        f"The gradient of the last {settings.patience} steps was 0 although rewards differ within groups "
        f"(standard deviation {statistics.fmean(series(recent, 'signal/within_group_std')):.2g}): "
    )
    clipped = always(recent, "completions/clipped_ratio", lambda share: share > 0.99)
    if clipped and settings.mask_truncated_completions:
        return (
            start + "every completion counts as truncated and mask_truncated_completions drops those. Raise "
            "max_completion_length, or set mask_truncated_completions: false."
        )
    if always(recent, "signal/duplicates", lambda share: share > 0.99):
        return start + f"{COPIES}, and their gradients cancel. {LESS_COPIES}"
    return start + "the loss does not reach a trained weight. Check loss weights, masks, and what requires a gradient."


def zero_learning_rate(rows: Sequence[Row], settings: SignalSettings) -> str | None:
    """The weights stand still whatever the gradient is."""
    recent = last_steps(rows, settings.patience)
    if not always(recent, "learning_rate", lambda rate: rate == 0):
        return None
    return (
        f"The learning rate of the last {settings.patience} steps was 0, so no weight moves. Check learning_rate, "
        "lr_scheduler_type and the warm-up against max_steps."
    )


# Signal that is lost -------------------------------------------------------------------------------------------------


def prompt_variance(rows: Sequence[Row], settings: SignalSettings) -> str | None:
    """Advantages are divided by a spread that is prompt difficulty."""
    recent = last_steps(rows, settings.patience)
    shares = series(recent, "signal/prompt_variance_share")
    if settings.scale_rewards != "batch" or not shares or statistics.fmean(shares) < MOST_PROMPT_VARIANCE:
        return None
    share = statistics.fmean(shares)
    return (
        f"{share:.0%} of the reward variance lies between prompts, which the policy cannot act on, and scale_rewards: "
        f"batch divides by it: advantages are {1 / math.sqrt(1 - min(share, 0.9999)):.1f} times too small. Set "
        "scale_rewards: group, or use more completions a prompt (num_generations)."
    )


def flat_reward(rows: Sequence[Row], settings: SignalSettings) -> str | None:
    """The reward has not moved since the start: drift over noise below 1, surely.

    The ratio of a run without trend scatters by sqrt(12 / n): the rule speaks when ratio + 2.33 sqrt(12 / n) < 1, and
    never again once the ratio was 1. It looks at the first five windows: a run that has learned may well be flat later.
    """
    steps = logging_interval(rows) * len(rows)
    if not settings.window <= steps <= 5 * settings.window:
        return None
    interval, parts = logging_interval(rows), rows_by_task(rows)
    drifts = [drift_per_step(part, interval) for part in parts]
    if not all(ratio + SURE * error < 1 for ratio, error in drifts):  # NaN is not
        return None
    if any(has_risen(part, settings.window * len(part) / len(rows), interval) for part in parts):
        return None
    ratio = max(ratio for ratio, _ in drifts)
    return (
        f"The reward has not risen in {int(steps)} steps: its drift is {ratio:.2f} of its step-to-step noise (learning "
        "runs reach 1 and more). Raise learning_rate, or use more prompts and num_generations a step."
    )


def has_risen(rows: Sequence[Row], window: float, interval: float) -> bool:
    """Whether the drift since the start was once above the noise, from the first full window (in steps) on."""
    first = max(10, math.ceil(window / max(1.0, interval)))
    ends = range(first, len(rows) + 1, max(1, first // 4))
    return any(drift_per_step(rows[:end], interval)[0] >= 1 for end in ends)


def falling_reward(rows: Sequence[Row], settings: SignalSettings) -> str | None:
    """The reward (of a task) falls, and is lower than at the start."""
    interval = logging_interval(rows)
    for part in rows_by_task(rows):
        recent = last_steps(part, settings.window, at_least=10)
        ratio, error = drift_per_step(recent, interval)
        quarter = max(3, len(recent) // 4)
        if not ratio + SURE * error <= -1:  # NaN is not
            continue
        before, after = (statistics.fmean(series(ends, "reward")) for ends in (part[:quarter], recent[-quarter:]))
        if after < before:
            return (
                f"The reward is falling: from {before:.3g} at the start to {after:.3g}, by {-ratio:.1f} times its "
                f"noise in the last {settings.window} steps. Check its sign, lower learning_rate, or go back to an "
                "earlier checkpoint."
            )
    return None


# A policy that runs away ---------------------------------------------------------------------------------------------


def entropy(rows: Sequence[Row], settings: SignalSettings, name: str) -> str | None:
    """Entropy of one modality near 0, or half-way from its start to that of random ids."""
    count, found = len(last_steps(rows, settings.patience)), series(rows, f"entropy/{name}")
    if not count or len(found) < 2 * count:  # in a run of both tasks, not every row has ids of this modality
        return None
    first, values = found[:count], found[-count:]
    start, now = statistics.fmean(first), statistics.median(values)
    if start > 0 and max(values) < COLLAPSED * start:
        return (
            f"The entropy of {name} ids collapsed from {start:.3g} to {now:.2g} nats: completions become copies "
            "of each other, and groups lose their spread. Lower learning_rate, raise beta, or reward entropy."
        )
    most = settings.max_entropy.get(name, math.inf)
    if min(values) > (start + most) / 2:
        return (
            f"The entropy of {name} ids exploded from {start:.3g} to {now:.3g} nats ({most:.3g} is random): the policy "
            "forgets what it knew. Lower learning_rate, raise beta, or go back to an earlier checkpoint."
        )
    return None


def kl_explosion(rows: Sequence[Row], settings: SignalSettings) -> str | None:
    """The policy leaves the reference."""
    recent = last_steps(rows, settings.patience)
    values = series(recent, "kl")
    if not values or (statistics.median(values) < LARGE_KL and values[-1] < HUGE_KL):
        return None
    kl = statistics.median(values) if statistics.median(values) >= LARGE_KL else values[-1]
    ends = [series(part[-max(10, len(recent)) :], "reward") for part in rows_by_task(rows)]
    rising = any(len(rewards) > 2 and drift_over_noise(rewards) > 0 for rewards in ends)
    start = "The reward rises while the" if rising else "The"
    meaning = "it is probably the reward that is being fooled; look at the samples" if rising else "it is far off"
    return (
        f"{start} policy leaves the reference (KL {kl:.3g} nats a token): {meaning}. Raise beta, lower learning_rate, "
        "or go back to an earlier checkpoint."
    )


def replay_drift(rows: Sequence[Row], settings: SignalSettings) -> str | None:
    """Rollout and replay disagree by more than rounding.

    Guidance mixes two streams, (1 - w) u + w c, and their independent rounding errors by sqrt(w^2 + (w - 1)^2).
    """
    scale, recent = settings.guidance_scale, last_steps(rows, settings.patience)
    if scale is None or not series(recent, "logps/drift_mean"):
        return None
    bound = ROUNDING_DRIFT * math.hypot(scale, scale - 1)
    drift = statistics.median(series(recent, "logps/drift_mean"))
    if drift < bound:
        return None
    return (
        f"Log-probs of rollout and replay differ by {drift:.2g} on average, where rounding explains {bound:.2g}: what "
        "is trained is not what was sampled. Check that both use the same weights, temperature, guidance and padding."
    )


def gradient_spikes(rows: Sequence[Row], settings: SignalSettings) -> str | None:
    """Two of the last steps have ten times the usual gradient norm."""
    for part in rows_by_task(rows):  # the norms of two tasks may well differ by more than that
        recent = part[-max(settings.patience, 2) :]
        usual = [norm for norm in series(part[-settings.window :], "grad_norm") if norm > 0]
        if len(usual) < 10:
            continue
        median = statistics.median(usual)
        spikes = [norm for norm in series(recent, "grad_norm") if norm > SPIKE * median]
        if len(spikes) >= 2:
            return (
                f"The gradient norm spikes: {max(spikes):.3g} where {median:.3g} is usual, {len(spikes)} times in the "
                f"last {len(recent)} logged steps. Lower learning_rate or max_grad_norm, and look at the samples."
            )
    return None


RULES: dict[str, Callable[[Sequence[Row], SignalSettings], str | None]] = {
    "unscorable": unscorable,
    "no_signal": no_signal,
    "no_signal_of_a_task": no_signal_of_a_task,
    "zero_gradient": zero_gradient,
    "zero_learning_rate": zero_learning_rate,
    "prompt_variance": prompt_variance,
    "falling_reward": falling_reward,
    "flat_reward": flat_reward,
    "entropy_text": lambda rows, settings: entropy(rows, settings, "text"),
    "entropy_image": lambda rows, settings: entropy(rows, settings, "image"),
    "kl_explosion": kl_explosion,
    "replay_drift": replay_drift,
    "gradient_spikes": gradient_spikes,
}
DEAD = ("unscorable", "no_signal", "zero_gradient", "zero_learning_rate")  # no weight will ever move
CONSEQUENCES = {  # what a cause that was told explains too
    **{cause: ("flat_reward", "prompt_variance", "no_signal_of_a_task") for cause in DEAD},
    "falling_reward": ("flat_reward",),
    "entropy_text": ("gradient_spikes",),  # against a median of almost nothing
    "entropy_image": ("gradient_spikes",),
}
