"""What is asked of a neural reward before training: it tells a blank picture from a noisy one."""

from collections.abc import Callable

from janus_trl.rewards.event_loop import run_until_complete

CAPTION = "a photo of a red cat on a chair"
SIZE = 64  # pixels; scorers resize


def check_on_pictures(reward: Callable) -> None:
    """Score one blank and one noise picture; weights that were not loaded and mixed-up arguments show here.

    Args:
        reward: A reward of `get_reward_funcs`.

    Raises:
        ValueError: It raises, a score is missing or not finite, or both are equal. Names the reward.
    """
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    pictures = [Image.new("RGB", (SIZE, SIZE), "white"), Image.fromarray(noise)]
    failed = f"reward '{reward.__name__}' failed its self-test on a blank and a noise picture"
    arguments = {"prompts": [CAPTION] * 2, "completions": [CAPTION] * 2, "completion_ids": [[0], [0]]}
    try:
        values = run_until_complete(reward(**arguments, generated_images=pictures))
    except Exception as error:
        raise ValueError(f"{failed}: {type(error).__name__}: {error}") from error
    if values.faults or None in values:
        raise ValueError(f"{failed}: the scores are {[values.faults.get(i, v) for i, v in enumerate(values)]}.")
    if values[0] == values[1]:
        raise ValueError(f"{failed}: both score {values[0]}. Are the weights of the right model loaded?")
