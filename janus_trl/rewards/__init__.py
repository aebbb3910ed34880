"""Rewards: named functions that score completions, their weights, and the checks made before training starts.

A reward is any function `fn(prompts, completions, completion_ids, **columns) -> list[float | None]`, called by keyword;
for `t2i` there is also `generated_images`. `None` means that the reward does not apply to a row; NaN, infinity and an
exception are faults. `get_reward_funcs` tells how rewards are named in a recipe.
"""

from janus_trl.rewards.calling import Scores, completion_text, wrap_reward
from janus_trl.rewards.registry import (
    REGISTERED_REWARDS,
    RegisteredReward,
    RewardSet,
    check_reward_rows,
    check_reward_specs,
    get_reward_funcs,
)
from janus_trl.rewards.specs import RewardSpec, parse_reward_specs

__all__ = [
    "REGISTERED_REWARDS",
    "RegisteredReward",
    "RewardSet",
    "RewardSpec",
    "Scores",
    "check_reward_rows",
    "check_reward_specs",
    "completion_text",
    "get_reward_funcs",
    "parse_reward_specs",
    "wrap_reward",
]
