"""The embedded world: pictures of colored shapes, prompts, questions and a grader, with all ground truth known.

It needs no download and runs on a CPU; see `world` (pictures and plans), `prompts` (text-to-image prompts and their
grades), `grader` (reads pictures), `questions` (multiple choice), `datasets`, `processor` and `vq`.
"""

from janus_trl.tiny.datasets import tiny_dataset, tiny_sft_dataset
from janus_trl.tiny.grader import read_picture
from janus_trl.tiny.prompts import Prompt, grade, sample_breaking, sample_fulfilling, sample_prompt
from janus_trl.tiny.questions import Question, sample_question
from janus_trl.tiny.world import Scene, parse_plan, plan_text, render, sample_scene

__all__ = [
    "Prompt",
    "Question",
    "Scene",
    "grade",
    "parse_plan",
    "plan_text",
    "read_picture",
    "render",
    "sample_breaking",
    "sample_fulfilling",
    "sample_prompt",
    "sample_question",
    "sample_scene",
    "tiny_dataset",
    "tiny_sft_dataset",
]
