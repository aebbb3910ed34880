"""The format reward with one tag, with several, and with lengths."""

import pytest

from janus_trl.rewards import get_reward_funcs


def reward_of(name: str, **args):
    return get_reward_funcs({"name": name, "args": args}).funcs[0]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<answer>B</answer>", 1.0),
        ("reasons\n<answer>\nB\n</answer> done", 1.0),
        ("B", 0.0),
        ("", 0.0),
        ("<answer>B", 0.0),
        ("B</answer>", 0.0),
        ("</answer>B<answer>", 0.0),
        ("<answer> </answer>", 0.0),
        ("<answer>A</answer><answer>B</answer>", 0.0),
        ("<answer>A<answer>B</answer>", 0.0),
    ],
)
def test_format_wants_exactly_one_tagged_block(text, score):
    reward = get_reward_funcs("format").funcs[0]
    assert reward(prompts=[""], completions=[text]) == [score]
    assert reward(prompts=[""], completions=[[{"role": "assistant", "content": text}]]) == [score]


def test_format_takes_another_tag():
    reward = get_reward_funcs({"name": "format", "args": {"tag": "plan"}}).funcs[0]
    assert reward(prompts=["", ""], completions=["<plan>x</plan>", "<answer>x</answer>"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "loose", "strict"),
    [
        ("<think>x</think><answer>B</answer>", 1.0, 1.0),
        ("<think>x</think>\n\n<answer>B</answer>\n", 1.0, 1.0),
        ("Well: <think>x</think> so <answer>B</answer>!", 1.0, 0.0),
        ("<answer>B</answer><think>x</think>", 0.0, 0.0),
        ("<think>x<answer>B</answer></think>", 0.0, 0.0),
        ("<think>x</think>", 0.0, 0.0),
        ("<think></think><answer>B</answer>", 0.0, 0.0),
        ("<think>x</think><think>y</think><answer>B</answer>", 0.0, 0.0),
    ],
)
def test_several_tags_are_wanted_in_order(text, loose, strict):
    for nothing_else, expected in ((False, loose), (True, strict)):
        reward = reward_of("format", tags=["think", "answer"], nothing_else=nothing_else)
        assert reward(prompts=[""], completions=[text]) == [expected]


def test_the_length_has_two_limits():
    reward = reward_of("format", tag="a", min_length=10, max_length=12)
    texts = [f"<a>{'x' * n}</a>" for n in (2, 3, 5, 6)]  # 9, 10, 12, 13 characters
    assert reward(prompts=[""] * 4, completions=texts) == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"tag": "<answer>"}, "give a plain name"),
        ({"tags": []}, "one name or several different ones"),
        ({"tags": ["a", "a"]}, "one name or several different ones"),
        ({"max_length": 0}, "max_length is 0; it must be at least 1 character, or null"),
        ({"min_length": -1}, "min_length is -1"),
        ({"min_length": 9, "max_length": 3}, "min_length 9 is more than max_length 3"),
    ],
)
def test_tags_and_limits_that_cannot_be_met_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        reward_of("format", **args)
