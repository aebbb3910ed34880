"""A tiny random Janus with the real special-token names: 16 image codes, codebook 16, a letter-level tokenizer."""

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the suite is a CPU suite, also on a GPU machine
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

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
