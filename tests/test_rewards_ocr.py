"""The OCR reward: which text a prompt quotes, how much of it is read, and which engine reads."""

import importlib.util
import sys

import pytest
from datasets import Dataset
from PIL import Image, ImageDraw, ImageFont

from janus_trl.rewards import check_reward_rows, get_reward_funcs, ocr
from janus_trl.rewards.ocr import edit_distance, quoted_texts, text_score

needs_rapidocr = pytest.mark.skipif(
    importlib.util.find_spec("rapidocr") is None or importlib.util.find_spec("onnxruntime") is None,
    reason="rapidocr is not installed",
)


def reward_of(name: str, **args):
    return get_reward_funcs({"name": name, "args": args}).funcs[0]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ('a sign that says "OPEN"', ["OPEN"]),
        ('a shop "Joe\'s" with a sign "50% OFF"', ["Joe's", "50% OFF"]),
        ("a banner “Happy Birthday”", ["Happy Birthday"]),
        ("ein Schild „Bäckerei“", ["Bäckerei"]),
        ("une enseigne « Café »", [" Café "]),
        ("看板に「営業中」", ["営業中"]),
        ("the dog's bowl isn't 'red'", []),
        ('an empty "" quote and a blank " "', []),
        ('an open "quote', []),
        ("a cup", []),
    ],
)
def test_the_text_that_a_prompt_quotes(prompt, texts):
    assert quoted_texts(prompt) == texts


@pytest.mark.parametrize(
    ("wanted", "read", "value"),
    [
        (["OPEN"], "open", 1.0),
        (["OPEN"], "we are O P E N now", 1.0),
        (["OPEN"], "OPFN", 0.75),
        (["OPEN"], "OPE", 0.75),
        (["OPEN"], "", 0.0),
        (["OPEN"], "completely other words", 0.0),
        (["Spring Collection"], "Spring Colection", 1 - 1 / 16),
        (["SALE", "50%"], "50% SALE", 1.0),
        (["SALE", "50%"], "SALE", 4 / 7),
        (["ＣＡＦＥ"], "cafe", 1.0),
    ],
)
def test_the_share_of_the_quoted_text_that_is_read(wanted, read, value):
    assert text_score(wanted, read) == pytest.approx(value)


def test_edit_distances():
    assert [edit_distance(*pair) for pair in [("kitten", "sitting"), ("", "abc"), ("abc", ""), ("ab", "ba")]] == [
        3,
        3,
        3,
        2,
    ]


ENGINE = """
import numpy

def read(image):
    return {0: "OPEN", 255: "CLOSED"}[image.getpixel((0, 0))[0]]

def read_nothing(image):
    return None
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    (tmp_path / "my_ocr.py").write_text(ENGINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("my_ocr", None)


def test_an_engine_of_ones_own_reads_the_pictures(engine):
    prompts = ['a door "OPEN"', 'a door "OPEN"', "a door"]
    images = [Image.new("RGB", (4, 4), color) for color in ("black", "white", "black")]
    values = reward_of("ocr", engine="my_ocr:read")(prompts=prompts, completions=[""] * 3, generated_images=images)
    assert values == [1.0, 0.0, None]  # "closed" is 5 edits from "open", which has 4 letters
    with pytest.raises(ValueError, match="the engine returned None; expected the text"):
        reward_of("ocr", engine="my_ocr:read_nothing")(
            prompts=prompts[:1], completions=[""], generated_images=images[:1]
        )


def test_an_engine_that_is_not_there_is_refused_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(ocr.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"rapidocr or easyocr is not installed. Run pip install 'janus_trl\[ocr\]'"):
        reward_of("ocr")
    with pytest.raises(ValueError, match="easyocr is not installed"):
        reward_of("ocr", engine="easyocr")
    with pytest.raises(ValueError, match="engine is 'tesseract'; valid: auto, rapidocr, easyocr, or module:function"):
        reward_of("ocr", engine="tesseract")
    with pytest.raises(ValueError, match="which cannot be imported"):
        reward_of("ocr", engine="no_such_module_here:read")


def test_prompts_without_a_quote_are_counted_before_training(engine, caplog):
    spec = {"name": "ocr", "args": {"engine": "my_ocr:read"}}
    check_reward_rows(spec, Dataset.from_dict({"prompt": ['a "sign"', "a cup"]}))
    assert "1 of 2 prompts quote no text" in caplog.text
    with pytest.raises(ValueError, match="none of 1 prompts quotes a text"):
        check_reward_rows(spec, Dataset.from_dict({"prompt": ["a cup"]}))


@needs_rapidocr
def test_a_real_engine_reads_a_sign():
    image = Image.new("RGB", (384, 384), "white")
    ImageDraw.Draw(image).text((60, 150), "OPEN DAILY", fill="black", font=ImageFont.load_default(48))
    reward = reward_of("ocr")
    shared = {"completions": ["", ""], "generated_images": [image, Image.new("RGB", (384, 384), "white")]}
    assert reward(prompts=['a sign "Open Daily"'] * 2, **shared) == [1.0, 0.0]
