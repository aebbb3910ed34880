"""Rewards by name: what a recipe may say, and what is refused before training."""

import functools
import sys

import pytest

from janus_trl.rewards import (
    REGISTERED_REWARDS,
    RegisteredReward,
    check_reward_rows,
    check_reward_specs,
    get_reward_funcs,
    parse_reward_specs,
)
from tests.reward_calls import CALL

MODULE = """
import functools

NOT_A_FUNCTION = 3

def length(completions, scale: float = 1.0, **columns):
    return [scale * len(text) for text in completions]

def only_completions(completions):
    return [float(len(text)) for text in completions]

def wants_solution(images, solution, completions):
    return [0.0 for _ in completions]

def brightness(generated_images):
    return [0.5 for _ in generated_images]

def redness(generated_images, **columns):
    means = [image.resize((1, 1)).getpixel((0, 0)) for image in generated_images]
    return [(r - max(g, b)) / 255 for r, g, b in means]

def positional(completions, /):
    return []

class Bonus:
    def __init__(self, value: float, times: int = 1):
        self.value = value * times

    def __call__(self, completions, **columns):
        return [self.value for _ in completions]

twice = functools.partial(length, scale=2.0)
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A module `my_rewards` in the working folder, which is not on the import path."""
    (tmp_path / "my_rewards.py").write_text(MODULE)
    (tmp_path / "needs_missing.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    yield "my_rewards"
    sys.modules.pop("my_rewards", None)


def test_one_entry_is_taken_as_a_list_of_one():
    for specs in ("format", ["format"], {"name": "format"}, [{"name": "format", "weight": 1}], '{"name": "format"}'):
        rewards = get_reward_funcs(specs)
        assert (rewards.names, rewards.weights) == (["format"], [1.0])


def test_numbers_left_as_text_by_yaml_become_numbers():
    spec = parse_reward_specs({"name": "x", "weight": "1e-1"})[0]
    assert spec.weight == 0.1 and isinstance(spec.weight, float)
    reward = get_reward_funcs({"name": "format", "args": {"max_length": "2e1"}}).funcs[0]
    texts = ["<answer>x</answer>", "<answer>" + "x" * 20 + "</answer>"]
    assert reward(prompts=["", ""], completions=texts) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "reward_funcs is empty"),
        (None, "reward_funcs is empty"),
        (
            "pickscor",
            r"unknown reward 'pickscor'; valid: aesthetic, .*format, .*pickscore.*; did you mean 'pickscore'\?",
        ),
        ("", "is not a reward"),
        (3, "3 is not a reward"),
        ([3], "3 is not a reward"),
        ({"nam": "format"}, r"unknown key 'nam'.*valid: alias, args, name, task, weight; did you mean 'name'\?"),
        ({"weight": 1.0}, "has no 'name'"),
        ({"name": "format", "alias": "a/b"}, "alias of 'format' is 'a/b'; use letters"),
        ({"name": "format", "alias": 3}, "alias of 'format' is 3"),
        ([{"name": "format", "alias": "x"}, {"name": "pickscore", "alias": "x"}], "alias 'x' is given twice"),
        ("{name: x", "no valid mapping"),
        ({"name": "format", "weight": "much"}, "weight of 'format' is 'much'; it must be of type float"),
        ({"name": "format", "weight": True}, "weight of 'format' is True"),
        ({"name": "format", "weight": float("nan")}, "weight of 'format' is nan"),
        ({"name": "format", "args": ["tag"]}, "must be a mapping"),
        (
            {"name": "format", "args": {"tga": "x"}},
            r"unknown argument 'tga'; valid: .*tag.*; did you mean 'tag'",
        ),
        ({"name": "format", "args": {"tag": 3}}, "argument 'tag' is 3; it must be of type str"),
        ({"name": "format", "args": {"max_length": "long"}}, "argument 'max_length' is 'long'"),
        ({"name": "format", "args": {"max_length": 2.5}}, "argument 'max_length' is 2.5; it must be of type int"),
        ({"name": "format", "args": {"max_length": 0}}, "max_length is 0; it must be at least 1"),
        ({"name": "format", "args": {"tag": "<answer>"}}, "without brackets"),
        ({"name": "pickscore", "args": {"raw": "perhaps"}}, "argument 'raw' is 'perhaps'; it must be of type bool"),
        ({"name": "pickscore", "args": {"dtype": "float8"}}, "argument 'dtype' is 'float8'; valid: bfloat16, float16"),
        ({"name": "multiple_choice", "args": {"tag": "x"}}, "unknown argument 'tag'"),
        ("no_such_pkg.mod.fn", "there is no module 'no_such_pkg'"),
        ("janus_trl.rewards.format:FormatRewrad", r"has no 'FormatRewrad'; valid: .*did you mean 'FormatReward'\?"),
        ("janus_trl.rewards.multiple_choice:LETTERS", "must be a function"),
    ],
)
def test_what_is_wrong_with_a_name_or_argument_is_said_in_one_line(specs, message):
    with pytest.raises(ValueError, match=message) as error:
        check_reward_specs(specs)
    assert "\n" not in str(error.value)


def test_own_functions_are_found_in_the_working_folder(user_module):
    specs = [
        "my_rewards:length",
        "my_rewards.only_completions",
        {"name": "my_rewards:length", "args": {"scale": "1e1"}, "weight": 0.5},
        {"name": "my_rewards:Bonus", "args": {"value": 0.25, "times": "2"}},
        "my_rewards:twice",
    ]
    rewards = get_reward_funcs(specs, task="t2i", columns=["prompt"])
    assert rewards.names == ["length", "only_completions", "length_2", "Bonus", "length_3"]
    assert rewards.weights == [1.0, 1.0, 0.5, 1.0, 1.0]
    assert [fn(**CALL) for fn in rewards.funcs] == [[1.0, 3.0], [1.0, 3.0], [10.0, 30.0], [0.5, 0.5], [2.0, 6.0]]


def test_a_reward_of_ones_own_by_path_and_by_name(user_module, monkeypatch):
    from PIL import Image

    monkeypatch.setitem(REGISTERED_REWARDS, "red", RegisteredReward("my_rewards:redness", ("t2i",)))
    pictures = [Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 51, 0))]
    for spec, name in (("my_rewards:redness", "redness"), ("my_rewards.redness", "redness"), ("red", "red")):
        rewards = get_reward_funcs(spec, "t2i", ["prompt"])
        assert rewards.names == [name] and rewards.funcs[0](**CALL, generated_images=pictures) == [1.0, -0.2]


def test_functions_partials_and_lambdas_get_readable_and_different_names():
    def bright(completions, factor=1.0):
        return [factor] * len(completions)

    rewards = get_reward_funcs([bright, functools.partial(bright, factor=2.0), lambda completions: [0, 1]])
    assert rewards.names == ["bright", "bright_2", "lambda"]
    assert [fn(**CALL) for fn in rewards.funcs] == [[1.0, 1.0], [2.0, 2.0], [0.0, 1.0]]


def test_one_reward_twice_under_two_aliases(user_module):
    specs = [
        {"name": "format", "alias": "tagged", "args": {"tag": "plan"}},
        {"name": "format", "alias": "short", "args": {"max_length": 9}, "weight": 0},
        "format",
        "my_rewards:length",
        {"name": "my_rewards:length", "alias": "length", "args": {"scale": 2}},
    ]
    rewards = get_reward_funcs(specs)
    assert rewards.names == ["tagged", "short", "format", "length_2", "length"]
    assert rewards.weights == [1.0, 0.0, 1.0, 1.0, 1.0]
    call = dict(prompts=[""] * 2, completions=["<plan>x</plan>", "<answer>xy</answer>"])
    expected = [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [14.0, 19.0], [28.0, 38.0]]
    assert [fn(**call) for fn in rewards.funcs] == expected


def test_batch_size_is_the_default_of_rewards_that_have_one():
    class Batched:
        def __init__(self, batch_size: int = 8):
            self.batch_size = batch_size

        def __call__(self, completions):
            return [self.batch_size] * len(completions)

    specs = [Batched, {"name": Batched, "args": {"batch_size": 2}}, lambda completions: [0] * len(completions)]
    rewards = get_reward_funcs(specs, batch_size=3)
    assert [fn(**CALL)[0] for fn in rewards.funcs] == [3, 2, 0]
    assert get_reward_funcs(Batched).funcs[0](**CALL)[0] == 8
    with pytest.raises(ValueError, match="reward_batch_size = 0 must be at least 1"):
        get_reward_funcs("format", batch_size=0)


@pytest.mark.parametrize(
    ("spec", "task", "columns", "message"),
    [
        ("my_rewards:wants_solution", "i2t", ["prompt", "images", "solutions"],
         r"needs the column 'solution'.*valid: images, prompt, solutions; did you mean 'solutions'\?"),
        ("my_rewards:brightness", "i2t", ["prompt"], "does not fit task 'i2t': it needs generated_images"),
        ("my_rewards:positional", None, None, "positional-only"),
        ("my_rewards:NOT_A_FUNCTION", None, None, "must be a function"),
        ("my_rewards:lenght", None, None, r"did you mean 'length'\?"),
        ("my_rewards:Bonus", None, None, "missing argument 'value'"),
        ("my_rewardz:length", None, None, "there is no module 'my_rewardz'"),
        ({"name": "my_rewards:length", "args": {"scale": "big"}}, None, None, "argument 'scale' is 'big'"),
        ({"name": "my_rewards:length", "args": {"alpha": 1}}, None, None, "unknown argument 'alpha'"),
        ("pickscore", "i2t", None, r"'pickscore' does not fit task 'i2t': it scores t2i. .*multiple_choice, format"),
        ("multiple_choice", "t2i", None, "does not fit task 't2i'"),
        ("multiple_choice", "i2t", ["prompt", "answers"], r"needs the column 'answer'.*did you mean 'answers'\?"),
        ("tiny_world", "t2i", ["prompt"], "needs the column 'demands'"),
        ("format", "t2t", None, "task is 't2t'"),
    ],
)  # fmt: skip
def test_rewards_that_cannot_work_are_refused_before_training(user_module, spec, task, columns, message):
    with pytest.raises(ValueError, match=message):
        check_reward_specs(spec, task, columns)


def test_rewards_that_fit_pass(user_module):
    check_reward_specs(["pickscore", "tiny_world", "format"], "t2i", ["prompt", "demands"])
    check_reward_specs(["multiple_choice", "format"], "i2t", ["prompt", "images", "answer"])
    check_reward_specs("my_rewards:wants_solution", "i2t", ["images", "solution"])
    check_reward_specs("my_rewards:brightness", "t2i", ["prompt"])


def test_an_error_inside_a_users_module_is_not_hidden(user_module):
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        check_reward_specs("needs_missing:fn")


def test_rows_are_checked_by_the_rewards_that_will_score_them():
    import datasets

    with pytest.raises(ValueError, match="1 of 2 rows name none of their options"):
        check_reward_rows(["format", "multiple_choice"], datasets.Dataset.from_dict({"answer": ["A", "?"]}))
