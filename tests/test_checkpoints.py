"""Checkpoint folders: which are whole, which one a run resumes from, and what is said about the others."""

import json
from pathlib import Path

import pytest

from janus_trl.checkpoints import (
    MANIFEST,
    find_resume_point,
    newest_whole,
    publish,
    publish_files,
    read_manifest,
    resume_choice,
    why_not_whole,
    write_manifest,
)


def checkpoint(output: Path, step: int, **facts) -> Path:
    folder = output / f"checkpoint-{step}"
    (folder / "shards").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    (folder / "shards" / "rank_0.pt").write_bytes(b"y" * 50)
    (folder / "trainer_state.json").write_text("{}")
    write_manifest(folder, step=step, **facts)
    return folder


def test_a_whole_folder_lists_its_files_and_the_versions_that_wrote_it(tmp_path):
    folder = checkpoint(tmp_path, 2)
    manifest = read_manifest(folder)
    assert manifest["files"] == {"model.safetensors": 100, "shards/rank_0.pt": 50, "trainer_state.json": 2}
    assert {"janus_trl", "transformers", "trl", "peft", "torch", "accelerate", "deepspeed"} == set(manifest["versions"])
    assert why_not_whole(folder) is None


@pytest.mark.parametrize(("harm", "reason"), [
    (lambda f: (f / MANIFEST).unlink(), "written last"),
    (lambda f: (f / MANIFEST).write_text('{"step": 4, "fi'), "written last"),
    (lambda f: (f / "shards" / "rank_0.pt").unlink(), "shards/rank_0.pt is missing"),
    (lambda f: (f / "model.safetensors").write_bytes(b"x" * 60), "has 60 bytes instead of 100"),
])  # fmt: skip
def test_the_newest_whole_checkpoint_is_found_and_the_others_are_named(tmp_path, harm, reason):
    for step in (2, 4, 10):
        checkpoint(tmp_path, step)
    harm(tmp_path / "checkpoint-10")
    point, lines = find_resume_point(True, tmp_path)
    assert point == str(tmp_path / "checkpoint-4")  # by number, not by name or time
    assert lines[0].startswith("checkpoint-10 is not whole") and reason in lines[0]
    assert lines[1] == f"Resuming from {point}, step 4."
    with pytest.raises(ValueError, match="checkpoint-10 (is not whole|has no)"):
        (tmp_path / "checkpoint-10" / MANIFEST).touch()
        find_resume_point(str(tmp_path / "checkpoint-10"), tmp_path)


def test_a_checkpoint_of_weights_alone_is_not_resumed_from(tmp_path):
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 4, weights_only=True)
    found, skipped = newest_whole(tmp_path)
    assert found.name == "checkpoint-2" and "save_only_model" in skipped[0]


@pytest.mark.parametrize(("word", "choice"), [
    ("true", True), ("True", True), ("false", None), ("AUTO", "auto"), ("out/checkpoint-4", "out/checkpoint-4"),
    (True, True), (None, None),
])  # fmt: skip
def test_the_command_line_gives_words(word, choice):
    assert resume_choice(word) == choice


def test_true_without_a_checkpoint_is_refused_and_auto_starts(tmp_path):
    with pytest.raises(ValueError, match="no whole checkpoint. There is no checkpoint-.* folder.*auto"):
        find_resume_point("true", tmp_path / "mistyped")
    point, lines = find_resume_point("auto", tmp_path)
    assert point is None and lines == [f"No checkpoint in {tmp_path} yet: starting from step 0."]
    checkpoint(tmp_path, 2)
    assert find_resume_point("auto", tmp_path)[0] == str(tmp_path / "checkpoint-2")


def test_a_folder_that_is_no_checkpoint_is_refused_with_what_to_do(tmp_path):
    folder = checkpoint(tmp_path, 20)
    with pytest.raises(ValueError, match=r"no such folder.*Did you mean '.*checkpoint-20'"):
        find_resume_point(str(tmp_path / "checkpoint-2"), tmp_path)
    (folder / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match="set model_name_or_path"):
        find_resume_point(str(folder), tmp_path)


def test_deepspeed_needs_as_many_processes_as_shards(tmp_path):
    checkpoint(tmp_path, 2, processes=4)
    with pytest.raises(ValueError, match="written by 4 processes.*this run has 2. Start 4 processes"):
        find_resume_point(True, tmp_path, processes=2, sharded=True)
    assert find_resume_point(True, tmp_path, processes=4, sharded=True)[0]
    _, lines = find_resume_point(True, tmp_path, processes=2)
    assert "random states start anew" in lines[-1]


def test_a_checkpoint_appears_at_once_and_replaces_an_older_one(tmp_path):
    old, new = checkpoint(tmp_path, 2), checkpoint(tmp_path / "_unfinished", 2)
    (old / "stale").touch()
    publish(new, old)
    assert why_not_whole(old) is None and not (old / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_a_model_saved_again_leaves_no_shard_of_the_older_one(tmp_path):
    (tmp_path / "samples").mkdir()
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "README.md"):
        (tmp_path / name).write_text("old")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({}))
    new = tmp_path / "_unfinished" / "model"
    new.mkdir(parents=True)
    (new / "model.safetensors").write_text("new")
    publish_files(new, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "model.safetensors", "samples"]


def test_a_whole_model_saved_over_an_adapter_leaves_no_adapter(tmp_path):
    final = tmp_path / "out"
    for names in (("adapter_model.safetensors", "adapter_config.json"), ("model.safetensors", "config.json")):
        unfinished = final / "_unfinished" / "model"
        unfinished.mkdir(parents=True)
        for name in names:
            (unfinished / name).write_text("{}")
        publish_files(unfinished, final)
    assert {path.name for path in final.iterdir()} == {"model.safetensors", "config.json"}
