"""Spread of the rewards within and between groups, by hand and as a trainer logs it."""

import math

import pytest
import torch

from janus_trl.signal_metrics import completion_keys, duplicate_share, flat_groups, reward_spread
from tests.grpo import steps


def test_spread_within_and_between_groups_by_hand():
    spread = reward_spread(torch.tensor([[0.0, 1.0], [2.0, 4.0]]))
    assert spread["within_group_std"] == pytest.approx((math.sqrt(0.5) + math.sqrt(2)) / 2)
    assert spread["between_group_std"] == pytest.approx(math.sqrt(((0.5 - 1.75) ** 2 + (3 - 1.75) ** 2) / 1))
    between, within = 1.25**2, (0.25 + 1.0) / 2  # population variances, whose sum is that of all four rewards
    assert between + within == pytest.approx(torch.tensor([0.0, 1, 2, 4]).var(correction=0).item())
    assert spread["prompt_variance_share"] == pytest.approx(between / (between + within))


def test_the_share_is_that_of_the_published_run_that_learned_nothing():
    # UniRL#141: between-prompt std .0530, within-prompt std .0186: about 89 % of the variance is prompt difficulty.
    generator = torch.Generator().manual_seed(0)
    noise, prompts = torch.randn(2000, 64, generator=generator), torch.randn(2000, 1, generator=generator)
    spread = reward_spread(0.78 + 0.0186 * noise + 0.0530 * prompts)
    assert spread["within_group_std"] == pytest.approx(0.0186, rel=0.02)
    assert spread["between_group_std"] == pytest.approx(0.0530, rel=0.04)
    assert spread["prompt_variance_share"] == pytest.approx(0.89, abs=0.01)


@pytest.mark.parametrize("rewards", [[[0.1] * 3, [0.1] * 3], [[0.1] * 3] * 7, [[0.0, 0.0]]])
def test_equal_rewards_have_no_spread_whatever_they_round_to(rewards):
    weighted = torch.tensor(rewards) * 0.7 + torch.tensor(rewards) * 0.3
    assert flat_groups(weighted).all()
    spread = reward_spread(weighted)
    assert spread["prompt_variance_share"] == 0.0 and spread["within_group_std"] < 1e-7


def test_a_group_is_flat_without_two_different_rewards():
    nan = math.nan
    rewards = [[1.0, 1.0, 1.0], [1.0, 1.0, 1.1], [nan, 1.0, 1.0], [nan, nan, 1.0], [nan, 0.0, 1.0], [nan, nan, nan]]
    assert flat_groups(torch.tensor(rewards)).tolist() == [True, False, True, True, False, True]


def test_unscored_completions_do_not_count():
    nan = math.nan
    spread = reward_spread(torch.tensor([[nan, nan, nan], [0.0, 1.0, nan]]))
    assert spread == {
        "within_group_std": pytest.approx(math.sqrt(0.5)), "between_group_std": 0.0, "prompt_variance_share": 0.0,
    }  # fmt: skip
    assert reward_spread(torch.full((2, 3), nan)) == {}


def test_duplicates_are_counted_in_their_group_only():
    assert duplicate_share(torch.tensor([[1, 1, 2, 3], [1, 5, 6, 7]])) == 2 / 8
    assert duplicate_share(torch.tensor([[4, 4], [4, 4]])) == 1.0


def test_completions_that_differ_in_padding_only_are_the_same():
    ids = torch.tensor([[5, 6, 0], [5, 6, 9], [5, 6, 9], [6, 5, 0]])
    keys = completion_keys(ids, torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0]]))
    assert keys[0] == keys[1] and len({*keys.tolist()}) == 3


def test_a_step_logs_the_spread_of_its_groups(trainer_of):
    def first(completions, **_):
        return [0.0, 1.0, 2.0, 4.0]

    def second(completions, **_):
        return [10.0, 10.0, None, None]

    trainer = trainer_of([first, second], num_generations=2, reward_weights=[1.0, 0.5], log_completions=True)
    trainer.train()
    (log,) = steps(trainer)  # totals: 5, 6 and 2, 4
    assert log["signal/within_group_std"] == pytest.approx((math.sqrt(0.5) + math.sqrt(2)) / 2)
    assert log["signal/between_group_std"] == pytest.approx(2.5 / math.sqrt(2))
    assert log["signal/prompt_variance_share"] == pytest.approx(1.25**2 / (1.25**2 + 0.625))
    assert log["signal/flat_groups"] == 0 and log["signal/duplicates"] == 0
    assert log["rewards/first/within_group_std"] == pytest.approx((math.sqrt(0.5) + math.sqrt(2)) / 2)
    assert log["rewards/second/within_group_std"] == 0
    assert log["signal/advantage_abs_mean"] == pytest.approx(math.sqrt(0.5), rel=1e-3)  # ±1/√2 with unbiased std


def test_rewards_that_are_equal_within_groups_are_flat_though_their_spread_over_all_rows_is_not(trainer_of):
    # trl#3452, open-r1#239: reward_std is not 0, and still nothing is learned.
    trainer = trainer_of(
        lambda completions, **_: [0.0, 0.0, 1.0, 1.0], num_generations=2, scale_rewards="batch", beta=0.0
    )
    trainer.train()
    (log,) = steps(trainer)
    assert log["reward_std"] > 0.5 and log["frac_reward_zero_std"] == 0
    assert log["signal/flat_groups"] == 1 and log["signal/within_group_std"] == 0
    assert log["signal/prompt_variance_share"] == 1 and log["signal/advantage_abs_mean"] == 0 and log["grad_norm"] == 0


def test_batch_scaling_shrinks_advantages_by_the_share_of_the_prompts(trainer_of):
    rewards = [0.0, 1.0, 10.0, 11.0]
    trainer = trainer_of(lambda completions, **_: rewards, num_generations=2, scale_rewards="batch")
    trainer.train()
    (log,) = steps(trainer)
    share = log["signal/prompt_variance_share"]
    assert share == pytest.approx(25 / 25.25)
    # population over unbiased std of four rewards: sqrt(3 / 4)
    assert log["signal/advantage_abs_mean"] == pytest.approx(math.sqrt(0.75 * (1 - share)), rel=1e-3)
