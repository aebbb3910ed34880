"""Rewards as a run meets them: what the training script says of a model that cannot score, and with which exit code."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from janus_trl.grpo_trainer import JanusGRPOTrainer
from janus_trl.scripts import grpo
from janus_trl.tiny import datasets as tiny_datasets
from tests.clip import save_clip

RECIPE = str(Path(__file__).parent.parent / "recipes" / "tiny" / "t2i.yaml")


def with_projection(folder: Path, value: float) -> str:
    """A CLIP whose pictures all look alike, or have no finite features."""
    save_clip(str(folder))
    weights = load_file(folder / "model.safetensors")
    weights["visual_projection.weight"] = torch.full_like(weights["visual_projection.weight"], value)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("value", "message"), [(0.0, "both score 0.0"), (float("nan"), "the scores are [nan, nan]")], ids=["blind", "nan"]
)
def test_a_reward_that_fails_its_self_test_ends_the_run_before_a_rollout(value, message, tmp_path, monkeypatch, capsys):
    for split in tiny_datasets.SIZES:
        monkeypatch.setitem(tiny_datasets.SIZES, split, 16)
    monkeypatch.setattr(JanusGRPOTrainer, "sample", None)  # no rollout
    clip = with_projection(tmp_path / "clip", value)
    reward = f'{{"name": "pickscore", "alias": "mine", "args": {{"model": "{clip}", "processor": "{clip}"}}}}'
    batch = ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1", "--max_steps", "1"]
    with pytest.raises(SystemExit) as stop:
        grpo.main(["--config", RECIPE, "--output_dir", str(tmp_path / "out"), "--reward_funcs", reward, *batch])
    assert stop.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "reward 'mine' failed its self-test" in errors[0] and message in errors[0]
    assert not list((tmp_path / "out").rglob("*.safetensors"))
