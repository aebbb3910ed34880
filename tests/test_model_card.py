"""The model card: what it says, and that what it tells readers to run does run."""

import re
from types import SimpleNamespace

import torch
import yaml

from janus_trl.model_card import write_model_card


def trainer_in(folder, base="org/janus"):
    history = [{"step": 1, "reward": 0.25}, {"step": 2, "loss": 0.1}, {"step": 9, "reward": 0.75}]
    model = torch.nn.Identity()
    model.config = SimpleNamespace(_name_or_path=base)
    args = SimpleNamespace(output_dir=str(folder), hub_model_id=None)
    state = SimpleNamespace(log_history=history)
    return SimpleNamespace(model=model, args=args, state=state, is_world_process_zero=lambda: True)


def test_card_names_base_task_end_points_and_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text("task: t2i\nmax_steps: 9\n")
    (tmp_path / "samples").mkdir()
    for step in (0, 9):
        (tmp_path / "samples" / f"step-{step:06d}.png").touch()
    write_model_card(trainer_in(tmp_path), "GRPO", "t2i")
    card = (tmp_path / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "org/janus" and front["pipeline_tag"] == "text-to-image"
    assert "| reward | 0.25 (step 1) | 0.75 (step 9) |" in card
    assert "samples/step-000009.png" in card and "step-000000" not in card
    assert "task: t2i\nmax_steps: 9" in card


def test_card_of_a_local_base_does_not_give_its_folder_away(tmp_path):
    base = tmp_path / "somewhere"
    base.mkdir()
    write_model_card(trainer_in(tmp_path / "out", str(base)), "SFT", None)
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(base) not in card and "base_model" not in card


def test_the_snippet_of_the_card_loads_the_checkpoint(tmp_path, janus_folder):
    write_model_card(trainer_in(tmp_path), "GRPO", "i2t")
    (snippet,) = re.findall(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(), re.S)
    names = {}
    exec(snippet.replace(f'"{tmp_path.name}"', repr(janus_folder)), names)
    assert type(names["model"]).__name__ == "JanusForConditionalGeneration"
    assert type(names["processor"]).__name__ == "JanusProcessor"
