"""The self-test of scorers of one's own, before training."""

import asyncio

import numpy as np
import pytest
from PIL import Image

from janus_trl.evaluation import call_rewards
from janus_trl.rewards import get_reward_funcs


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("swapped", "failed its self-test .*: AttributeError"),
        ([1.0], "failed its self-test .*returned 1 values; expected a list of 2"),
        ([1.0, None], r"the scores are \[1.0, None\]"),
        ([0.5, 0.5], "both score 0.5"),
    ],
)
def test_a_scorer_of_ones_own_that_fails_its_self_test_ends_the_start(result, message):
    class Mine:
        self_test = True

        def __call__(self, prompts, generated_images):
            if result == "swapped":
                return [caption.size for caption in prompts]
            return result

    with pytest.raises(ValueError, match=f"reward 'Mine' {message}" if "self-test" in message else message):
        get_reward_funcs(Mine).load()
    Mine.self_test = False
    get_reward_funcs(Mine).load()


def test_an_async_scorer_is_tested_too():
    class Mine:
        self_test = True

        async def __call__(self, generated_images):
            return [float(np.asarray(image, dtype=float).std()) for image in generated_images]

    get_reward_funcs(Mine).load()


def test_a_client_that_the_self_test_opens_is_open_at_the_next_call():
    loops = []

    class Mine:
        self_test = True

        async def __call__(self, generated_images):
            loops.append(asyncio.get_running_loop())
            assert not loops[0].is_closed() and loops[0] is loops[-1]
            return [float(np.asarray(image, dtype=float).std()) for image in generated_images]

    rewards = get_reward_funcs(Mine)
    rewards.load()
    rewards.load()
    images = [Image.new("RGB", (8, 8))]
    assert call_rewards(rewards, [{"prompt": "x"}], ["x"], [[1]], images) == [[0.0]]
    assert len(loops) == 3
