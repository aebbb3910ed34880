"""Rollouts in tests: prompts, replay, and a head that favours an id."""

import torch

PROMPTS = ["q", "a red square left of a very long blue description with many words", "two cats"]
SEEDS = [11, 12, 13]


def codes_of(model, ids: list[int]) -> list[int]:
    return [i - model.vocab_size for i in ids if i >= model.vocab_size]


def text_of(model, ids: list[int]) -> list[int]:
    """The ids before the image."""
    return ids[: ids.index(model.special_ids.begin_of_image)]


def replay(model, result, **kwargs):
    """Left-padded prompts, right-padded completions, as TRL lays them out: log-probs `[B, C]`."""
    pad, width = model.special_ids.pad, max(map(len, result.prompt_ids))
    length = max(map(len, result.completion_ids))
    ids, mask, labels = [], [], []
    for prompt, completion in zip(result.prompt_ids, result.completion_ids, strict=True):
        left, right = width - len(prompt), length - len(completion)
        ids.append([pad] * left + prompt + completion + [pad] * right)
        mask.append([0] * left + [1] * (len(prompt) + len(completion)) + [0] * right)
        labels.append([-100] * width + completion + [-100] * right)
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), labels=torch.tensor(labels),
            fused_lm_head=True, **kwargs,
        )  # fmt: skip
    return out.log_probs[:, width - 1 :]


def assert_replay_equals_rollout(model, result, **kwargs):
    scores = replay(model, result, **kwargs)
    for row, (logps, env_mask) in enumerate(zip(result.logprobs, result.env_mask, strict=True)):
        mask = torch.tensor(env_mask, dtype=torch.bool)
        torch.testing.assert_close(torch.tensor(logps)[mask], scores[row, : len(logps)][mask], atol=1e-5, rtol=0)
        assert (torch.tensor(logps)[~mask] == 0).all()


def favour(model, token: int | list[int], weight: float) -> None:
    """Give the head a bias: `weight` on `token` (one or several), 0 on the rest."""
    final = model.model.language_model.norm
    with torch.no_grad():  # a constant channel of the last hidden state, read by one row of the head only
        final.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
    model.model.language_model.norm.register_forward_hook(
        lambda _m, _a, out: torch.cat([torch.ones_like(out[..., :1]), out[..., 1:]], -1)
    )
    with torch.no_grad():
        model.lm_head.weight[token, 0] = weight


class Calls:
    """Rows and positions of every call of the language model."""

    def __init__(self, model):
        self.shapes = []
        model.model.language_model.register_forward_hook(
            lambda _m, _a, kwargs, _o: self.shapes.append(tuple(kwargs["inputs_embeds"].shape[:2])), with_kwargs=True
        )
