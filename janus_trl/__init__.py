"""GRPO and SFT for unified autoregressive models of the Janus family, on the stock TRL trainer and the stock model."""

import importlib

_EXPORTS = {
    "JanusGRPOConfig": "configs",
    "JanusSFTConfig": "configs",
    "JanusGRPOTrainer": "grpo_trainer",
    "JanusSFTTrainer": "sft_trainer",
    "JanusForInterleavedGeneration": "modeling",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str):
    """Import on first use: `from trl import …` alone takes seconds, which `janus_trl.rewards` does not need."""
    if name in _EXPORTS:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
