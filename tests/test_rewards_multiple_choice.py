"""Reading the option a completion settles on, and rewarding it."""

import logging

import pytest
from datasets import Dataset

from janus_trl.rewards.multiple_choice import (
    check_rows,
    extract_choice,
    gold_letter,
    multiple_choice_reward,
    unusable_answers,
)

COLORS = ["red", "blue", "green", "yellow"]
FOXES = ["red fox", "a blue bird", "green frog", "yellow fish"]
NUMBERS = ["2", "4", "6", "8"]
ANGLES = ["30", "45", "60", "90"]

CASES = [
    # tags
    ("<answer>C</answer>", None, "C"),
    ("<answer>\n B\n</answer>", COLORS, "B"),
    ("<answer>B", COLORS, "B"),
    ("<answer>A</answer> wait <answer>D</answer>", COLORS, "D"),
    ("<ANSWER>(b)</ANSWER>", COLORS, "B"),
    ("<answer>B) blue</answer>", COLORS, "B"),
    ("<answer>blue</answer>", COLORS, "B"),
    ("<answer>The answer is B.</answer>", COLORS, "B"),
    ("<answer>A or B</answer>", COLORS, None),
    ("<answer>A, B</answer>", COLORS, None),
    ("<answer>A red fox</answer>", None, None),
    ("<answer>A blue bird</answer>", FOXES, "B"),
    ("<answer>E</answer>", COLORS, None),
    ("<answer>3</answer>", COLORS, "C"),
    ("<answer>5</answer>", COLORS, None),
    ("A is tempting.\n<answer>C</answer>\nNot D.", COLORS, "C"),
    ("The answer is A. <answer>B</answer>", COLORS, "B"),
    ("<answer>D</answer> I hope <answer>", COLORS, "D"),
    ("<answer>$\\boxed{C}$</answer>", COLORS, "C"),
    ("<think>A or B? Maybe A.</think> B", COLORS, "B"),
    ("<think>The answer is A.</think><answer>C</answer>", COLORS, "C"),
    # lone letters, positions and option texts
    ("B", None, "B"),
    (" b ", None, "B"),
    ("(D)", None, "D"),
    ("**C**", None, "C"),
    ("[C].", None, "C"),
    ("B.", None, "B"),
    ("Option B", None, "B"),
    ("A", None, "A"),
    ("2", None, "B"),
    ("2", COLORS, "B"),
    ("4", NUMBERS, "B"),
    ("3", NUMBERS, None),
    ("yellow", COLORS, "D"),
    ("Yellow.", COLORS, "D"),
    ("Ｂ", None, "B"),
    ("E", None, None),
    ("E", [*COLORS, "purple"], "E"),
    ("red", ["red", "red", "blue"], None),
    # statements
    ("The answer is B.", None, "B"),
    ("The answer is (B).", None, "B"),
    ("the correct answer is **C**", None, "C"),
    ("The correct option would be D", None, "D"),
    ("Answer: B\nWait.\nAnswer: C", None, "C"),
    ("Antwort: Antwort: C", None, "C"),
    ("Antwort: C", None, "C"),
    ("ANSWER: [C]\nHope that helps!", None, "C"),
    ("ANSWER: (B)\nA good day to you. C you soon.", None, "B"),
    (r"\boxed{x<E} ... **Answer: D**", None, "D"),
    (r"\boxed{A} but in the end **Answer:** D", None, "D"),
    ("**Answer**: D", None, "D"),
    ("Answer:\nB", None, "B"),
    ("Answer: B) blue", COLORS, "B"),
    ("Answer: A red fox", FOXES, "A"),
    ("Answer: A red fox is shown", COLORS, None),
    ("The answer is A because the sky is clear.", COLORS, "A"),
    ("The answer is blue.", COLORS, "B"),
    ("The answer is 45.", ANGLES, "B"),
    ("The answer is 45 at point A.", COLORS, None),
    ("The answer is clearly option C, not D.", COLORS, "C"),
    ("The answer is A or B", COLORS, None),
    ("The answer is either A or B.", COLORS, None),
    ("Answer: A/B", COLORS, None),
    ("Answer: B, C", COLORS, None),
    ("Answer: red or blue", COLORS, None),
    ("The answer is both A and D.", COLORS, None),
    ("Answer: A or B. Answer: C", COLORS, "C"),
    ("The answer is not A. The answer is C.", COLORS, "C"),
    ("The answer is C, so the answer is not D.", COLORS, "C"),
    ("B is correct, A is not.", COLORS, "B"),
    ("Option C is the right answer.", COLORS, "C"),
    ("I think it is A or B", COLORS, None),
    ("I think A red fox is shown", COLORS, None),
    ("A) red B) blue C) green D) yellow. I choose C.", COLORS, "C"),
    ("答案是B", COLORS, "B"),
    ("答案：C", COLORS, "C"),
    ("La respuesta es D.", COLORS, "D"),
    ("The best answer is C: because A is wrong", COLORS, "C"),
    ("Answer: C or maybe B", COLORS, None),
    ("Answer: B C", COLORS, None),
    ("Answer: ABCD", COLORS, None),
    ("The answer is B. A is wrong.", COLORS, "B"),
    ("Answer: B\nC is wrong, and A too.", COLORS, "B"),
    ("The answer is a.", COLORS, "A"),
    ("the answer is a red one", COLORS, None),
    ("My final answer: option (c)", COLORS, "C"),
    ("So the answer to the question must be (A).", COLORS, "A"),
    ("The answer's D", COLORS, "D"),
    ("The answer is B, blue.", COLORS, "B"),
    ("The answer is B, red.", COLORS, None),
    ("The answer is A, a red fox.", FOXES, "A"),
    ("The answer is B, a blue bird.", FOXES, "B"),
    ("The answer is the cat", ["the dog", "the cat"], "B"),
    ("The answer is both", ["left", "right", "both"], "C"),
    ("Answer: No", ["Yes", "No"], "B"),
    ("The answer is 2", ["2°", "1°", "4°", "3°"], None),
    ("The answer is 2 dogs.", COLORS, None),
    ("A is right of B", COLORS, None),
    ("The answer isn't B.", COLORS, None),
    ("It cannot be B.", COLORS, None),
    ("It is C rather than D.", COLORS, "C"),
    # boxed
    (r"So \boxed{B}", None, "B"),
    (r"So $\boxed{\text{C}}$.", None, "C"),
    (r"\boxed{green}", COLORS, "C"),
    (r"The answer is \boxed{D}.", None, "D"),
    # labels and lines
    ("B\n\nThe sky is blue, A would be night.", COLORS, "B"),
    ("A would be night, D a desert.\nB", COLORS, "B"),
    ("A\nB", COLORS, None),
    ("B) blue", COLORS, "B"),
    ("(b) it looks blue", COLORS, "B"),
    ("C. because of the leaves", COLORS, "C"),
    ("A) red B) blue C) green D) yellow", COLORS, None),
    # letters standing alone
    ("It must be C here.", None, "C"),
    ("A red fox is shown", None, None),
    ("A red fox is shown", FOXES, None),
    ("A red fox, so B.", COLORS, "B"),
    ("I see a fox, so C.", [*COLORS, "e", "f", "g", "h", "i"], "C"),
    ("Between A and C", COLORS, None),
    ("Not B", COLORS, None),
    ("Option A is wrong.", COLORS, None),
    ("The U.S.A. team", COLORS, None),
    ("A-frame", COLORS, None),
    ("triangle ABC", COLORS, None),
    # nothing
    ("", None, None),
    ("   \n", COLORS, None),
    ("I do not know.", COLORS, None),
    ("<answer></answer>", COLORS, None),
]


@pytest.mark.parametrize(("text", "choices", "expected"), CASES)
def test_the_option_settled_on_is_read(text, choices, expected):
    assert extract_choice(text, choices) == expected


@pytest.mark.parametrize(
    ("answer", "choices", "expected"),
    [
        ("B", COLORS, "B"),
        ("b", COLORS, "B"),
        ("b)", COLORS, "B"),
        ("(B)", COLORS, "B"),
        (" B. ", COLORS, "B"),
        ("B) blue", COLORS, "B"),
        ("Blue", COLORS, "B"),
        ("", COLORS, None),
        (None, COLORS, None),
        ("F", COLORS, None),
        ("F", None, None),
        ("D", ["red", "blue"], None),
        ("purple", COLORS, None),
        (0, COLORS, "A"),
        (3, COLORS, "D"),
        (4, COLORS, None),
        (-1, COLORS, None),
        (True, COLORS, None),
        (1.0, COLORS, None),
        ("1", COLORS, "A"),
        ("4", NUMBERS, "B"),
        ("3", NUMBERS, None),
        (4, NUMBERS, "B"),
        (2, ["1", "2", "3"], None),  # index: C, text: B
        ("A or B", COLORS, None),
        ("blue", ["blue", "blue"], None),
    ],
)
def test_the_gold_answer_is_read_or_abstained_from(answer, choices, expected):
    assert gold_letter(answer, choices) == expected


def test_an_unusable_gold_answer_abstains_and_never_counts_as_correct():
    gold = ["B", "", None, "F", "b)"]
    assert multiple_choice_reward(["B"] * 5, gold, [COLORS] * 5) == [1.0, None, None, None, 1.0]
    assert multiple_choice_reward([""] * 5, gold, [COLORS] * 5) == [0.0, None, None, None, 0.0]
    assert unusable_answers(gold, [COLORS] * 5) == [1, 2, 3]


def test_each_row_is_scored_by_its_own_options():
    completions = ["The answer is blue.", "The answer is blue.", "C", [{"role": "assistant", "content": "A"}]]
    choices = [COLORS, ["blue", "red"], None, ["x", "y"]]
    assert multiple_choice_reward(completions, ["blue", "B", "C", 0], choices, prompts=None) == [1.0, 0.0, 1.0, 1.0]


def test_columns_of_a_wrong_form_are_named():
    with pytest.raises(ValueError, match="column 'answer' is 1 values"):
        multiple_choice_reward(["A", "B"], ["A"])
    with pytest.raises(ValueError, match="column 'answer' is 'AB'"):
        multiple_choice_reward(["A", "B"], "AB")
    with pytest.raises(ValueError, match="choices of row 0 is the text 'red'"):
        multiple_choice_reward(["A"], ["A"], ["red"])
    with pytest.raises(ValueError, match="27 options"):
        extract_choice("A", [str(i) for i in range(27)])


def test_more_than_one_percent_unreadable_answers_are_refused_with_their_rows(caplog):
    rows = {"prompt": ["q"] * 200, "answer": ["A"] * 199 + ["F"], "choices": [COLORS] * 200}
    with caplog.at_level(logging.WARNING):
        check_rows(Dataset.from_dict(rows))
    assert "199: 'F'" in caplog.text
    rows["answer"][7:10] = ["", None, "Q"]
    with pytest.raises(ValueError, match="4 of 200 rows .*7: ''"):
        check_rows(Dataset.from_dict(rows))
    with pytest.raises(ValueError, match="no column 'choices'"):
        check_rows(Dataset.from_dict({"answer": ["E"]}))
