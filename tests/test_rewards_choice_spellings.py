"""Reading the option a completion settles on in other languages and scripts; corrections; the answers of data sets."""

import time

import pytest

from janus_trl.rewards.multiple_choice import extract_choice, gold_letter, multiple_choice_reward
from tests.choices import ANGLES, BRACKETED, COLORS, LABELLED, NUMBERED

FARBEN = ["rot", "blau", "grün", "gelb"]
颜色 = ["红", "蓝", "绿", "黄"]

OTHER = [
    # German
    ("Die richtige Antwort ist B.", FARBEN, "B"),
    ("Die Antwort lautet C.", FARBEN, "C"),
    ("Antwort: (b)", FARBEN, "B"),
    ("Lösung: D", FARBEN, "D"),
    ("Richtig ist B.", FARBEN, "B"),
    ("Ich wähle C.", FARBEN, "C"),
    ("Antwort B ist richtig.", FARBEN, "B"),
    ("Option D ist korrekt.", FARBEN, "D"),
    ("Antwort: A oder B", FARBEN, None),
    ("Antwort: blau", FARBEN, "B"),
    ("Antwort: Apfel", FARBEN, None),
    ("Antwort: Auto", FARBEN, None),
    # French
    ("La bonne réponse est B.", None, "B"),
    ("Réponse : C", None, "C"),
    ("R\u00e9ponse\u00a0: D", None, "D"),
    ("La réponse correcte est la (D).", None, "D"),
    ("Je choisis B", None, "B"),
    ("C'est B.", None, "B"),
    ("C'est la réponse B.", None, "B"),
    ("L'option C est correcte.", None, "C"),
    ("Réponse : A ou B", None, None),
    ("A l'évidence, oui.", None, None),
    # Spanish
    ("La respuesta correcta es B.", None, "B"),
    ("La respuesta correcta es la (C)", None, "C"),
    ("Respuesta: D)", None, "D"),
    ("La opción correcta es la B.", None, "B"),
    ("Elijo la opción C.", None, "C"),
    ("Respuesta: A o B", None, None),
    ("A veces es rojo.", None, None),
    # Italian, Portuguese, Dutch, Polish, Turkish, Vietnamese, Indonesian
    ("La risposta corretta è la B.", None, "B"),
    ("Risposta: C", None, "C"),
    ("A resposta correta é B.", None, "B"),
    ("A resposta é a letra C.", None, "C"),
    ("Resposta: D", None, "D"),
    ("A opção correta é C.", None, "C"),
    ("Alternativa B", None, "B"),
    ("Het juiste antwoord is B.", None, "B"),
    ("Odpowiedź: C", None, "C"),
    ("Prawidłowa odpowiedź to B.", None, "B"),
    ("Cevap: D", None, "D"),
    ("Doğru cevap B'dir.", None, "B"),
    ("Đáp án: B", None, "B"),
    ("Đáp án đúng là C.", None, "C"),
    ("Jawaban: B", None, "B"),
    ("Jawabannya adalah D.", None, "D"),
    # Russian and Greek; Cyrillic В looks like the second letter and is the third
    ("Ответ: B", None, "B"),
    ("Правильный ответ — C.", None, "C"),
    ("Ответ: Б", None, "B"),
    ("Ответ: А", None, "A"),
    ("Ответ: В", None, None),
    ("Ответ: Г)", None, "D"),
    ("Ответ: С", None, "C"),
    ("Правильный ответ: (б)", None, "B"),
    ("Ответ: Автомобиль", None, None),
    ("Απάντηση: Γ", None, "C"),
    ("Δ", None, "D"),
    # Chinese
    ("答案是B。", 颜色, "B"),
    ("答案为C", 颜色, "C"),
    ("正确答案是：D", 颜色, "D"),
    ("正确答案：（B）", 颜色, "B"),
    ("【答案】C", 颜色, "C"),
    ("【答案】：D", 颜色, "D"),
    ("故选B。", 颜色, "B"),
    ("故选：C．", 颜色, "C"),
    ("应选 D", 颜色, "D"),
    ("我选择B", 颜色, "B"),
    ("选B", 颜色, "B"),
    ("选项C正确", 颜色, "C"),
    ("C选项正确", 颜色, "C"),
    ("B是正确答案", 颜色, "B"),
    ("因此，正确的选项是B。", 颜色, "B"),
    ("答案是选项B", 颜色, "B"),
    ("答案：蓝", 颜色, "B"),
    ("蓝", 颜色, "B"),
    ("答案是A或B", 颜色, None),
    ("答案是A和C", 颜色, None),
    ("A、B都对", 颜色, None),
    ("答案不是A", 颜色, None),
    ("不选A，选B", 颜色, "B"),
    ("答案：②", 颜色, "B"),
    ("答案：乙", None, "B"),
    ("丙", None, "C"),
    ("Ｂ．蓝", 颜色, "B"),
    ("正確答案是B", None, "B"),
    ("如图，点A在圆上", 颜色, None),
    # Japanese
    ("答えはBです。", None, "B"),
    ("正解はCです", None, "C"),
    ("正解：D", None, "D"),
    ("解答：イ", None, "B"),
    ("答え：③", None, "C"),
    ("Bが正解です。", None, "B"),
    ("正しい答えは（B）です。", None, "B"),
    ("Bです。", None, "B"),
    ("AかBです", None, None),
    # Korean
    ("정답: B", None, "B"),
    ("정답은 C입니다.", None, "C"),
    ("답은 D이다", None, "D"),
    ("정답: ③", None, "C"),
    ("정답은 ②번입니다.", None, "B"),
    ("2번", None, "B"),
    ("B가 정답입니다.", None, "B"),
    ("정답은 A 또는 B입니다", None, None),
    # Arabic, Hebrew, Hindi, Thai
    ("الإجابة: B", None, "B"),
    ("الإجابة الصحيحة هي C.", None, "C"),
    ("الإجابة: ب", None, "B"),
    ("الجواب هو (ج)", None, "C"),
    ("התשובה היא ב", None, "B"),
    ("תשובה: ד", None, "D"),
    ("उत्तर: B", None, "B"),
    ("सही उत्तर C है।", None, "C"),
    ("सही उत्तर (ख) है।", None, "B"),
    ("คำตอบ: B", None, "B"),
    ("คำตอบคือ ค", None, "C"),
    # one letter in many forms
    ("Ⓑ", None, "B"),
    ("ⓑ", None, "B"),
    ("⒝", None, "B"),
    ("𝐁", None, "B"),
    ("🅱", None, "B"),
    ("②", None, "B"),
    ("❷", None, "B"),
    ("⑵", None, "B"),
    ("Ⅱ", None, "B"),
    ("２", None, "B"),
    ("٢", None, "B"),
    ("（Ｂ）", None, "B"),
    ("「B」", None, "B"),
    ("【B】", None, "B"),
    ("《B》", None, "B"),
    ("Answer: Ⓒ", None, "C"),
    ("<answer>Ｃ</answer>", None, "C"),
]

CORRECTIONS = [
    ("The answer is not A but C.", None, "C"),
    ("The answer is not A, but rather (C)", None, "C"),
    ("Answer: not B but D", None, "D"),
    ("The answer is not blue but green", COLORS, "C"),
    ("Die Antwort ist nicht A, sondern C.", None, "C"),
    ("答案不是A而是C。", None, "C"),
    ("The answer is not A but B or C", None, None),
    ("The answer is not only A but also C", None, None),
    ("The answer is not A. But C is tempting.", None, None),
]
NUMBERS = [
    ("정답은 ③입니다", None, "C"),
    ("정답은 ③입니다.", COLORS, "C"),
    ("정답은 3이다", COLORS, "C"),
    ("答えは③です", None, "C"),
    ("答えは3番です。", COLORS, "C"),
    ("正解は③だ", None, "C"),
    ("答えは3です", ANGLES, None),
    ("정답은 45입니다", ANGLES, "B"),
    ("x = 45", ANGLES, "B"),
    ("So x = 45.", ANGLES, "B"),
    ("2x = 90, so x = 45", ANGLES, "B"),
    ("2x = 90\n\nTherefore, $x = 45$.", ANGLES, "B"),
    (r"\(x = 45\)", ANGLES, "B"),
    ("The answer is x = 45.", ANGLES, "B"),
    ("x = 45°", ["30°", "45°", "60°", "90°"], "B"),
    ("x = 45 or x = 60", ANGLES, None),
    ("x = 30, x = 45", ANGLES, None),
    ("x = 50", ANGLES, None),
    ("x = 45.5", ANGLES, None),
    ("The answer is 45.5", ANGLES, None),
    ("not x = 45", ANGLES, None),
    ("Given x = 45, we look for y.", ANGLES, None),
    ("A = 45", ANGLES, None),
]


@pytest.mark.parametrize(("text", "choices", "expected"), CORRECTIONS + NUMBERS)
def test_corrections_positions_and_equations(text, choices, expected):
    assert extract_choice(text, choices) == expected


@pytest.mark.parametrize(("text", "choices", "expected"), OTHER)
def test_answers_in_other_languages_and_scripts(text, choices, expected):
    assert extract_choice(text, choices) == expected


@pytest.mark.parametrize(
    ("answer", "choices", "expected"),
    [
        ("Ⓑ", COLORS, "B"),
        ("②", COLORS, "B"),
        ("（Ｂ）", COLORS, "B"),
        ("Option B", COLORS, "B"),
        ("option (b)", COLORS, "B"),
        ("B: blue", COLORS, "B"),
        ("B. blue", LABELLED, "B"),
        ("(B) blue", LABELLED, "B"),
        ("blue", LABELLED, "B"),
        ("BLUE", BRACKETED, "B"),
        ("2. blue", NUMBERED, "B"),
        ("2", NUMBERED, "B"),
        (1, NUMBERED, "B"),
        (r"\boxed{B}", COLORS, "B"),
        (r"$\boxed{\text{blue}}$", COLORS, "B"),
        ("<answer>B</answer>", COLORS, "B"),
        ("<answer>blue</answer>", COLORS, "B"),
        ("蓝", 颜色, "B"),
        ("Б", None, "B"),
        ("ب", None, "B"),
        ("乙", None, "B"),
        ("ii", COLORS, "B"),
        ("В", None, None),  # the third Cyrillic letter, or a mistyped B
        ("A and B", COLORS, None),
        ("A blue bird", COLORS, None),
        (r"\boxed{A, B}", COLORS, None),
        ("<answer></answer>", COLORS, None),
        ("5", COLORS, None),
        (4, COLORS, None),
    ],
)
def test_the_gold_answer_is_read_in_every_usual_spelling(answer, choices, expected):
    assert gold_letter(answer, choices) == expected


def test_an_ambiguous_completion_earns_nothing_and_an_ambiguous_gold_is_unscored():
    completions = ["Ответ: Б", "Ответ: В", "Ответ: Б", "A or B"]
    assert multiple_choice_reward(completions, ["B", "B", "В", "A"]) == [1.0, 0.0, None, 0.0]


@pytest.mark.parametrize(
    "text",
    ["A or " * 3000, "not " * 3000 + "B", "(" * 10000, "the answer is " * 2000, "\\boxed{" * 3000, "A " * 5000,
     "B and not C, " * 2000, " " * 20000, "<answer>" * 2000, "the " * 5000 + "B", "*" * 20000, "选" * 10000,
     "A, " * 5000, "x = 4, " * 3000, "answer is not " * 2000, "<b>" * 5000, "<think>" * 5000],
    ids=lambda text: text[:16],
)  # fmt: skip
def test_a_text_that_goes_on_for_ever_is_read_in_a_moment(text):
    start = time.perf_counter()
    extract_choice(text, COLORS)
    assert time.perf_counter() - start < 2.0
