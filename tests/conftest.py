"""A tiny random Janus with the real special-token names: 16 image codes, codebook 16, a letter-level tokenizer."""

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the suite is a CPU suite, also on a GPU machine
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from tests.distributed_launch import launch_of
from tests.tiny import build_random_janus


@pytest.fixture(scope="session")
def janus_folder(tmp_path_factory) -> str:
    """A saved random tiny Janus with its processor."""
    folder = str(tmp_path_factory.mktemp("janus"))
    build_random_janus(folder)
    return folder


@pytest.fixture
def processor(janus_folder):
    from transformers import JanusProcessor

    return JanusProcessor.from_pretrained(janus_folder)


@pytest.fixture
def model(janus_folder, processor):
    from janus_trl.modeling import JanusForInterleavedGeneration, bind_special_ids

    model = JanusForInterleavedGeneration.from_pretrained(janus_folder, dtype=torch.float32)
    bind_special_ids(model, processor)
    return model.eval()


@pytest.fixture
def within_zero3():
    """As in a process of a ZeRO-3 run: transformers shards what it builds or loads."""
    from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    assert is_deepspeed_zero3_enabled()
    yield config  # it holds as long as the object lives
    del config


@pytest.fixture
def trainer_of(janus_folder, tmp_path):
    """Builds a trainer with settings for a CPU and four completions a step."""
    from janus_trl.configs import JanusGRPOConfig
    from janus_trl.grpo_trainer import JanusGRPOTrainer
    from tests.grpo import ascending, pictures_dataset, prompts_dataset

    def build(reward_funcs=ascending, dataset=None, model=janus_folder, eval_dataset=None, peft=None, **settings):
        defaults = {
            "output_dir": str(tmp_path), "report_to": "none", "per_device_train_batch_size": 4, "num_generations": 4,
            "max_steps": 1, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "gradient_checkpointing": False,
            "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "guidance_scale": 2.0,
        }  # fmt: skip
        if settings.get("task") == "i2t":
            defaults["max_completion_length"] = 4
            dataset = dataset or pictures_dataset()
        args = JanusGRPOConfig(**{**defaults, **settings})
        return JanusGRPOTrainer(
            model, reward_funcs, args, dataset or prompts_dataset(), eval_dataset, peft_config=peft
        )  # fmt: skip

    return build


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list) -> None:
    """Spread the files that start processes over the run: two at a time would wait for each other's cores.

    A module's `SLOW` names launches and scenarios of slow tests.
    """
    files: dict[str, list] = {}
    for item in items:
        files.setdefault(item.path.name, []).append(item)
        if launch_of(item) in getattr(item.module, "SLOW", ()):
            item.add_marker(pytest.mark.slow)
    launches = [name for name in files if "distributed" in name]
    others = [name for name in files if name not in launches]
    between = -(-len(others) // max(1, len(launches)))
    order = []
    for place in range(max(1, len(launches))):
        order += launches[place : place + 1] + others[place * between : (place + 1) * between]
    items[:] = [item for name in order for item in files[name]]
