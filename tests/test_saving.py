"""Saving and resuming on one process: what lies in a folder, what a failed save leaves, what a resume refuses."""

import json
import logging
import resource
import signal
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import JanusForConditionalGeneration, JanusProcessor, TrainerCallback

from janus_trl.checkpoints import CheckpointError, read_manifest, why_not_whole
from janus_trl.restoring import STATE, read_state
from tests.grpo import ascending, lora, prompts_dataset, steps, weights
from tests.sft import FEATURES, mixed_rows, sft_trainer
from tests.tiny import build_random_janus

SAVE = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
BESIDE = {"processor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
          "generation_config.json", "recipe.yaml", "janus_trl.json"}  # fmt: skip


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("peft", [None, lora()])
def test_a_checkpoint_holds_what_others_need_and_nothing_is_left_half_written(trainer_of, tmp_path, peft, processor):
    (tmp_path / "recipe.yaml").write_text("task: t2i\n")
    trainer = trainer_of(peft=peft, save_total_limit=1, **SAVE)
    trainer.train()
    trainer.save_model()
    assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-2"]
    assert not (tmp_path / "_unfinished").exists()
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        config = {"adapter_config.json", "adapter_model.safetensors"} if peft else {"config.json", "model.safetensors"}
        assert BESIDE | config <= names(folder)
        loaded = JanusProcessor.from_pretrained(folder)
        assert loaded.num_image_tokens == processor.num_image_tokens
    manifest = read_manifest(tmp_path / "checkpoint-2")
    expected = {"step": 2, "processes": 1, "task": "t2i", "method": "GRPO", "adapter": bool(peft), "base_model": None}
    assert {name: manifest[name] for name in expected} == expected


def test_the_arguments_in_a_folder_hold_no_token(trainer_of, tmp_path):
    trainer = trainer_of(hub_token="hf_secret")
    trainer.save_model()
    assert trainer.args.hub_token == "hf_secret"
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"hf_secret" not in path.read_bytes(), path


def test_an_adapter_on_a_local_base_warns_once_and_says_how_to_name_it(trainer_of, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer_of(peft=lora(), **{**SAVE, "max_steps": 1}).train()
        assert sum("base_model_id: owner/name" in message for message in caplog.messages) == 1
        caplog.clear()
        trainer_of(peft=lora(), base_model_id="org/janus", **{**SAVE, "max_steps": 1}).train()
        assert not any("base_model_id" in message for message in caplog.messages)
    config = json.loads((tmp_path / "checkpoint-1" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == read_manifest(tmp_path / "checkpoint-1")["base_model"] == "org/janus"


class DiskFull:
    """Files of this process cannot grow beyond `size` bytes."""

    def __init__(self, size: int):
        self.size = size

    def __enter__(self):
        self.handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.limits[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)
        signal.signal(signal.SIGXFSZ, self.handler)


@pytest.mark.parametrize("file", ["_save", pytest.param("_save_optimizer_and_scheduler", marks=pytest.mark.slow)])
def test_a_full_disk_ends_the_run_with_the_checkpoint_before_it_whole(trainer_of, tmp_path, file, monkeypatch):
    trainer, disk = trainer_of(save_total_limit=1, **SAVE), DiskFull(100_000)
    write = getattr(trainer, file)

    def write_on_full_disk(*args, **kwargs):
        if trainer.state.global_step == 2:
            disk.__enter__()
        write(*args, **kwargs)

    monkeypatch.setattr(trainer, file, write_on_full_disk)
    with pytest.raises(CheckpointError) as failure:
        try:
            trainer.train()
        finally:
            disk.__exit__()
    assert "Saving step 2 failed" in str(failure.value)
    assert f"{tmp_path / 'checkpoint-1'} is kept" in str(failure.value)
    assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-1"]
    assert why_not_whole(tmp_path / "checkpoint-1") is None and not (tmp_path / "_unfinished").exists()
    again = trainer_of(**SAVE)
    again.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in steps(again)] == [1, 2]


def test_a_save_that_loses_a_tensor_ends_the_run_with_the_checkpoint_before_it(trainer_of, tmp_path, monkeypatch):
    trainer = trainer_of(save_total_limit=1, **SAVE)
    save = trainer.model.save_pretrained

    def lossy(folder, *args, **kwargs):
        save(folder, *args, **kwargs)
        if trainer.state.global_step == 2:
            tensors = load_file(Path(folder) / "model.safetensors")
            tensors["lm_head.weight"] = torch.zeros(0)
            save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(trainer.model, "save_pretrained", lossy)
    with pytest.raises(CheckpointError, match="1 tensors are empty, e.g. lm_head.weight.*checkpoint-1 is kept"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-1"]


def test_an_adapter_that_nothing_trained_is_not_saved(trainer_of, tmp_path, monkeypatch):
    trainer = trainer_of(peft=lora(), **SAVE)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.register_hook(torch.zeros_like)
    monkeypatch.setattr(trainer, "_updated", True)  # the gradient norm, of which the hooks know nothing
    with pytest.raises(CheckpointError, match="all 14 lora_B are still 0"):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_run_without_signal_or_with_rate_0_may_save_its_adapter(trainer_of, tmp_path):
    trainer_of(lambda completions, **_: [1.0] * len(completions), peft=lora(), **{**SAVE, "max_steps": 1}).train()
    trainer_of(peft=lora(), **{**SAVE, "learning_rate": 0.0}).train()
    assert why_not_whole(tmp_path / "checkpoint-1") is None and why_not_whole(tmp_path / "checkpoint-2") is None


def test_the_best_checkpoint_is_remembered_where_it_is(trainer_of, tmp_path):
    trainer = trainer_of(
        eval_dataset=prompts_dataset(), eval_strategy="steps", eval_steps=1, metric_for_best_model="eval_reward",
        per_device_eval_batch_size=4, **SAVE,
    )  # fmt: skip
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == tmp_path and best.is_dir()
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert saved["best_model_checkpoint"] == str(best)


# ---- resume ---------------------------------------------------------------------------------------------------------


def test_a_resume_on_another_base_is_refused(trainer_of, tmp_path):
    trainer_of(peft=lora(), **SAVE).train()
    other = tmp_path / "other"
    build_random_janus(str(other), seed=1)
    with pytest.raises(CheckpointError, match="the frozen weight .* is not the one it was trained with"):
        trainer_of(model=str(other), peft=lora(), **{**SAVE, "max_steps": 3}).train(resume_from_checkpoint=True)


def test_a_frozen_weight_that_changed_is_refused(trainer_of, tmp_path):
    trainer_of(**SAVE).train()
    again = trainer_of(**{**SAVE, "max_steps": 3})
    path = tmp_path / "checkpoint-2" / STATE
    state = json.loads(path.read_text())
    frozen = {name for name, parameter in again.model.named_parameters() if not parameter.requires_grad}
    name = next(name for name in state["fingerprints"] if name in frozen)
    assert len(frozen & set(state["fingerprints"])) >= 5
    state["fingerprints"][name] = "0" * 16
    path.write_text(json.dumps(state))
    with pytest.raises(CheckpointError) as e:
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert f"the frozen weight {name}" in str(e.value) and "(1 tensors differ)" in str(e.value)


def test_a_resume_with_other_lora_modules_is_refused(trainer_of, tmp_path):
    trainer_of(peft=lora(), **SAVE).train()
    narrower = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=r".*language_model.*q_proj")
    with pytest.raises(CheckpointError, match="the model has no parameter .*lora_A"):
        trainer_of(peft=narrower, **{**SAVE, "max_steps": 3}).train(resume_from_checkpoint=True)


def test_a_run_that_was_killed_after_its_last_step_only_ends(trainer_of, tmp_path):
    trainer = trainer_of(**SAVE)
    trainer.train()
    again = trainer_of(**SAVE)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2 and [log["step"] for log in steps(again)] == [1, 2]
    assert all(torch.equal(value, weights(again)[name]) for name, value in weights(trainer).items())


def test_what_a_trainer_adds_to_a_checkpoint_comes_back(trainer_of, tmp_path, monkeypatch):
    trainer = trainer_of(**SAVE)
    monkeypatch.setattr(trainer, "extra_state", lambda: {"coefficient": 0.1 + trainer.state.global_step})
    trainer.train()
    again, loaded = trainer_of(**{**SAVE, "max_steps": 3}), []
    monkeypatch.setattr(again, "load_extra_state", loaded.append)
    again.train(resume_from_checkpoint=True)
    assert loaded == [{"coefficient": 2.1}]


MID_CYCLE = {
    "max_steps": 6, "save_strategy": "steps", "save_steps": 3, "num_iterations": 2, "image_temperature": 2.0,
    "max_reasoning_length": 2, "max_grad_norm": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("settings", [
    {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    pytest.param({}, marks=pytest.mark.slow), pytest.param({"steps_per_generation": 2}, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_resume_inside_a_rollout_goes_on_with_that_rollout(trainer_of, tmp_path, settings):
    """Step 3 is the first of two updates on the second rollout."""
    runs, seen = [], []
    for checkpoint in (None, str(tmp_path / "checkpoint-3")):
        seen.append([])

        def reward(prompts, completion_ids, **_):
            seen[-1].append(list(prompts))
            return [float(ids[-3]) for ids in completion_ids]

        trainer = trainer_of(reward, **{**MID_CYCLE, **settings})
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append(trainer)
    a, b = (steps(trainer)[3:] for trainer in runs)
    assert [log["step"] for log in b] == [4, 5, 6]
    assert [log["grad_norm"] for log in b] == pytest.approx([log["grad_norm"] for log in a], rel=1e-5)
    assert [log.get("reward") for log in b] == [log.get("reward") for log in a]
    assert seen[1] == seen[0][len(seen[0]) - len(seen[1]) :] and len(seen[1]) < len(seen[0])
    for name, parameter in weights(runs[0]).items():
        torch.testing.assert_close(parameter, weights(runs[1])[name])


def test_a_rollout_that_is_not_there_is_made_again_with_the_same_prompts(trainer_of, tmp_path):
    """As after a resume with another number of processes."""
    seen = []
    for checkpoint in (None, str(tmp_path / "checkpoint-3")):
        seen.append([])

        def reward(prompts, completions, **_):
            seen[-1].append(list(prompts))
            return ascending(completions)

        trainer = trainer_of(reward, **MID_CYCLE)
        if checkpoint:
            (tmp_path / "checkpoint-3" / "rollout_0.pt").unlink()
            (tmp_path / "checkpoint-3" / "janus_trl.json").unlink()
        trainer.train(resume_from_checkpoint=checkpoint)
    assert seen[1] == seen[0][1:]  # rollouts of steps 3 and 5; that of step 3 once more


def test_sft_saves_and_resumes_the_same_way(janus_folder, tmp_path):
    rows = Dataset.from_list(mixed_rows(), features=FEATURES)
    # Two steps an epoch: checkpoint-3 is in the middle of the second.
    settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3, "per_device_train_batch_size": 4}
    settings["guidance_dropout"] = 0.3  # uses the random state
    runs = []
    for point in (None, str(tmp_path / "checkpoint-3")):
        trainer = sft_trainer(janus_folder, tmp_path, rows, **settings)
        trainer.train(resume_from_checkpoint=point)
        runs.append(steps(trainer))
    assert [log["grad_norm"] for log in runs[1]] == pytest.approx([log["grad_norm"] for log in runs[0]], rel=1e-5)
    facts = read_manifest(tmp_path / "checkpoint-3")
    assert (facts["method"], facts["task"]) == ("SFT", "both")
    assert set(read_state(tmp_path / "checkpoint-3")["fingerprints"])


# ---- SIGTERM --------------------------------------------------------------------------------------------------------


class Terminate(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            signal.raise_signal(signal.SIGTERM)


def test_sigterm_saves_at_the_end_of_the_step_and_the_run_goes_on_from_there(trainer_of, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    settings = {"max_steps": 4, "image_temperature": 2.0}  # save_strategy: no
    straight = trainer_of(**settings)
    straight.train()
    trainer = trainer_of(**settings)
    trainer.add_callback(Terminate())
    trainer.train()
    assert trainer.interrupted and not straight.interrupted
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert signal.getsignal(signal.SIGTERM) == before
    trainer.pop_callback(Terminate)
    trainer.train(resume_from_checkpoint=True)
    assert not trainer.interrupted and trainer.state.global_step == 4
    again = trainer_of(**settings)
    again.train(resume_from_checkpoint="auto")
    assert not again.interrupted
    norms = [[log["grad_norm"] for log in steps(run)] for run in (straight, again)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5) and len(norms[0]) == 4


# ---- load elsewhere -------------------------------------------------------------------------------------------------


def test_a_saved_adapter_loads_in_plain_peft_with_equal_weights(trainer_of, tmp_path, janus_folder):
    trainer = trainer_of(peft=lora(), **SAVE)
    trainer.train()
    stock = JanusForConditionalGeneration.from_pretrained(janus_folder, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(stock, tmp_path / "checkpoint-2")
    trained = weights(trainer)
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter, trained[name], atol=0, rtol=0)
