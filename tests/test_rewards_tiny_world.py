"""The reward of the embedded world."""

import numpy as np

from janus_trl.rewards import (
    get_reward_funcs,
)


def test_tiny_world_scores_true_pictures_with_one_and_blank_ones_with_less():
    from PIL import Image

    from janus_trl.tiny import render, sample_fulfilling, tiny_dataset

    rng = np.random.default_rng(0)
    demands = list(tiny_dataset("t2i", "validation", size=12)["demands"])
    pictures = [render(sample_fulfilling(demand, rng), rng) for demand in demands]
    reward = get_reward_funcs("tiny_world", "t2i", ["prompt", "demands"]).funcs[0]
    call = dict(prompts=[""] * 12, completions=[""] * 12, demands=demands)
    assert reward(**call, generated_images=pictures) == [1.0] * 12
    blank = reward(**call, generated_images=[Image.new("RGB", pictures[0].size, "white")] * 12)
    assert max(blank) < 1.0
