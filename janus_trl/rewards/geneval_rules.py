"""The rules of GenEval (arXiv:2310.11513): does a list of detected objects meet a prompt's include and exclude lists?

Thresholds and order of the checks are those of the official scorer: objects of a class are sorted by score, the first
`count` of them are looked at, and colour and position are asked of these alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")


class Detection(NamedTuple):
    """One object that a detector saw: `box` is (left, top, right, bottom) in pixels."""

    label: str
    box: tuple[float, float, float, float]
    score: float
    color: str | None = None


@dataclass(frozen=True)
class Thresholds:
    """The numbers of the official scorer.

    Attributes:
        score: Objects must score more than this.
        counting_score: The same for prompts with the tag `counting`.
        max_objects: Objects of a class that are looked at.
        max_overlap: Of two objects of a class whose boxes overlap by this share or more, the lesser goes; 1: none.
        position: Part of the two objects' sizes that their distance must exceed.
    """

    score: float = 0.3
    counting_score: float = 0.9
    max_objects: int = 16
    max_overlap: float = 1.0
    position: float = 0.1


@dataclass
class Verdict:
    """Which conditions hold; `correct` when all do."""

    conditions: list[tuple[str, bool]] = field(default_factory=list)

    @property
    def correct(self) -> bool:
        """The official score: all conditions hold."""
        return all(met for _, met in self.conditions)

    @property
    def share(self) -> float:
        """Fraction of the conditions that hold."""
        return sum(met for _, met in self.conditions) / len(self.conditions)


# Colours of the objects in question (all of one label), asked for only where a prompt names a colour.
ColorsOf = Callable[[list[Detection]], Sequence[str]]


def judge(
    include: list[dict],
    exclude: list[dict],
    detections: Sequence[Detection],
    colors_of: ColorsOf,
    tag: str = "",
    thresholds: Thresholds = Thresholds(),
) -> Verdict:
    """Check one picture.

    A clause of `include` is one condition for the number of objects, one for a colour and one for a position; a clause
    of `exclude` is one. Without any object of its class an `exclude` clause does not hold where the class is included:
    an empty picture must not earn a share for not having too many. This never changes `correct`.
    """
    objects = kept_objects(detections, tag, thresholds)
    verdict = Verdict()
    groups: list[list[Detection]] = []
    for clause in include:
        label, count = clause["class"], clause["count"]
        found = objects.get(label, [])[:count]
        enough = len(found) >= count
        verdict.conditions.append((f"{count} {label}", enough))
        if color := clause.get("color"):
            right = enough and list(colors_of(found)).count(color) >= count
            verdict.conditions.append((f"{color} {label}", right))
        if position := clause.get("position"):
            relation, target = position
            there = enough and bool(groups[target])
            held = there and all(
                relation in relative_position(one, other, thresholds.position)
                for one in found
                for other in groups[target]
            )
            verdict.conditions.append((f"{label} {relation} {include[target]['class']}", held))
        groups.append(found if enough else [])
    included = {clause["class"] for clause in include}
    for clause in exclude:
        label, found = clause["class"], len(objects.get(clause["class"], []))
        held = found < clause["count"] and (found > 0 or label not in included)
        verdict.conditions.append((f"fewer than {clause['count']} {label}", held))
    return verdict


def kept_objects(
    detections: Sequence[Detection], tag: str = "", thresholds: Thresholds = Thresholds()
) -> dict[str, list[Detection]]:
    """Objects by label, best first, above the threshold, without near copies."""
    least = thresholds.counting_score if tag == "counting" else thresholds.score
    by_label: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda d: -d.score):
        if detection.score > least:
            by_label.setdefault(detection.label, []).append(detection)
    return {
        label: _without_copies(found[: thresholds.max_objects], thresholds.max_overlap)
        for label, found in by_label.items()
    }


def relative_position(one: Detection, other: Detection, threshold: float = 0.1) -> set[str]:
    """Where `one` is relative to `other`: up to two of `RELATIONS`; none if their centres are too near."""
    gaps, offsets = [], []
    for axis in (0, 1):
        (low, high), (other_low, other_high) = (d.box[axis::2] for d in (one, other))
        offset = (low + high - other_low - other_high) / 2
        sizes = abs(high - low) + abs(other_high - other_low)
        offsets.append(offset)
        gaps.append(math.copysign(max(abs(offset) - threshold * sizes, 0.0), offset))
    if all(abs(gap) < 1e-3 for gap in gaps):
        return set()
    distance = math.hypot(*offsets)
    across, down = (gap / distance for gap in gaps)
    held = (across < -0.5, across > 0.5, down < -0.5, down > 0.5)
    return {relation for relation, true in zip(RELATIONS, held, strict=True) if true}


def overlap(box: Sequence[float], other: Sequence[float]) -> float:
    """Intersection over union of two boxes whose right and bottom pixels belong to them."""
    shared = _area([*map(max, box[:2], other[:2]), *map(min, box[2:], other[2:])])
    union = _area(box) + _area(other) - shared
    return shared / union if union else 0.0


def _area(box: Sequence[float]) -> float:
    return max(box[2] - box[0] + 1, 0) * max(box[3] - box[1] + 1, 0)


def _without_copies(found: list[Detection], max_overlap: float) -> list[Detection]:
    if max_overlap >= 1:
        return found
    kept: list[Detection] = []
    for detection in found:
        if all(overlap(detection.box, better.box) < max_overlap for better in kept):
            kept.append(detection)
    return kept


def check_clauses(include: Any, exclude: Any) -> str | None:
    """What is wrong with a row's lists, or None."""
    if not isinstance(include, list) or not isinstance(exclude, list) or not include:
        return f"include is {include!r:.60} and exclude {exclude!r:.60}; both must be lists, include not empty"
    for clause in [*include, *exclude]:
        if not isinstance(clause, dict) or not isinstance(clause.get("class"), str):
            return f"{clause!r:.80} names no `class`"
        if type(clause.get("count")) is not int or clause["count"] < 1:
            return f"{clause!r:.80} must have a `count` of 1 or more"
        if clause.get("color") not in (None, *COLORS):
            return f"{clause!r:.80} has a color other than {', '.join(COLORS)}"
    for number, clause in enumerate(include):
        position = clause.get("position")
        if position is not None and not _is_position(position, number):
            return f"{clause!r:.80} must have as `position` one of {', '.join(RELATIONS)}, and an earlier clause"
    return None


def _is_position(position: Any, number: int) -> bool:
    return (
        isinstance(position, list | tuple)
        and len(position) == 2
        and position[0] in RELATIONS
        and type(position[1]) is int
        and 0 <= position[1] < number
    )
