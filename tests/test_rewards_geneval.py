"""GenEval: the official rules on scripted detections, and detectors behind HTTP or a function."""

import asyncio
import base64
import io
import json
import random
import threading
from pathlib import Path

import pytest
from datasets import Dataset
from PIL import Image

from janus_trl.rewards import check_reward_rows, get_reward_funcs
from janus_trl.rewards.geneval import GenEval, read_detections
from janus_trl.rewards.geneval_rules import (
    COLORS,
    Detection,
    Thresholds,
    check_clauses,
    judge,
    kept_objects,
    overlap,
    relative_position,
)
from tests.json_server import JsonServer, Reply

OFFICIAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "prompts" / "geneval_official.jsonl"
needs_official = pytest.mark.skipif(not OFFICIAL.is_file(), reason="the folder of real prompts is absent")

DOG = [{"class": "dog", "count": 1}]
TWO_DOGS = [{"class": "dog", "count": 2}]
NOT_THREE = [{"class": "dog", "count": 3}]
RED_DOG = [{"class": "dog", "count": 1, "color": "red"}]
LEFT = [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["left of", 0]}]
BOTH_COLORS = [{"class": "cat", "count": 1, "color": "blue"}, {"class": "dog", "count": 1, "color": "red"}]


def seen(label: str, left: float = 0, top: float = 0, score: float = 0.95, color: str | None = None) -> Detection:
    return Detection(label, (left, top, left + 20, top + 20), score, color)


def own_colors(found):
    return [detection.color for detection in found]


def judged(include, exclude, detections, tag="", **thresholds):
    verdict = judge(include, exclude, detections, own_colors, tag, Thresholds(**thresholds))
    return float(verdict.correct), round(verdict.share, 4)


# --------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("include", "exclude", "detections", "tag", "correct", "share"),
    [
        # presence; the threshold itself is not enough
        (DOG, [], [seen("dog")], "single_object", 1, 1),
        (DOG, [], [seen("cat")], "single_object", 0, 0),
        (DOG, [], [seen("dog", score=0.3)], "single_object", 0, 0),
        (DOG, [], [seen("dog", score=0.31)], "single_object", 1, 1),
        (DOG, [], [seen("dog"), seen("dog", 50), seen("cat")], "single_object", 1, 1),
        ([*DOG, {"class": "cat", "count": 1}], [], [seen("dog")], "two_object", 0, 0.5),
        # counting has a threshold of its own, and an upper bound
        (TWO_DOGS, NOT_THREE, [seen("dog"), seen("dog", 50)], "counting", 1, 1),
        (TWO_DOGS, NOT_THREE, [seen("dog"), seen("dog", 50, score=0.9)], "counting", 0, 0.5),
        (TWO_DOGS, NOT_THREE, [seen("dog"), seen("dog", 50, score=0.5)], "", 1, 1),
        (TWO_DOGS, NOT_THREE, [seen("dog"), seen("dog", 50), seen("dog", 99)], "counting", 0, 0.5),
        (TWO_DOGS, NOT_THREE, [seen("dog"), seen("dog", 50), seen("dog", 99, score=0.8)], "counting", 1, 1),
        (TWO_DOGS, NOT_THREE, [], "counting", 0, 0),  # nothing there is not "fewer than three"
        (DOG, [{"class": "cat", "count": 1}], [seen("dog")], "", 1, 1),
        (DOG, [{"class": "cat", "count": 1}], [seen("dog"), seen("cat")], "", 0, 0.5),
        # colour, of the most certain objects only
        (RED_DOG, [], [seen("dog", color="red")], "colors", 1, 1),
        (RED_DOG, [], [seen("dog", color="blue")], "colors", 0, 0.5),
        (RED_DOG, [], [seen("dog", color="blue"), seen("dog", 50, score=0.5, color="red")], "colors", 0, 0.5),
        (RED_DOG, [], [seen("dog", score=0.5, color="blue"), seen("dog", 50, color="red")], "colors", 1, 1),
        (BOTH_COLORS, [], [seen("cat", color="blue"), seen("dog", color="red")], "color_attr", 1, 1),
        (BOTH_COLORS, [], [seen("cat", color="red"), seen("dog", color="blue")], "color_attr", 0, 0.5),
        # position
        (LEFT, [], [seen("cat", 100), seen("dog", 0)], "position", 1, 1),
        (LEFT, [], [seen("cat", 0), seen("dog", 100)], "position", 0, 0.6667),
        (LEFT, [], [seen("dog", 0)], "position", 0, 0.3333),
        (LEFT, [], [seen("cat", 0)], "position", 0, 0.3333),
        (LEFT, [], [seen("cat", 3), seen("dog", 0)], "position", 0, 0.6667),  # nearer than a tenth of both widths
    ],
)
def test_the_rules(include, exclude, detections, tag, correct, share):
    assert judged(include, exclude, detections, tag) == (correct, share)


@pytest.mark.parametrize(
    ("left", "top", "relations"),
    [
        (100, 0, {"right of"}),
        (-100, 0, {"left of"}),
        (0, 100, {"below"}),
        (0, -100, {"above"}),
        (100, 100, {"right of", "below"}),
        (100, 50, {"right of"}),
        (4, 0, set()),  # 4 = 0.1 * (20 + 20)
        (9, 0, {"right of"}),  # (9 - 4) / 9 > 0.5
        (7, 0, set()),  # (7 - 4) / 7 < 0.5
        (0, 0, set()),
    ],
)
def test_positions_are_read_from_centres_less_a_tenth_of_the_sizes(left, top, relations):
    assert relative_position(seen("dog", left, top), seen("cat")) == relations


def test_objects_are_sorted_limited_and_freed_of_copies():
    crowd = [seen("dog", left=30 * i, score=0.4 + i / 100) for i in range(20)]
    kept = kept_objects(crowd)["dog"]
    assert [round(d.score, 2) for d in kept] == [round(0.59 - i / 100, 2) for i in range(16)]
    copies = [seen("dog", score=0.8), seen("dog", left=1, score=0.9), seen("cat", score=0.7)]
    assert len(kept_objects(copies)["dog"]) == 2
    assert kept_objects(copies, thresholds=Thresholds(max_overlap=0.5)) == {"dog": [copies[1]], "cat": [copies[2]]}
    assert overlap((0, 0, 9, 9), (0, 0, 9, 9)) == 1.0
    assert overlap((0, 0, 9, 9), (5, 0, 14, 9)) == pytest.approx(50 / 150)
    assert overlap((0, 0, 9, 9), (20, 20, 29, 29)) == 0.0


def perfect(row: dict) -> list[Detection]:
    """Detections that meet the whole prompt: objects in the middle, then each one in its place around the first."""
    places = {"left of": (0, 200), "right of": (400, 200), "above": (200, 0), "below": (200, 400)}
    found = []
    for number, clause in enumerate(row["include"]):
        for i in range(clause["count"]):
            left, top = places[clause["position"][0]] if "position" in clause else (200 + 30 * i, 200 + 30 * number)
            found.append(seen(clause["class"], left, top, 0.95 - i / 100, clause.get("color")))
    return found


@needs_official
def test_every_official_prompt_is_met_by_what_it_asks_for_and_by_nothing_less():
    rows = [json.loads(line) for line in OFFICIAL.read_text().splitlines()]
    assert len(rows) == 553
    for row in rows:
        lists = (row["include"], row.get("exclude", []))
        found = perfect(row)
        assert judged(*lists, found, row["tag"]) == (1.0, 1.0), row["prompt"]
        assert judged(*lists, [], row["tag"]) == (0.0, 0.0), row["prompt"]
        for i in range(len(found)):  # without any one of the objects
            correct, share = judged(*lists, found[:i] + found[i + 1 :], row["tag"])
            assert correct == 0.0 and share < 1.0, row["prompt"]
        if row["tag"] == "counting":
            assert judged(*lists, [*found, seen(row["include"][0]["class"], 400)], row["tag"])[0] == 0.0
        if row["tag"] == "position":
            mirrored = [d._replace(box=(420 - d.box[2], 420 - d.box[3], 420 - d.box[0], 420 - d.box[1])) for d in found]
            assert judged(*lists, mirrored, row["tag"]) == (0.0, round(2 / 3, 4)), row["prompt"]
        if row["tag"] in ("colors", "color_attr"):
            shifted = [d._replace(color=COLORS[COLORS.index(d.color) - 1]) for d in found]
            assert judged(*lists, shifted, row["tag"]) == (0.0, 0.5), row["prompt"]


@needs_official
def test_the_share_is_whole_exactly_where_the_official_score_is_one():
    rows = [json.loads(line) for line in OFFICIAL.read_text().splitlines()]
    draw = random.Random(0)
    both = {True: 0, False: 0}
    for row in rows:
        for _ in range(8):
            found = [d for d in perfect(row) if draw.random() < 0.9]
            found = [
                d._replace(color=d.color if draw.random() < 0.8 else "red", score=draw.uniform(0.2, 1)) for d in found
            ]
            correct, share = judged(row["include"], row.get("exclude", []), found, row["tag"])
            assert (correct == 1.0) == (share == 1.0) and 0.0 <= share <= 1.0
            both[correct == 1.0] += 1
    assert min(both.values()) > 500


# ----------------------------------------------------------------------------------------------------------- detectors

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
