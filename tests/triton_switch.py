"""Which form of the engine's kernels a test runs: Triton (on a GPU or in its interpreter) or PyTorch."""

import os

import pytest
import torch

from janus_trl import attention_kernels, engine_prefill, kernels, sampling_kernels


def needs_triton(on_cpu: bool = False) -> None:
    """`on_cpu`: in its interpreter. On a GPU with CUDA_VISIBLE_DEVICES=0, since conftest hides it."""
    interpreted = bool(os.environ.get("TRITON_INTERPRET"))
    if not (kernels.is_triton_available() and (interpreted or not on_cpu and torch.cuda.is_available())):
        pytest.skip("needs TRITON_INTERPRET=1" if on_cpu else "needs CUDA_VISIBLE_DEVICES=0 or TRITON_INTERPRET=1")


def use_triton(monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    """Take one form whatever the device."""
    for module in (kernels, attention_kernels, sampling_kernels, engine_prefill):
        monkeypatch.setattr(module, "uses_triton", lambda tensor: on)
