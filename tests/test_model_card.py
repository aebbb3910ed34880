"""The model card: what it says, and that what it tells readers to run does run."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from datasets import Dataset
from PIL import Image

from janus_trl.card_snippets import Usage, snippet
from janus_trl.model_card import merged_card, write_model_card
from tests.grpo import lora
from tests.sft import FEATURES, mixed_rows, sft_trainer


def trainer_in(folder, processor, base="org/janus"):
    history = [{"step": 1, "reward": 0.25}, {"step": 2, "loss": 0.1}, {"step": 9, "reward": 0.75}]
    model = torch.nn.Identity()
    model.config = SimpleNamespace(_name_or_path=base)
    args = SimpleNamespace(output_dir=str(folder), hub_model_id=None)
    state = SimpleNamespace(log_history=history)
    return SimpleNamespace(
        model=model, args=args, state=state, processing_class=processor, is_world_process_zero=lambda: True
    )


def test_card_names_base_task_end_points_and_recipe(tmp_path, processor):
    (tmp_path / "recipe.yaml").write_text("task: t2i\nmax_steps: 9\n")
    (tmp_path / "samples").mkdir()
    for step in (0, 9):
        (tmp_path / "samples" / f"step-{step:06d}.png").touch()
    write_model_card(trainer_in(tmp_path, processor), "GRPO", "t2i")
    card = (tmp_path / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "org/janus" and front["pipeline_tag"] == "text-to-image"
    assert front["library_name"] == "transformers" and front["base_model_relation"] == "finetune"
    assert "| reward | 0.25 (step 1) | 0.75 (step 9) |" in card
    assert "samples/step-000009.png" in card and "step-000000" not in card
    assert "task: t2i\nmax_steps: 9" in card
    assert f"torch {torch.__version__}" in card


def test_card_of_a_local_base_does_not_give_its_folder_away(tmp_path, processor):
    base = tmp_path / "somewhere"
    base.mkdir()
    write_model_card(trainer_in(tmp_path / "out", processor, str(base)), "SFT", None)
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(base) not in card and "base_model" not in card


def code_of(card: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
    assert max(map(len, code.splitlines())) <= 120
    return code


def run(code: str, folder: Path, monkeypatch, **places: str) -> dict:
    """Run the code of a card in `folder`, with the names of models replaced by where they are here."""
    for name, place in places.items():
        code = code.replace(f'"{name}"', repr(place))
    monkeypatch.chdir(folder)
    names: dict = {}
    exec(code, names)
    return names


@pytest.mark.parametrize(("task", "settings"), [
    ("t2i", {"guidance_scale": 1.0}),
    ("t2i", {"guidance_scale": 5.0, "reasoning_length": 6, "template": 'Plan "it" first. {prompt}'}),
    ("i2t", {"answer_length": 4}), (None, {"answer_length": 4}),
])  # fmt: skip
def test_the_snippet_runs_in_plain_transformers(tmp_path, janus_folder, monkeypatch, capsys, task, settings):
    Image.new("RGB", (16, 16), "red").save(tmp_path / "picture.png")
    names = run(code_of(snippet(Usage("model", **settings), task)), tmp_path, monkeypatch, model=janus_folder)
    assert type(names["model"]).__name__ == "JanusForConditionalGeneration"
    if task != "i2t":
        assert names["codes"].shape == (1, 16)
        assert Image.open(tmp_path / "picture.png").size == (16, 16)
    if settings.get("reasoning_length"):
        boi = names["model"].generation_config.generation_kwargs["boi_token_id"]
        assert names["ids"][0, -1] == boi and (names["ids"] == boi).sum() == 1
        assert 'Plan "it" first. A red cat' in names["prompt"]
    if task != "t2i":
        assert names["answer"].shape[1] - names["inputs"]["input_ids"].shape[1] <= 4


def test_the_snippet_of_a_trained_adapter_loads_it_on_its_base(trainer_of, tmp_path, janus_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the snippet runs where the run was started
    trainer = trainer_of(peft=lora(), base_model_id="org/janus", output_dir="outputs/run")
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(model_name="run")
    card = (tmp_path / "outputs" / "run" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "peft" and front["base_model"] == "org/janus"
    assert "# run\n" in card and card.count('from_pretrained("outputs/run")') == 1
    names = run(code_of(card), tmp_path, monkeypatch, **{"org/janus": janus_folder})
    moved = dict(names["model"].named_parameters())
    trained = {n: p for n, p in trainer.base_model.named_parameters() if "lora_B" in n}
    assert len(trained) == 14 and all(torch.equal(moved[name], value) for name, value in trained.items())


@pytest.mark.parametrize(("kind", "task"), [("t2i", "text-to-image"), ("i2t", "image-to-text"), ("both", None)])
def test_the_card_of_sft_is_about_the_rows_it_was_trained_on(janus_folder, tmp_path, kind, task):
    rows = {"t2i": mixed_rows()[:4], "i2t": mixed_rows()[4:], "both": mixed_rows()}[kind]
    rows = Dataset.from_list(rows, features=FEATURES)  # all columns, some of them empty
    trainer = sft_trainer(janus_folder, tmp_path, rows, num_samples=4)
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert trainer.task == kind and (f"by janus_trl for {task or 'text-to-image and image-to-text'}." in card)
    assert ('generation_mode="image"' in card) == (kind != "i2t") and ("question = " in card) == (kind != "t2i")
    longest = len(trainer.processing_class.tokenizer("plan ", add_special_tokens=False)["input_ids"])
    assert (f"    max_new_tokens={longest}, eos" in card) == (kind != "i2t")


def test_a_pushed_run_is_named_by_its_hub_id_and_a_run_of_both_tasks_can_be_merged(tmp_path, processor):
    trainer = trainer_in(tmp_path / "out", processor)
    trainer.hub_model_id = "user/run"
    write_model_card(trainer, "GRPO", "both")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# user/run\n" in card and 'JanusProcessor.from_pretrained("user/run")' in card
    (tmp_path / "out" / "janus_trl.json").write_text('{"task": "both"}')
    card = merged_card(str(tmp_path / "out"), "org/janus", "merged/run", [])
    assert 'from_pretrained("merged/run", dtype' in card and "pipeline_tag" not in card and "question = " in card
