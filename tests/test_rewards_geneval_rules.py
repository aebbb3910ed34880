"""GenEval: the official rules on scripted detections."""

import json
import random
from pathlib import Path

import pytest

from janus_trl.rewards.geneval_rules import (
    COLORS,
    Detection,
    Thresholds,
    judge,
    kept_objects,
    overlap,
    relative_position,
)
from tests.geneval_rows import DOG, LEFT, RED_DOG

OFFICIAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "prompts" / "geneval_official.jsonl"
needs_official = pytest.mark.skipif(not OFFICIAL.is_file(), reason="the folder of real prompts is absent")

TWO_DOGS = [{"class": "dog", "count": 2}]
NOT_THREE = [{"class": "dog", "count": 3}]
BOTH_COLORS = [{"class": "cat", "count": 1, "color": "blue"}, {"class": "dog", "count": 1, "color": "red"}]


def seen(label: str, left: float = 0, top: float = 0, score: float = 0.95, color: str | None = None) -> Detection:
    return Detection(label, (left, top, left + 20, top + 20), score, color)


def own_colors(found):
    return [detection.color for detection in found]


def judged(include, exclude, detections, tag="", **thresholds):
    verdict = judge(include, exclude, detections, own_colors, tag, Thresholds(**thresholds))
    return float(verdict.correct), round(verdict.share, 4)


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
