"""GenEval: detectors behind HTTP or a function, and what is refused."""

import asyncio
import base64
import io
import json
import threading

import pytest
from datasets import Dataset
from PIL import Image

from janus_trl.rewards import check_reward_rows, get_reward_funcs
from janus_trl.rewards.geneval import GenEval, read_detections
from janus_trl.rewards.geneval_rules import (
    check_clauses,
)
from tests.geneval_rows import DOG, LEFT, RED_DOG
from tests.json_server import JsonServer, Reply

BLANK = Image.new("RGB", (32, 32))
FOUND = [{"label": "dog", "box": [0, 0, 9, 9], "score": 0.9, "color": "red"}]
MODULE = """
import threading

ASKED = []

def detector(image, labels):
    ASKED.append(labels)
    THREADS.append(threading.get_ident())
    shade = image.getpixel((0, 0))[0]
    return [{"label": "dog", "box": [0, 0, 9, 9], "score": shade / 255}]

THREADS = []

def colors(image, label, boxes):
    THREADS.append(threading.get_ident())
    return ["red"] * len(boxes)

class Detector:
    def __call__(self, image, labels):
        return [{"label": "dog", "box": [0, 0, 9, 9], "score": 0.99, "color": "red"}]

def no_color(image, label, boxes):
    return ["teal"] * len(boxes)

def broken(image, labels):
    return [{"label": "dog"}]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module `my_detector` in the working folder."""
    import sys

    (tmp_path / "my_detector.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("my_detector", None)


def score(reward: GenEval, include: list, exclude: list | None = None, images: list | None = None, **columns) -> list:
    images = images or [BLANK] * len(include)
    return asyncio.run(reward(generated_images=images, include=include, exclude=exclude, **columns))


def test_a_function_detects_and_another_names_the_colour(module):
    reward = GenEval(detector="my_detector:detector", color_classifier="my_detector:colors")
    images = [Image.new("RGB", (32, 32), (shade, 0, 0)) for shade in (255, 50, 255)]
    blue = [{"class": "dog", "count": 1, "color": "blue"}]
    assert score(reward, [RED_DOG, RED_DOG, json.dumps(blue)], images=images) == [1.0, 0.0, 0.0]
    import my_detector

    assert my_detector.ASKED == [["dog"]] * 3


def test_detector_and_colour_classifier_run_beside_the_event_loop(module):
    reward = GenEval(detector="my_detector:detector", color_classifier="my_detector:colors")
    white = [Image.new("RGB", (32, 32), "white")]
    assert score(reward, [RED_DOG], images=white) == [1.0]
    import my_detector

    assert len(my_detector.THREADS) == 2 and threading.get_ident() not in my_detector.THREADS


def test_a_class_is_made_an_instance_when_the_reward_is_loaded(module):
    rewards = get_reward_funcs({"name": "geneval", "args": {"detector": "my_detector:Detector"}}, task="t2i")
    rewards.load()
    call = rewards.funcs[0](prompts=[""], completions=[""], generated_images=[BLANK], include=[RED_DOG])
    assert asyncio.run(call) == [1.0]


def test_the_share_is_given_on_request_and_empty_keys_of_arrow_do_not_matter(module):
    reward = GenEval(detector="my_detector.detector", mode="share")
    white = [Image.new("RGB", (32, 32), "white")]
    include = [
        {"class": "dog", "count": 1, "color": None, "position": None},
        {"class": "cat", "count": 1, "color": None},
    ]
    assert score(reward, [include], [None], white) == [0.5]


def test_counting_prompts_are_known_by_their_tag(module):
    reward = GenEval(detector="my_detector:detector")
    grey = [Image.new("RGB", (32, 32), (200, 0, 0))] * 2  # score 0.78
    assert score(reward, [DOG, DOG], None, grey, tag=["counting", "single_object"]) == [0.0, 1.0]


def test_a_colour_that_nobody_names_is_an_error_with_the_fix(module):
    white = [Image.new("RGB", (32, 32), "white")]
    with pytest.raises(ValueError, match="colour of a dog, but the detector gives no `color`.*color_classifier"):
        score(GenEval(detector="my_detector:detector"), [RED_DOG], images=white)
    with pytest.raises(ValueError, match=r"returned \['teal'\] for 1 boxes"):
        score(
            GenEval(detector="my_detector:detector", color_classifier="my_detector:no_color"), [RED_DOG], images=white
        )
    with pytest.raises(ValueError, match="needs label, box"):
        score(GenEval(detector="my_detector:broken"), [DOG])


def test_a_server_gets_picture_and_labels_and_a_failing_call_is_unscored():
    def respond(body, number):
        picture = Image.open(io.BytesIO(base64.b64decode(body["image"].partition(",")[2])))
        if picture.getpixel((0, 0)) == (9, 9, 9):
            return Reply(status=400)
        return Reply({"detections": FOUND})

    with JsonServer(respond).running() as server:
        reward = GenEval(url=f"{server.url}/detect")
        images = [BLANK, Image.new("RGB", (8, 8), (9, 9, 9)), BLANK]
        values = score(reward, [RED_DOG, DOG, LEFT], images=images)
        assert values == [1.0, None, 0.0]
        assert sorted(body["labels"] for _, _, body in server.requests) == [["cat", "dog"], ["dog"], ["dog"]]
        assert {path for path, _, _ in server.requests} == {"/detect"}
        assert values.counts["failed"] == 1.0 and values.counts["retries"] == 0.0
    with pytest.raises(ValueError, match=f"all 1 calls to {server.url}/detect failed"):
        score(GenEval(url=f"{server.url}/detect", max_retries=0), [DOG])


@pytest.mark.parametrize(
    "detections",
    [{"dog": 1}, [{"label": "dog", "box": [0, 0, 9], "score": 1}], [{"label": "dog", "box": [9, 0, 0, 9], "score": 1}],
     [{"label": "dog", "box": [0, 0, 9, float("nan")], "score": 1}], [{"box": [0, 0, 9, 9], "score": 1}], ["dog"]],
)  # fmt: skip
def test_detections_that_break_the_contract_are_refused(detections):
    with pytest.raises(ValueError, match="reward 'geneval'"):
        read_detections(detections)


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ([], [], "include not empty"),
        ([{"count": 1}], [], "names no `class`"),
        ([{"class": "dog", "count": 0}], [], "`count` of 1 or more"),
        ([{"class": "dog", "count": True}], [], "`count` of 1 or more"),
        ([{"class": "dog", "count": 1, "color": "teal"}], [], "a color other than red, orange"),
        ([{"class": "dog", "count": 1, "position": ["left of", 0]}], [], "an earlier clause"),
        ([*DOG, {"class": "cat", "count": 1, "position": ["near", 0]}], [], "one of left of"),
        (DOG, [{"class": "cat"}], "`count`"),
    ],
)
def test_rows_that_break_the_format_are_named(include, exclude, message):
    assert message in check_clauses(include, exclude)
    rows = Dataset.from_dict(
        {"include": [json.dumps(DOG), json.dumps(include)], "exclude": ["[]", json.dumps(exclude)]}
    )
    with pytest.raises(ValueError, match="row 1"):
        check_reward_rows({"name": "geneval", "args": {"url": "http://localhost:1"}}, rows)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "set either `url`"),
        ({"url": "http://localhost:1", "detector": "a:b"}, "set either `url`"),
        ({"detector": "detector"}, "write module:function"),
        ({"detector": "no_such_module_here:f"}, "detector is 'no_such_module_here:f', which cannot be imported"),
        ({"detector": "json:no_such_function"}, "which cannot be imported: .*no_such_function"),
        ({"detector": "os.name"}, "and no function"),
        ({"url": "http://localhost:1", "mode": "strict"}, "valid: correct, share"),
        ({"url": "http://localhost:1", "threshold": 1.5}, "score threshold is 1.5; it must be from 0 to 1"),
        ({"url": "http://localhost:1", "max_objects": 0}, "max_objects is 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        get_reward_funcs({"name": "geneval", "args": args}, task="t2i", columns=["prompt", "include"])


def test_rows_without_the_lists_are_refused_before_training():
    with pytest.raises(ValueError, match="needs the column 'include'"):
        get_reward_funcs({"name": "geneval", "args": {"url": "http://localhost:1"}}, task="t2i", columns=["prompt"])
