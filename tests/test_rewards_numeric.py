"""Numeric answers: which number a text settles on, and when it is right."""

import importlib.util
import math
import time

import pytest
from datasets import Dataset

from janus_trl.rewards import check_reward_rows, get_reward_funcs, numeric

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed"
)


def reward_of(name: str, **args):
    return get_reward_funcs({"name": name, "args": args}).funcs[0]


NUMBERS = [
    # plain
    ("42", 42), ("-7.", -7), (".5", 0.5), ("1,234.5", 1234.5),
    ("1e-3", 0.001), ("１２", 12), ("½", 0.5), ("−5", -5),
    ("1 000 000", 1_000_000), ("3 1/2", 3.5), ("-1 1/4", -1.25), ("1/3", 1 / 3), ("12 cm", 12), ("3e5 m", 3e5),
    # LaTeX
    (r"$\frac{1}{2}$", 0.5), (r"\frac{1}{2}", 0.5),
    (r"\(\frac{1}{2}\)", 0.5), (r"$30^\circ$", 30), (r"$1{,}000$", 1000),
    (r"So \boxed{3\sqrt{2}}", 3 * math.sqrt(2)), (r"\boxed{\frac{\pi}{4}}", math.pi / 4), (r"\boxed{x=5}", 5),
    (r"\boxed{12\text{ cm}}", 12), (r"\boxed{4} and \boxed{5}", 5),
    (r"$3\frac12$", 3.5), ("2√3", 2 * math.sqrt(3)),
    (r"The answer is $1.5\times 10^{-3}$.", 0.0015),
    ("Answer: 2 × 10^5", 200_000), ("The answer is 2π.", 2 * math.pi),
    # statements
    ("The answer is 42.", 42), ("The answer is 45 and not 50.", 45),
    ("**Answer:** 12", 12), ("**Answer: 12**", 12),
    ("Step 1: 5. So the final answer is 9. (I used 3 steps)", 9), ("The answer is 7, because 3 + 4 = 7.", 7),
    ("Answer: 5\nWait.\nAnswer: 6", 6), ("答案是12。", 12), ("Die Antwort ist 12.", 12), ("La réponse est 12", 12),
    ("The answer is about 3.14 cm", 3.14),
    ("The answer is 2 sqrt(3)", 2 * math.sqrt(3)), ("The result is $x = -2$.", -2),
    # tags
    ("<answer>\n 7 </answer> or 8", 7), ("<answer>1</answer><answer>2</answer>", 2), ("<answer>3", 3),
    ("<think>The answer is 5</think> 6", 6), ("1 <answer> </answer>", 1),
    # circled digits: the answer, or what refers to a step
    ("③", 3), ("答案是③。", 3), ("Answer: (③)", 3), (r"So \boxed{③}", 3), ("<answer>③</answer>", 3),
    ("The answer is: **3**.", 3), ("答案是：3。", 3), ("The answer is: ③", 3),
    ("The answer is: **③**.", 3), ("答案是：③。", 3), ("So the answer is $③$.", 3),
    ("From ② we get x = 45 by ③.", 45), ("由②得 45，由③得证", 45), ("答案是45（见③）", 45),
    ("由③可知", None), ("答案是①③。", None),
    # no answer
    ("", None), ("I do not know", None), (r"\boxed{}", None),
    ("4 or 5", None), ("Answer: 4 or 5", None), ("3:4", None),
    ("x=3 or x=4", None), ("$4.2$ and $4.3$", None),
    ("The answer is (3, 4)", None), ("1.000,5", None), ("$x^2+1$", None),
    (r"$\infty$", None), (r"$\frac{1}{0}$", None),
    ("9^9^9^9", None), (r"\boxed{9^{9^{9^9}}}", None), ("10^100000", None),
    ("1e400", None), ("$99999999! + 1$", None), ("42!", 42),
    ("5" * 5000, None), ("((((((", None), (r"$\sqrt{-1}$", None),
]  # fmt: skip


@needs_math_verify
@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_the_number_settled_on_is_read(text, value):
    start = time.perf_counter()
    found = numeric.extract_numbers(text)
    assert found == (() if value is None else (pytest.approx(value, rel=1e-12),))
    assert time.perf_counter() - start < 6  # the first formula loads sympy


@needs_math_verify
@pytest.mark.parametrize(("start", "run"), [("answer", " "), ("answer is", " "), ("", ".."), ("answer is ", "1")])
def test_a_run_of_one_character_is_read_at_once(start, run):
    numeric.extract_numbers(r"$\frac{1}{2}$")  # loads sympy
    began = time.perf_counter()
    assert numeric.extract_numbers(f"{start}{run * 9999} x") == ()
    assert time.perf_counter() - began < 1  # seconds or minutes, if every part of the run is tried with every other


@needs_math_verify
def test_numbers_within_the_tolerance_are_right():
    texts = ["3.14", "3.15", r"\pi", "22/7", "", "3.1416", [{"role": "assistant", "content": "The answer is 3.14."}]]
    reward = reward_of("numeric")
    shared = {"prompts": [""] * 7, "completions": texts}
    assert reward(**shared, answer=["3.14159"] * 7) == [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    strict = reward_of("numeric", relative_tolerance="0", absolute_tolerance="1e-4")
    assert strict(**shared, answer=[math.pi] * 7) == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    exact = reward_of("numeric", relative_tolerance=0, absolute_tolerance=0)
    assert exact(prompts=[""] * 2, completions=["1/3", "0.1"], answer=[r"$\frac{2}{6}$", 0.1]) == [1.0, 1.0]


@needs_math_verify
def test_a_percentage_is_right_in_both_readings_and_an_unusable_answer_abstains():
    reward = reward_of("numeric")
    texts, gold = ["50%", "50%", r"$50\%$", "0.5", "5%"], [50, 0.5, "0.5", "50%", 50]
    assert reward(prompts=[""] * 5, completions=texts, answer=gold) == [1.0, 1.0, 1.0, 0.0, 0.0]
    gold = ["none", None, "", True, float("nan"), "4 or 5", "#### 18", "18 apples"]
    assert reward(prompts=[""] * 8, completions=["18"] * 8, answer=gold) == [None] * 6 + [1.0, 1.0]


@needs_math_verify
def test_answers_that_are_no_numbers_are_refused_with_their_rows(caplog):
    rows = {"answer": ["1"] * 199 + ["red"]}
    check_reward_rows("numeric", Dataset.from_dict(rows))
    assert "199: 'red'" in caplog.text
    with pytest.raises(ValueError, match="3 of 3 rows hold no number"):
        check_reward_rows("numeric", Dataset.from_dict({"answer": ["red", "", None]}))
    with pytest.raises(ValueError, match="column 'answer' is '12'; expected one value per completion"):
        reward_of("numeric")(prompts=["", ""], completions=["1", "2"], answer="12")


def test_numbers_need_math_verify(monkeypatch):
    monkeypatch.setattr(numeric.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"math-verify is not installed. Run pip install 'janus_trl\[math\]'"):
        reward_of("numeric")


def test_negative_tolerances_are_refused():
    with pytest.raises(ValueError, match="relative_tolerance is -1.0; it must be 0 or more"):
        reward_of("numeric", relative_tolerance=-1)
