"""Truncation is about text: images have all of their codes, always."""

import pytest

from janus_trl.rollouts import text_is_cut
from tests.grpo import steps


def test_a_reasoning_is_cut_only_where_the_budget_ended_it(model):
    special, code = model.special_ids, model.vocab_size
    boi, eos, image = special.begin_of_image, special.eos[0], [code, code + 1]
    cases = [
        ([50, 51, boi, *image, eos], [1, 1, 0, 1, 1, 0], True),  # `<begin_of_image>` was forced
        ([50, 51, boi, *image, eos], [1, 1, 1, 1, 1, 0], False),  # it was sampled
        ([50, eos, boi, *image, eos], [1, 1, 0, 1, 1, 0], False),  # eos was sampled
        ([boi, *image, eos], [0, 1, 1, 0], False),  # no reasoning
        ([50, 51], [1, 1], True),  # an answer
        ([50, eos], [1, 1], False),
    ]
    for ids, env_mask, cut in cases:
        assert text_is_cut(ids, env_mask, model) == cut


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_the_clipped_ratio_is_the_share_of_reasonings_that_were_cut(trainer_of, mask_truncated):
    rows = []

    def reward(completion_ids, **_):
        rows.extend(completion_ids)
        return [0.1 * (1 + i % 4) for i in range(len(completion_ids))]

    trainer = trainer_of(
        reward, max_reasoning_length=3, max_steps=4, per_device_train_batch_size=8, num_generations=8, temperature=3.0,
        mask_truncated_completions=mask_truncated, learning_rate=0.0,
    )  # fmt: skip
    trainer.train()
    special, logs = trainer.model.special_ids, steps(trainer)
    stops = {special.begin_of_image, *special.eos}
    cut = [not stops & set(row[:3]) for row in rows]
    assert 0 < sum(cut) < len(cut)
    for step, log in enumerate(logs):
        assert log["completions/clipped_ratio"] == sum(cut[8 * step : 8 * step + 8]) / 8
        assert log["grad_norm"] > 0.1 and log["reward"] == pytest.approx(0.25)  # no image is masked
