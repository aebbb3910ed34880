"""How a reward is called, and what it may return."""

import asyncio

import numpy as np
import pytest
import torch

from janus_trl.rewards import (
    Scores,
    completion_text,
    get_reward_funcs,
    wrap_reward,
)
from janus_trl.rewards.calling import check_values
from tests.reward_calls import CALL


def test_a_function_gets_only_what_it_declares():
    seen = {}

    def picky(completions, answer):
        seen.update(completions=completions, answer=answer)
        return [1, None]

    values = wrap_reward(picky, "picky")(**CALL, answer=["x", "y"], other=[1, 2])
    assert values == [1.0, None] and seen == {"completions": ["a", "bbb"], "answer": ["x", "y"]}


def test_a_function_with_keywords_gets_everything_unchanged():
    seen = {}

    def greedy(**arguments):
        seen.update(arguments)
        return [0, 0]

    wrap_reward(greedy, "greedy")(**CALL, demands=["x", "y"], generated_images=["i", "j"])
    assert seen == {**CALL, "demands": ["x", "y"], "generated_images": ["i", "j"]}


def test_a_value_of_the_recipe_wins_over_a_column_of_the_same_name():
    def scaled(completions, scale):
        return [scale] * len(completions)

    assert get_reward_funcs({"name": scaled, "args": {"scale": 3}}).funcs[0](**CALL, scale=[1, 2]) == [3.0, 3.0]


@pytest.mark.parametrize("values", [[1, None], (True, 0.5), np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]),
                                    [torch.tensor(1.0), np.float32(2)]])  # fmt: skip
def test_numbers_of_all_kinds_become_floats(values):
    result = wrap_reward(lambda completions: values, "fine")(**CALL)
    assert len(result) == 2 and all(value is None or type(value) is float for value in result)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (1.0, "'bad' returned a single float 1.0; expected a list of 2 numbers"),
        ([1.0], "'bad' returned 1 values; expected a list of 2"),
        ([1.0, 2.0, 3.0], "returned 3 values; expected a list of 2"),
        ([[1.0], [2.0]], "returned a nested list .* for row 0"),
        (torch.ones(2, 1), r"returned values of shape \(2, 1\)"),
        (torch.tensor(1.0), r"returned values of shape \(\)"),
        ([1.0, torch.ones(1)], r"returned values of shape \(1,\) for row 1"),
        (["1", "2"], "returned a single str '1' for row 0"),
        (None, "returned a single NoneType None"),
        ({"a": 1}, "returned a single dict"),
    ],
)
def test_values_that_break_the_contract_name_the_reward(values, message):
    with pytest.raises(ValueError, match=message):
        wrap_reward(lambda completions: values, "bad")(**CALL)


def test_what_is_not_finite_is_a_fault_and_no_score():
    nan, inf = float("nan"), float("inf")
    values = wrap_reward(lambda completions: torch.tensor([nan, -inf]), "bad")(**CALL)
    assert values == [None, None] and list(values.faults) == [0, 1] and values.faults[1] == -inf
    values = wrap_reward(lambda completions: [None, np.float32(inf)], "bad")(**CALL)
    assert values == [None, None] and values.faults == {1: inf}
    again = check_values("bad", values, 2)
    assert again == values and again.faults == values.faults


def test_counts_of_a_reward_reach_who_calls_it():
    values = wrap_reward(lambda completions: Scores([1, 2], counts={"truncated": 1}), "fine")(**CALL)
    assert values == [1.0, 2.0] and values.counts == {"truncated": 1}


def test_an_exception_in_a_reward_is_passed_on():
    def broken(completions):
        raise KeyError("column")

    with pytest.raises(KeyError, match="column"):
        get_reward_funcs(broken).funcs[0](**CALL)


def test_async_rewards_stay_async_and_are_checked():
    async def slow(completions):
        return [1.0] * len(completions)

    async def short(completions):
        return [1.0]

    class Judge:
        async def __call__(self, completions, scale: float):
            return [scale] * len(completions)

    partial = get_reward_funcs({"name": Judge(), "args": {"scale": 2}}).funcs[0]  # a partial of an instance
    assert asyncio.run(partial(**CALL)) == [2.0, 2.0]
    rewards = get_reward_funcs([slow, short])
    assert asyncio.iscoroutinefunction(rewards.funcs[0])
    assert asyncio.run(rewards.funcs[0](**CALL)) == [1.0, 1.0]
    with pytest.raises(ValueError, match="'short' returned 1 values"):
        asyncio.run(rewards.funcs[1](**CALL))


def test_completions_are_read_as_text_in_both_forms():
    parts = [{"type": "text", "text": "a"}, {"type": "image", "text": None}]
    assert completion_text("ab") == "ab"
    assert completion_text([{"role": "assistant", "content": "ab"}]) == "ab"
    assert completion_text([{"role": "assistant", "content": parts}, {"role": "assistant", "content": None}]) == "a"
