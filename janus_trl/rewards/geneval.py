"""GenEval as a reward: any object detector, behind a small HTTP contract or a function, and the official rules.

Contract of a detector. A function `detector(image, labels)` gets an RGB PIL picture and the class names that the prompt
speaks of (open-vocabulary detectors need them, others ignore them). A server gets them as JSON by POST:
`{"image": "data:image/png;base64,...", "labels": ["dog", "teddy bear"]}`. The function returns, and the server replies
`{"detections": [...]}` with, a list of

    {"label": "dog", "box": [left, top, right, bottom], "score": 0.92, "color": "brown"}

with the box in pixels and the score from 0 to 1. `color` may be missing: then, where a prompt names a colour,
`color_classifier(image, label, boxes)` must return one of `geneval_rules.COLORS` for each box. (The official scorer
classifies with CLIP ViT-L/14 the object, cut out by its mask on grey.)
"""

import asyncio
import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from janus_trl.rewards.calling import Scores
from janus_trl.rewards.geneval_rules import COLORS, Detection, Thresholds, Verdict, check_clauses, judge
from janus_trl.rewards.http_calls import (
    JsonService,
    MalformedReply,
    call_counts,
    check_some_answered,
    data_url,
    read_key,
    unscored,
)
from janus_trl.rewards.plugins import import_callable


class GenEval:
    """1.0 if the detected objects meet the row's include and exclude lists, else 0.0; or the fraction that is met.

    Rows need the columns `include` and `exclude` (lists, or JSON strings as `dataset_format: geneval` gives) and `tag`
    where `counting` prompts have a threshold of their own. A call to the server that fails for good is None: its row is
    not trained on, and counted in `rewards/<name>/failed`; a step in which all fail ends the run.

    Args:
        url: Address of a detection server; either this or `detector`.
        detector: `module:function` of a detector in this process (see the module's text for both contracts).
        color_classifier: `module:function`, for detectors that give no colour.
        mode: `correct` is the official score; `share` counts the conditions that hold (a denser signal).
        threshold, counting_threshold, max_objects, max_overlap, position_threshold: Numbers of the official scorer.
        api_key_env: Name of an environment variable with a key for the server.
        concurrency, timeout, max_retries: Calls at a time; seconds for one try; further tries.

    Raises:
        ValueError: Not exactly one of url and detector, a path that cannot be imported, numbers out of range.
    """

    def __init__(
        self,
        url: str | None = None,
        detector: str | None = None,
        color_classifier: str | None = None,
        mode: Literal["correct", "share"] = "correct",
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        max_objects: int = 16,
        max_overlap: float = 1.0,
        position_threshold: float = 0.1,
        api_key_env: str | None = None,
        concurrency: int = 16,
        timeout: float = 60.0,
        max_retries: int = 3,
    ):
        if (url is None) == (detector is None):
            raise ValueError("reward 'geneval': set either `url` (a detection server) or `detector` (module:function).")
        self._thresholds = Thresholds(threshold, counting_threshold, max_objects, max_overlap, position_threshold)
        _check_thresholds(self._thresholds)
        self._mode = mode
        named = {"detector": detector, "color_classifier": color_classifier}
        self._makers = {name: import_callable(path, "geneval", name) for name, path in named.items() if path}
        self._detector: Callable | None = None
        self._classify: Callable | None = None
        key = read_key("geneval", api_key_env)
        self._service = JsonService("geneval", url, key, timeout, max_retries, concurrency) if url else None

    def load(self) -> None:
        """Make detector and classifier, unless that is done already (classes may load a model then)."""
        if self._makers:
            made = {name: make() for name, make in self._makers.items()}
            self._detector, self._classify = made.get("detector"), made.get("color_classifier")
            self._makers = {}

    async def __call__(
        self,
        generated_images: list,
        include: list,
        exclude: list | None = None,
        tag: list | None = None,
        **columns: Any,
    ) -> Scores:
        """One value per RGB PIL picture.

        Raises:
            ValueError: A row whose lists break the format, a detection that breaks the contract, a colour that is
                asked for and neither given nor classified.
            NoAnswer: (a ValueError) all calls failed.
        """
        self.load()
        count = len(generated_images)
        rows = [_clauses(*row) for row in zip(range(count), include, exclude or [None] * count, strict=True)]
        labels = [sorted({clause["class"] for clause in [*wanted, *unwanted]}) for wanted, unwanted in rows]
        found, counts, failed = await self._detect(generated_images, labels)
        tags = tag or [""] * count
        # A thread of its own, as for the detector: `color_classifier` may be a model.
        values = await asyncio.to_thread(
            lambda: [
                None if objects is None else self._value(image, *row, objects, tag or "")
                for image, row, objects, tag in zip(generated_images, rows, found, tags, strict=True)
            ]
        )
        return Scores(values, counts=counts, failed=failed)

    def verdict(self, image: Any, include: list, exclude: list, found: Sequence[Detection], tag: str = "") -> Verdict:
        """The conditions of one row, one by one."""
        return judge(include, exclude, found, functools.partial(self._colors, image), tag, self._thresholds)

    def _value(self, image: Any, include: list, exclude: list, found: list[Detection], tag: str) -> float:
        verdict = self.verdict(image, include, exclude, found, tag)
        return float(verdict.correct) if self._mode == "correct" else verdict.share

    async def _detect(
        self, images: list, labels: list
    ) -> tuple[list[list[Detection] | None], dict[str, float], list[int]]:
        if self._service is None:
            # A thread of its own: the event loop belongs to the calls of other rewards, too.
            return await asyncio.to_thread(lambda: [self._detect_here(*row) for row in zip(images, labels)]), {}, []
        builds = [functools.partial(_body, *row) for row in zip(images, labels)]
        calls = await self._service.post_all(builds, lambda reply: read_detections(reply["detections"]))
        check_some_answered(self._service, calls)
        return [call.value for call in calls], call_counts(calls), unscored(calls)

    def _detect_here(self, image: Any, labels: list[str]) -> list[Detection]:
        return read_detections(self._detector(image, labels))

    def _colors(self, image: Any, found: list[Detection]) -> list[str]:
        if found and all(detection.color for detection in found):
            return [detection.color for detection in found]
        if self._classify is None:
            raise ValueError(
                f"reward 'geneval': a prompt asks for the colour of a {found[0].label}, but the detector gives no "
                "`color`; add it to the detections, or set `color_classifier: module:function`."
            )
        colors = list(self._classify(image, found[0].label, [detection.box for detection in found]))
        wrong = [color for color in colors if color not in COLORS]
        if len(colors) != len(found) or wrong:
            raise ValueError(
                f"reward 'geneval': color_classifier returned {colors!r:.80} for {len(found)} boxes; expected one of "
                f"{', '.join(COLORS)} for each."
            )
        return colors


def read_detections(detections: Any) -> list[Detection]:
    """Check and convert what a detector returned.

    Raises:
        MalformedReply: (a ValueError) naming the entry and what is wrong with it.
    """
    if not isinstance(detections, list | tuple):
        raise MalformedReply(f"reward 'geneval': detections are {detections!r:.60}; expected a list.")
    return [_read_detection(entry) for entry in detections]


def _read_detection(entry: Any) -> Detection:
    try:
        label, box, score = entry["label"], tuple(float(x) for x in entry["box"]), float(entry["score"])
        color = entry.get("color")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedReply(
            f"reward 'geneval': detection {entry!r:.80} needs label, box [left, top, right, bottom] and score."
        ) from error
    if len(box) != 4 or not all(map(math.isfinite, (*box, score))) or box[0] > box[2] or box[1] > box[3]:
        raise MalformedReply(
            f"reward 'geneval': box of {entry!r:.80} must be four numbers, left <= right, top <= bottom."
        )
    return Detection(label, box, score, color)


def _body(image: Any, labels: list[str]) -> dict:
    return {"image": data_url(image), "labels": labels}


def _clauses(row: int, include: Any, exclude: Any) -> tuple[list[dict], list[dict]]:
    """The lists of one row, without the empty keys that Arrow adds."""
    lists = []
    for value in (include, exclude):
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"reward 'geneval': row {row} has {value!r:.60}, which is not valid JSON.") from error
        lists.append(list(value) if isinstance(value, list | tuple) else value or [])
    if problem := check_clauses(*lists):
        raise ValueError(f"reward 'geneval': row {row}: {problem}. Load such data with `dataset_format: geneval`.")
    return lists[0], lists[1]


def check_rows(dataset: Any) -> None:
    """Read every row's lists before training.

    Raises:
        ValueError: Naming the first row that breaks the format.
    """
    exclude = list(dataset["exclude"]) if "exclude" in dataset.column_names else [None] * len(dataset)
    for row in zip(range(len(dataset)), list(dataset["include"]), exclude):
        _clauses(*row)


def _check_thresholds(thresholds: Thresholds) -> None:
    for name, value in vars(thresholds).items():
        if name != "max_objects" and not 0 <= value <= 1:
            raise ValueError(f"reward 'geneval': {name} threshold is {value}; it must be from 0 to 1.")
    if thresholds.max_objects < 1:
        raise ValueError(f"reward 'geneval': max_objects is {thresholds.max_objects}; it must be at least 1.")
