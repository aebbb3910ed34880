"""Dashboards: samples at the step of the trainer, no network call unasked, and no failure that ends a run."""

import importlib.machinery
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, WandbCallback

from janus_trl import config_checks
from janus_trl.callbacks import SampleGridCallback
from janus_trl.configs import JanusGRPOConfig, JanusSFTConfig
from janus_trl.reporting import SampleSender, describe, guard_dashboards
from tests.distributed_launch import environment
from tests.grpo import prompts_dataset, steps

ROOT = Path(__file__).parent.parent


class FakeConfig(dict):
    def update(self, values, allow_val_change=False):
        super().update(values)


class FakeWandb(types.ModuleType):
    """Counts its own calls as wandb does, and refuses a trainer step that goes backwards."""

    def __init__(self, breaks: tuple[str, ...] = ()):
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.run, self.calls, self.breaks, self.last = None, [], breaks, 0
        self.config = FakeConfig()

    def init(self, **kwargs):
        self._may_break("init")
        self.run = SimpleNamespace(_label=lambda **kwargs: None, summary={}, url=None, id="1")

    def define_metric(self, *args, **kwargs):
        pass

    def log(self, data, step=None, commit=None):
        self._may_break("log")
        assert step is None, "wandb drops rows whose step is below the number of its own calls"
        now = data["train/global_step"]
        assert now >= self.last, f"step {now} after {self.last}"
        self.last = now
        self.calls.append(data)

    def Image(self, picture, caption=None):
        self._may_break("Image")
        return picture.size, caption

    def Table(self, **kwargs):
        self._may_break("Table")
        return kwargs

    def _may_break(self, name):
        if name in self.breaks:
            raise ConnectionError(f"{name} is down")


@pytest.fixture
def fake_wandb(monkeypatch):
    """Puts a fake in the place of wandb, wherever transformers and TRL look for it."""

    def install(*breaks: str) -> FakeWandb:
        fake, errors = FakeWandb(breaks), types.ModuleType("wandb.sdk.lib.config_util")
        errors.ConfigError = type("ConfigError", (Exception,), {})
        monkeypatch.setitem(sys.modules, "wandb", fake)
        monkeypatch.setitem(sys.modules, "wandb.sdk.lib.config_util", errors)
        monkeypatch.setattr("trl.trainer.grpo_trainer.wandb", fake, raising=False)
        return fake

    return install


def with_samples(trainer, every: int = 2):
    send = SampleSender(trainer)
    trainer.add_callback(SampleGridCallback(lambda step: trainer.sample_rows(2), every=every, send=send))
    return trainer


WANDB = {"report_to": "wandb", "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 1e-4,
         "per_device_eval_batch_size": 2, "max_reasoning_length": 2}  # fmt: skip
HELD_OUT = {"eval_dataset": prompts_dataset(["one", "two"])}


def warnings_of(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.name == "janus_trl.reporting"]


# ---- wandb ----------------------------------------------------------------------------------------------------------


def test_samples_metrics_and_evaluations_reach_wandb_at_the_trainers_step_also_after_a_resume(
    trainer_of, tmp_path, fake_wandb
):
    fake = fake_wandb()
    settings = {**WANDB, **HELD_OUT, "save_strategy": "steps", "save_steps": 2}
    with_samples(trainer_of(**{**settings, "max_steps": 2})).train()
    with_samples(trainer_of(**settings)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    drawn = [call for call in fake.calls if "samples" in call]
    assert [call["train/global_step"] for call in drawn] == [0, 2, 2, 4]  # again at the start of the resumed run
    for call in drawn:
        assert [size for size, _ in call["samples"]] == [(16, 16)] * 2
        captions = [caption for _, caption in call["samples"]]
        assert all(c.startswith("reward 0.") for c in captions) and "\none" in captions[0]
        assert call["sample_texts"]["columns"] == ["prompt", "reasoning", "reward"]
    rewards = [call["train/global_step"] for call in fake.calls if "train/reward" in call]
    assert rewards == [1, 2, 3, 4] and sum("eval/reward" in call for call in fake.calls) == 2


def test_a_dashboard_that_is_down_ends_no_run_and_is_warned_about_once_per_place(trainer_of, fake_wandb, caplog):
    fake_wandb("log", "Table", "Image")
    trainer = with_samples(trainer_of(**WANDB, **HELD_OUT, log_completions=True), every=1)
    trainer.train()
    assert len(steps(trainer)) == 4 and "train_runtime" in trainer.state.log_history[-1]
    messages = warnings_of(caplog)
    assert len(messages) == 3, messages
    for place in ("WandbCallback failed", "The samples were not sent to wandb", "The table of completions was not"):
        assert sum(message.startswith(place) and "is down" in message for message in messages) == 1
    tables = sorted(path.name for path in (Path(trainer.args.output_dir) / "completions").iterdir())
    assert tables[-1] == "completions_00004.parquet"


def test_a_dashboard_that_does_not_start_ends_no_run(trainer_of, fake_wandb, caplog):
    fake_wandb("init", "log")
    trainer = with_samples(trainer_of(**WANDB, **HELD_OUT))
    trainer.train()
    assert trainer.state.global_step == 4
    assert [message.split(" (")[0] for message in warnings_of(caplog)] == ["WandbCallback failed"]
    assert (Path(trainer.args.output_dir) / "samples" / "step-000004.png").exists()


def test_what_a_callback_of_the_user_raises_is_not_hidden(trainer_of):
    class Broken(TrainerCallback):
        def on_log(self, *args, **kwargs):
            raise RuntimeError("mine")

    trainer = trainer_of(log_completions=True)
    trainer.add_callback(Broken())
    with pytest.raises(RuntimeError, match="mine"):
        trainer.train()


def test_only_the_dashboards_of_transformers_are_guarded():
    class Mine(TrainerCallback):
        pass

    mine, theirs = Mine(), WandbCallback.__new__(WandbCallback)
    guard_dashboards([mine, theirs])
    assert "on_log" not in vars(mine) and "on_log" in vars(theirs)


# ---- TensorBoard ----------------------------------------------------------------------------------------------------


class FakeWriter:
    def __init__(self):
        self.images, self.texts = [], []

    def add_image(self, tag, picture, step, dataformats):
        self.images.append((tag, picture.shape, step, dataformats))

    def add_text(self, tag, text, step=None):
        self.texts.append((tag, text, step))

    def add_scalar(self, *args):
        pass

    def flush(self):
        pass

    def close(self):
        pass


def test_the_grid_reaches_tensorboard_at_each_step_up_to_the_last(trainer_of):
    writer = FakeWriter()
    board = TensorBoardCallback.__new__(TensorBoardCallback)
    board._SummaryWriter, board.tb_writer, board.logging_dir = None, writer, None
    trainer = trainer_of(max_steps=3, max_reasoning_length=2, **HELD_OUT)
    trainer.add_callback(board)
    with_samples(trainer).train()
    assert [(tag, step, layout) for tag, _, step, layout in writer.images] == [
        ("samples", step, "HWC") for step in (0, 2, 3)
    ]
    assert all(shape[2] == 3 for _, shape, _, _ in writer.images)
    samples = [text for tag, text, _ in writer.texts if tag == "samples"]
    assert len(samples) == 3 and all(text.startswith("reward 0.") and "\none" in text for text in samples)


# ---- files, pictures, ranks -----------------------------------------------------------------------------------------


def grid_callback(tmp_path, items, main: bool = True, **options):
    sent = []
    callback = SampleGridCallback(
        lambda step: items, every=2, send=lambda step, items, path: sent.append(step), **options
    )
    args = SimpleNamespace(output_dir=str(tmp_path))
    for step in range(5):
        state = SimpleNamespace(global_step=step, is_world_process_zero=main, log_history=[], max_steps=4)
        callback.on_step_end(args, state, None)
    return sent


def test_rows_without_a_picture_are_drawn_blank_and_listed(tmp_path, caplog):
    picture = Image.new("RGB", (32, 32), "red")
    items = [{"image": picture, "prompt": "a", "reward": 1.0}, {"image": None, "prompt": "b", "reasoning": "x\ny"}]
    assert grid_callback(tmp_path, items) == [0, 2, 4] and not caplog.records
    lines = (tmp_path / "samples" / "step-000002.jsonl").read_text().splitlines()
    assert lines == [
        '{"prompt": "a", "reasoning": null, "reward": 1.0}', '{"prompt": "b", "reasoning": "x\\ny", "reward": null}',
    ]  # fmt: skip
    assert [describe(item) for item in items] == ["reward 1.000\na", "not scored\nb\n> x y"]


def test_other_ranks_send_nothing(tmp_path):
    assert grid_callback(tmp_path, [{"image": None, "prompt": "a"}], main=False) == []


def test_a_grid_that_is_not_drawn_is_not_sent(tmp_path, caplog):
    (tmp_path / "samples").write_text("in the way")
    assert grid_callback(tmp_path, [{"image": None, "prompt": "a"}]) == []
    assert len(warnings_of(caplog)) == 1


# ---- asked for, or not ----------------------------------------------------------------------------------------------

OFFLINE = """
import socket, sys
def refuse(self, address, *rest):
    if self.family not in (socket.AF_UNIX,) and address[0] not in ("127.0.0.1", "::1", "localhost"):
        print("NETWORK", address, flush=True)
        raise OSError("no network")
    return connect(self, address, *rest)
connect, socket.socket.connect = socket.socket.connect, refuse
socket.getaddrinfo = lambda host, *rest, **options: print("NETWORK", host, flush=True) or 1 / 0
report_to, model, folder = sys.argv[1:]
if report_to == "none":
    sys.modules["wandb"] = None  # as if it were not installed
from janus_trl.configs import JanusGRPOConfig
from janus_trl.grpo_trainer import JanusGRPOTrainer
from janus_trl.callbacks import CurveCallback, SampleGridCallback
from janus_trl.reporting import SampleSender
from tests.grpo import ascending, prompts_dataset
args = JanusGRPOConfig(output_dir=folder, report_to=report_to, per_device_train_batch_size=4, num_generations=4,
    max_steps=2, logging_steps=1, guidance_scale=1.0, disable_tqdm=True, gradient_checkpointing=False)
rows = prompts_dataset()
trainer = JanusGRPOTrainer(model, ascending, args, rows, rows)
send = SampleSender(trainer)
for callback in (CurveCallback(), SampleGridCallback(lambda step: trainer.sample_rows(2), every=1, send=send)):
    trainer.add_callback(callback)
trainer.train()
print("ENDED", sys.modules.get("wandb") is not None)
"""


def run_offline(report_to: str, model: str, folder: Path) -> str:
    env = {**environment(), "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true"}
    command = [sys.executable, "-c", OFFLINE, report_to, model, str(folder)]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_without_a_dashboard_no_network_and_no_wandb_is_needed(janus_folder, tmp_path):
    printed = run_offline("none", janus_folder, tmp_path)
    assert "ENDED False" in printed and "NETWORK" not in printed
    names = {path.name for path in tmp_path.rglob("*")}
    assert {"curve.png", "step-000000.png", "step-000002.png", "step-000002.jsonl"} <= names


@pytest.mark.slow
def test_wandb_offline_keeps_samples_and_metrics_in_files_without_network(janus_folder, tmp_path):
    pytest.importorskip("wandb")
    printed = run_offline("wandb", janus_folder, tmp_path)
    assert "ENDED True" in printed and "NETWORK" not in printed
    assert list(tmp_path.rglob("offline-run-*/*.wandb"))
    assert len(list(tmp_path.rglob("media/images/samples_*.png"))) == 6  # two at each of steps 0, 1, 2


def test_no_module_of_ours_imports_wandb():
    for path in (ROOT / "janus_trl").rglob("*.py"):
        assert "import wandb" not in path.read_text(), path


@pytest.mark.parametrize("asked", ["wandd", ["tensorboard", "wandd"]])
def test_an_unknown_dashboard_is_refused_before_weights_load(asked, monkeypatch):
    monkeypatch.setattr(config_checks, "get_available_reporting_integrations", lambda: ["tensorboard"])
    with pytest.raises(ValueError, match=r"report_to = 'wandd' must be one of: none, all, .*Did you mean 'wandb'\?"):
        JanusGRPOConfig(report_to=asked)


@pytest.mark.parametrize("config", [JanusGRPOConfig, JanusSFTConfig])
def test_a_dashboard_that_is_not_installed_is_refused_before_weights_load(config, monkeypatch):
    monkeypatch.setattr(config_checks, "get_available_reporting_integrations", lambda: ["wandb"])
    with pytest.raises(ValueError, match=r"report_to = 'tensorboard' is not installed. Install it \(pip install"):
        config(report_to="tensorboard")
    assert config(report_to="wandb").report_to == ["wandb"]


def test_no_dashboard_is_looked_for_unasked(monkeypatch):
    monkeypatch.setattr(config_checks, "get_available_reporting_integrations", lambda: 1 / 0)  # it imports wandb
    assert JanusGRPOConfig(report_to="none").report_to == []
