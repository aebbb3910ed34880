"""Circled digits and letters: labels of options after an answer phrase, and nothing in running text."""

import pytest

from janus_trl.rewards.multiple_choice import extract_choice, gold_letter, multiple_choice_reward
from tests.choices import ANGLES, COLORS

NUMBERED = ["① red", "② blue", "③ green", "④ yellow"]
NUMBERED_ANGLES = ["①30", "②45", "③60", "④90"]
LETTERED = ["Ⓐ red", "Ⓑ blue", "Ⓒ green", "Ⓓ yellow"]
LETTERED_ANGLES = ["ⓐ 30", "ⓑ 45", "ⓒ 60", "ⓓ 90"]
WITHOUT_NUMBERS = [None, COLORS, NUMBERED, LETTERED]
STATEMENTS = ["①②", "①③", "②③", "①②③"]  # which of three statements hold


@pytest.mark.parametrize("choices", [*WITHOUT_NUMBERS, NUMBERED_ANGLES], ids=str)
@pytest.mark.parametrize(
    "text",
    ["答案是③。", "答案是③，因为天空是蓝色的。", "答案为③", "答案：③。", "答案③。", "答案是（③）。", "故选：③．",
     "选③。", "正解は③。", "答えは③です。", "③が正解です。", "정답은 ③입니다.", "정답: ③번", "③이 정답입니다.",
     "The answer is ③.", "The answer is ③, because ① is too dark.", "The answer is ③ because of the light.",
     "Answer: (③)", "③", "**③**", "<b>③</b>", "<answer>③。</answer>", r"\boxed{③}", "❸", "答案是❸。", "③是正确答案。",
     "③ is the correct answer.", "答案不是①而是③。", "由①②可知，答案是③。", "The answer is ③\n\nSee ①."],
)  # fmt: skip
def test_a_circled_digit_after_an_answer_phrase_is_a_label(text, choices):
    assert extract_choice(text, choices) == "C"


@pytest.mark.parametrize("choices", [*WITHOUT_NUMBERS, ANGLES, LETTERED_ANGLES], ids=str)
@pytest.mark.parametrize("letter", "Ⓒⓒ")
@pytest.mark.parametrize(
    "text", ["答案是{}。", "The answer is {}, because", "Answer: {}", "{}", "故选{}", "{}が正解です。"]
)
def test_a_circled_letter_after_an_answer_phrase_is_a_label(text, letter, choices):
    assert extract_choice(text.format(letter), choices) == "C"


@pytest.mark.parametrize("choices", [None, COLORS, ANGLES, NUMBERED, NUMBERED_ANGLES, LETTERED, STATEMENTS], ids=str)
@pytest.mark.parametrize(
    "text",
    ["如图，点③在圆上", "由③可知", "由①③得证", "结论③正确", "③正确，①错误", "③ is correct.", "Step ③ gives the result.",
     "By equation ③ we are done.", "选③式代入", "① Look at it.", "①\n②\n③", "①, ② and ③ are shown.", "点Ⓒ在圆上",
     "The answer is ① or ③.", "答案是①或③。", "答案是①、③。", "答案是① ③。", "答案不是③", "答案是⑤", "⑨"],
)  # fmt: skip
def test_a_circled_digit_in_running_text_a_hedge_or_no_option_is_no_answer(text, choices):
    assert extract_choice(text, choices) is None


@pytest.mark.parametrize(
    ("text", "choices", "expected"),
    [
        ("③ green", COLORS, "C"),
        ("③ red", COLORS, None),  # label and text disagree
        ("③. green", NUMBERED, "C"),
        ("(③) green", NUMBERED, "C"),
        ("③green", NUMBERED, "C"),
        ("答案是③green", NUMBERED, "C"),
        ("green", NUMBERED, "C"),
        ("The answer is green (③).", NUMBERED, "C"),
        ("The answer is green (①).", NUMBERED, None),
        ("The answer is green(①).", NUMBERED, None),
        ("③60", NUMBERED_ANGLES, "C"),
        ("60", NUMBERED_ANGLES, "C"),
        ("3", NUMBERED_ANGLES, None),  # a plain number among numbers may be a value
        ("答案是③。", ANGLES, None),  # these do not say how they are numbered
        ("Ⓒ green", LETTERED, "C"),
        ("green", LETTERED, "C"),
        ("ⓒ 60", LETTERED_ANGLES, "C"),
        ("60", LETTERED_ANGLES, "C"),
        ("①③", STATEMENTS, "B"),
        ("答案是①③。", STATEMENTS, "B"),
        ("Ⓐ和Ⓑ", ["都不对", "只有Ⓐ", "Ⓐ和Ⓑ"], "C"),
        ("②", ["②", "①"], "A"),  # options in another order: their texts count
        ("答案是3。", COLORS, "C"),  # as "The answer is 3."
        ("答案是3.5。", COLORS, None),
        ("答案是⑩。", list("qrstuvwxyz"), "J"),
    ],
)
def test_labels_and_the_texts_of_options(text, choices, expected):
    assert extract_choice(text, choices) == expected


@pytest.mark.parametrize(
    ("answer", "choices", "expected"),
    [("③", NUMBERED, "C"), ("③", NUMBERED_ANGLES, "C"), ("③ green", NUMBERED, "C"), ("green", NUMBERED, "C"),
     ("Ⓒ", LETTERED, "C"), ("ⓒ", LETTERED_ANGLES, "C"), ("Ⓒ green", LETTERED, "C"), ("③", ANGLES, None),
     ("①③", STATEMENTS, "B"), (2, NUMBERED, "C"), ("③ red", NUMBERED, None)],
)  # fmt: skip
def test_the_gold_answer_may_be_circled(answer, choices, expected):
    assert gold_letter(answer, choices) == expected


def test_the_reward_of_circled_answers():
    completions, answers = ["答案是③。", "答案是①。", "由③可知", "答案是Ⓒ。"], ["③", "③", "③", "C"]
    assert multiple_choice_reward(completions, answers, [NUMBERED] * 4) == [1.0, 0.0, 0.0, 1.0]
