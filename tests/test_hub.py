"""Pushing: access is checked first, a failed push is a warning with a command that mends it, and what arrives works."""

import logging
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import _http
from peft import PeftModel
from transformers import JanusForConditionalGeneration, JanusProcessor
from transformers.utils import hub as transformers_hub

from janus_trl.configs import JanusGRPOConfig, JanusSFTConfig
from janus_trl.hub import check_write_access, upload_command
from janus_trl.modeling import JanusForInterleavedGeneration
from janus_trl.scripts import grpo
from janus_trl.scripts.run import keep_recipe
from tests.grpo import lora
from tests.hub_server import TOKEN, HubServer, hub

RECIPE = str(Path(__file__).parent.parent / "recipes" / "tiny" / "t2i.yaml")


@pytest.fixture
def server(tmp_path_factory, monkeypatch) -> HubServer:
    """A Hub that this process uses."""
    with hub(tmp_path_factory.mktemp("hub")) as server:
        for module in (constants, huggingface_hub.hf_api, huggingface_hub.lfs, huggingface_hub._commit_api):
            if hasattr(module, "ENDPOINT"):
                monkeypatch.setattr(module, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(transformers_hub, "_hf_api", None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
        yield server


def arguments(tmp_path, **settings):
    settings = {"output_dir": str(tmp_path / "my-run"), "push_to_hub": True, "report_to": "none", **settings}
    return JanusGRPOConfig(per_device_train_batch_size=8, **settings)


# ---- access ---------------------------------------------------------------------------------------------------------


def test_nothing_is_asked_where_nothing_is_pushed(server, tmp_path):
    check_write_access(arguments(tmp_path, push_to_hub=False))
    assert server.seen == []


@pytest.mark.parametrize(("name", "repo"), [(None, "user/my-run"), ("user/other-name", "user/other-name")])
def test_access_is_proved_by_making_the_repository(server, tmp_path, name, repo):
    for _ in range(2):  # it may be there already
        check_write_access(arguments(tmp_path, hub_model_id=name))
    assert list(server.repos) == [repo]


def test_a_dry_run_makes_no_repository(server, tmp_path):
    check_write_access(arguments(tmp_path), create=False)
    # huggingface_hub may ask something of its own in the first request of a process.
    assert server.repos == {} and server.seen[-1] == "GET /api/whoami-v2"
    assert all(request.startswith("GET /api/") for request in server.seen)


@pytest.mark.parametrize(("harm", "settings", "reason"), [
    (lambda s, m: setattr(s, "role", "read"), {}, "the token can only read"),
    (lambda s, m: m.setenv("HF_TOKEN", "hf_wrong"), {}, "Invalid"),
    (lambda s, m: None, {"hub_token": "hf_wrong"}, "Invalid"),
    (lambda s, m: None, {"hub_model_id": "other/new"}, "rights to create a model under the namespace"),
    (lambda s, m: None, {"hub_model_id": "other/model"}, "write access"),
    (lambda s, m: (s.shutdown(), s.server_close()), {}, "Connection"),
    (lambda s, m: m.setattr(constants, "HF_HUB_OFFLINE", True), {}, "HF_HUB_OFFLINE is set"),
])  # fmt: skip
def test_no_access_is_refused_with_the_reason_and_ways_out(server, tmp_path, monkeypatch, harm, settings, reason):
    harm(server, monkeypatch)
    with pytest.raises(ValueError, match=reason) as refusal:
        check_write_access(arguments(tmp_path, **settings))
    message = str(refusal.value)
    assert "push_to_hub: false" in message and "hf_wrong" not in message and ".." not in message.replace("...", "")


def test_the_script_and_the_trainer_refuse_before_weights_load(server, tmp_path, monkeypatch, capsys, trainer_of):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(JanusForInterleavedGeneration, "from_pretrained", refuse)
    server.role = "read"
    with pytest.raises(SystemExit) as stop:
        grpo.main(["--config", RECIPE, "--push_to_hub", "true", "--output_dir", str(tmp_path)])
    assert stop.value.code == 2 and "error: push_to_hub = True, but" in capsys.readouterr().err
    with pytest.raises(ValueError, match="can only read"):
        trainer_of(push_to_hub=True)


# ---- push -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def greedy_codes(model, processor, prompt="two cats") -> list[int]:
    """Image codes of plain transformers, without guidance, one forward per code."""
    messages = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(text=text, generation_mode="image", return_tensors="pt")
    janus = model.get_base_model() if isinstance(model, PeftModel) else model
    embeds, codes = janus.get_input_embeddings()(inputs["input_ids"]), []
    for _ in range(16):
        hidden = janus.model.language_model(inputs_embeds=embeds).last_hidden_state[:, -1]
        codes.append(janus.model.generation_head(hidden).argmax(-1))
        following = janus.prepare_embeddings_for_image_generation(codes[-1])
        embeds = torch.cat([embeds, following.reshape(1, 1, -1)], 1)
    return [int(code) for code in codes]


@pytest.mark.parametrize("peft", [None, lora()])
def test_what_was_pushed_generates_the_same_codes_in_plain_transformers(server, trainer_of, janus_folder, peft):
    trainer = trainer_of(peft=peft, push_to_hub=True, hub_model_id="user/janus", max_steps=2)
    trainer.train()
    trainer.push_to_hub()
    folder = server.folder_of("user/janus")
    stock = JanusForConditionalGeneration.from_pretrained(janus_folder if peft else folder, dtype=torch.float32)
    base = greedy_codes(JanusForConditionalGeneration.from_pretrained(janus_folder), trainer.processing_class)
    pushed = PeftModel.from_pretrained(stock, folder) if peft else stock
    codes = greedy_codes(pushed.eval(), JanusProcessor.from_pretrained(folder))
    assert codes == greedy_codes(trainer.model.eval(), trainer.processing_class) and codes != base
    assert (folder / "README.md").read_text().startswith("---")
    assert server.commits[-1][:2] == ("user/janus", "End of training") and len(server.commits) == 1


@pytest.mark.parametrize(("strategy", "folders"), [
    ("end", set()), ("every_save", set()), ("checkpoint", {"last-checkpoint"}),
    ("all_checkpoints", {"checkpoint-1", "checkpoint-2"}),
])  # fmt: skip
def test_the_strategies_of_transformers_push_whole_checkpoints(server, trainer_of, strategy, folders):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "hub_always_push": True}
    trainer = trainer_of(push_to_hub=True, hub_model_id="user/janus", hub_strategy=strategy, **settings)
    trainer.train()
    files = server.repos["user/janus"]
    assert ("model.safetensors" in files) == (strategy != "end")
    assert {name.split("/")[0] for name in files if "/" in name} == folders
    for folder in folders:
        assert {f"{folder}/janus_trl.json", f"{folder}/optimizer.pt"} <= files.keys()


@pytest.mark.parametrize("part", ["commit", "lfs"])
def test_a_dropped_connection_is_a_warning_with_a_command_that_works(server, trainer_of, tmp_path, caplog, part):
    trainer = trainer_of(push_to_hub=True, hub_model_id="user/janus")
    trainer.train()
    server.drop = part
    with caplog.at_level(logging.WARNING):
        assert trainer.push_to_hub() is None
    (warning,) = [message for message in caplog.messages if "The push to user/janus failed" in message]
    assert (tmp_path / "model.safetensors").is_file() and (tmp_path / "README.md").is_file()
    assert server.repos["user/janus"] == {}
    server.drop = None
    command = warning.splitlines()[-1].strip()
    assert command == upload_command("user/janus", trainer.args)
    hf = [str(Path(sys.executable).parent / "hf"), *shlex.split(command)[1:]]
    done = subprocess.run(hf, env={**os.environ, **server.environment()}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {"model.safetensors", "config.json", "processor_config.json", "README.md"} <= server.repos[
        "user/janus"
    ].keys()


def test_a_push_that_fails_in_the_background_is_reported(server, trainer_of, caplog):
    server.drop = "commit"
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(push_to_hub=True, hub_model_id="user/janus", **settings)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 2
    assert any("The push to user/janus failed" in message for message in caplog.messages)


def test_sft_takes_the_same_fields():
    fields = {"base_model_id", "push_to_hub", "hub_model_id"}
    assert fields <= set(JanusSFTConfig.__dataclass_fields__) & set(JanusGRPOConfig.__dataclass_fields__)


@pytest.mark.parametrize("where", ["command line", "recipe"])
def test_no_token_reaches_the_recipe_that_is_pushed(tmp_path, where):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("task: t2i\n" + ('hub_token: "hf_secret"  # mine\n' if where == "recipe" else ""))
    words = ["--hub_token", "hf_secret", "--seed", "1"] if where == "command line" else ["--seed", "1"]
    accelerator, args = SimpleNamespace(is_main_process=True), SimpleNamespace(output_dir=str(tmp_path / "out"))
    keep_recipe(SimpleNamespace(accelerator=accelerator, args=args), [f"--config={recipe}", *words])
    kept = (tmp_path / "out" / "recipe.yaml").read_text()
    assert "hf_secret" not in kept and "hub_token" in kept and "--seed 1" in kept
