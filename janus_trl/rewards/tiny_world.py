"""Reward of the embedded world: does the picture show what its caption demands?"""

from typing import Any


def tiny_world_reward(generated_images: list, demands: list[str], **columns: Any) -> list[float]:
    """Share of a row's demands that its picture meets, from 0 to 1; exact, by reading the picture cell by cell.

    Args:
        generated_images: One RGB PIL picture per row.
        demands: One JSON string per row, as the embedded data set carries them.
    """
    from janus_trl.tiny import grade, read_picture

    return [grade(demand, reading) for demand, reading in zip(demands, read_picture(generated_images), strict=True)]
