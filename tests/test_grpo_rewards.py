"""Rewards in GRPO: what they are given, rows without one, and what stops a run."""

import math

import pytest
import torch

from janus_trl.picture_decoder import PictureDecoder
from tests.grpo import PROMPTS, ascending, prompts_dataset, steps, weights


def test_rewards_get_prompts_completions_columns_and_pictures(trainer_of, processor):
    seen = {}

    def reward(prompts, completions, completion_ids, generated_images, tag, **_):
        seen.update(locals())
        return [0.0, 1.0] * 2

    dataset = prompts_dataset().add_column("tag", ["t1", "t2", "t3", "t4"])
    trainer_of(reward, dataset, max_reasoning_length=2).train()
    (index,) = {PROMPTS.index(p) for p in seen["prompts"]}
    assert seen["tag"] == [f"t{index + 1}"] * 4
    assert [(p.mode, p.size) for p in seen["generated_images"]] == [("RGB", (16, 16))] * 4
    reasoning = [
        ids[: ids.index(processor.tokenizer.convert_tokens_to_ids("<begin_of_image>"))]
        for ids in seen["completion_ids"]
    ]
    assert seen["completions"] == processor.batch_decode(reasoning, skip_special_tokens=True)


def test_rows_without_reward_leave_their_group_and_the_policy_alone(trainer_of):
    values = iter([[None, 1.0, 0.0, 2.0]])
    trainer = trainer_of(lambda completions, **_: next(values), num_generations=2)
    trainer.train()
    advantages = list(trainer._logs["advantages"])
    assert advantages[:2] == [0.0, 0.0]
    assert advantages[2] < -0.5 and advantages[3] > 0.5
    assert steps(trainer)[0]["reward"] == pytest.approx(1.0) and steps(trainer)[0]["grad_norm"] > 0


def test_a_group_without_any_reward_gives_no_gradient(trainer_of):
    trainer = trainer_of(lambda completions, **_: [None] * len(completions))
    before = weights(trainer)
    trainer.train()
    assert steps(trainer)[0]["grad_norm"] == 0
    assert all(torch.equal(p, before[name]) for name, p in weights(trainer).items())


def test_weights_of_rewards_are_applied(trainer_of):
    def ones(completions, **_):
        return [1.0] * len(completions)

    trainer = trainer_of([ascending, ones], reward_weights=[2.0, 0.5])
    trainer.train()
    assert steps(trainer)[0]["reward"] == pytest.approx(2 * 0.25 + 0.5)
    assert steps(trainer)[0]["rewards/ascending/mean"] == pytest.approx(0.25)


def test_a_reward_with_the_wrong_number_of_values_is_refused(trainer_of):
    def short(completions, **_):
        return [1.0]

    with pytest.raises(
        RuntimeError, match=r"'short' failed on rank 0: .*'short' returned 1 values; expected a list of 4"
    ):
        trainer_of(short).train()


def test_an_exception_in_a_reward_stops_the_run_and_names_the_reward(trainer_of):
    def broken(completions, **_):
        raise KeyError("gold")

    trainer = trainer_of([ascending, broken])
    before = weights(trainer)
    with pytest.raises(
        RuntimeError, match=r"reward 'broken' failed on rank 0, row 0 \(prompt '.*'\): KeyError: 'gold'"
    ) as error:
        trainer.train()
    assert isinstance(error.value.__cause__, KeyError)
    assert all(torch.equal(p, before[name]) for name, p in weights(trainer).items())


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_non_finite_gradient_stops_before_the_update(trainer_of, value):
    trainer = trainer_of()
    trainer.model.model.language_model.norm.weight.register_hook(lambda gradient: gradient + value)
    before = weights(trainer)
    with pytest.raises(FloatingPointError, match=r"Gradient norm (inf|nan) at step 1: .*learning_rate \(0.01\)"):
        trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in weights(trainer).items())


@pytest.mark.parametrize("part", ["text", "image"])
def test_weights_that_are_not_finite_stop_the_rollout_with_a_message(trainer_of, part):
    trainer = trainer_of(max_reasoning_length=2)
    head = trainer.model.lm_head if part == "text" else trainer.model.model.generation_head.vision_head
    with torch.no_grad():
        head.weight[3] = math.nan
    with pytest.raises(FloatingPointError):
        trainer.train()


# ------------------------------------------------------------------------------------------- what reaches the training


def scripted(values):
    """A reward that gives out lists of values, one list a call."""
    given = iter(values)

    def reward(completions, **_):
        return next(given)

    return reward


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_is_trained_on_a_value_that_is_not_finite(trainer_of, bad):
    trainer = trainer_of([scripted([[bad, 1.0, 0.0, 2.0]]), ascending], num_generations=2)
    trainer.train()
    advantages, entry = list(trainer._logs["advantages"]), steps(trainer)[0]
    assert advantages[:2] == [0.0, 0.0] and advantages[2] < -0.5 and advantages[3] > 0.5
    assert entry["rewards/reward/nan"] == 1 and entry["rewards/ascending/nan"] == 0
    assert entry["reward"] == pytest.approx((1.2 + 0.3 + 2.4) / 3) and entry["rewards/reward/mean"] == 1.0
    assert math.isfinite(entry["grad_norm"]) and entry["grad_norm"] > 0


def test_errors_set_to_none_leave_rows_out_and_the_run_goes_on(trainer_of):
    def picky(completions, completion_ids, **_):
        if len(completions) > 1:
            raise KeyError("one of them")
        raise KeyError("gold")

    trainer = trainer_of([ascending, picky], on_reward_error="none", max_steps=2, reward_weights=[1.0, 0.0])
    trainer.train()
    assert [entry["rewards/picky/errors"] for entry in steps(trainer)] == [4, 4]
    assert all(entry["grad_norm"] > 0 for entry in steps(trainer))


def test_a_reward_of_weight_zero_is_logged_and_does_not_train(trainer_of):
    def noise(completions, **_):
        return [3.0, -8.0, 1.0, 0.5]

    alone = trainer_of(ascending)
    alone.train()
    watched = trainer_of([ascending, noise], reward_weights=[1.0, 0.0])  # built afterwards: it sets the seed
    watched.train()
    assert steps(watched)[0]["rewards/noise/mean"] == pytest.approx(-3.5 / 4)
    assert steps(watched)[0]["reward"] == pytest.approx(0.25)
    assert list(watched._logs["advantages"]) == list(alone._logs["advantages"])
    assert all(torch.equal(p, weights(alone)[name]) for name, p in weights(watched).items())


@pytest.mark.parametrize(("scale", "factor"), [("group", 1), ("none", 15)])
def test_the_scale_of_the_only_reward_matters_without_scaling_alone(trainer_of, scale, factor):
    def larger(completions, **_):
        return [15 * value for value in ascending(completions)]

    advantages = []
    for reward in (ascending, larger):
        trainer = trainer_of(reward, scale_rewards=scale)
        trainer.train()
        advantages.append(torch.tensor(list(trainer._logs["advantages"])))
    # The 1e-4 that TRL adds to the standard deviation (0.129 here) is what is left of the scale.
    assert torch.allclose(advantages[1], factor * advantages[0], rtol=1e-3)


def test_a_constant_reward_shows_in_the_metrics_and_gives_no_gradient(trainer_of):
    trainer = trainer_of(lambda completions, **_: [0.7] * len(completions), max_steps=5)
    trainer.train()
    assert [entry["frac_reward_zero_std"] for entry in steps(trainer)] == [1.0] * 5
    assert [entry["grad_norm"] for entry in steps(trainer)] == [0.0] * 5


def test_pictures_of_a_reward_are_what_decoding_gives_byte_by_byte(trainer_of):
    seen = {}

    def reward(prompts, completion_ids, generated_images, **_):
        seen.update(locals())
        return [0.0, 1.0] * 2

    trainer = trainer_of(reward, max_reasoning_length=2)
    trainer.train()
    model, offset = trainer.base_model, trainer.base_model.vocab_size
    codes = torch.tensor([[i - offset for i in row if i >= offset] for row in seen["completion_ids"]])
    again = PictureDecoder(trainer_of(max_reasoning_length=2).base_model)(codes)  # as for final pictures, not trained
    assert len(again) == 4 and model.num_image_codes == codes.shape[1]
    assert [a.tobytes() for a in again] == [p.tobytes() for p in seen["generated_images"]]


def test_a_reward_sees_the_users_text_without_template_and_reasoning(trainer_of):
    seen = []
    trainer_of(
        lambda prompts, **_: seen.extend(prompts) or [0.0, 1.0] * 2,
        max_reasoning_length=2,
        prompt_template="Plan the picture first. {prompt}",
    ).train()
    assert set(seen) <= set(PROMPTS) and len(seen) == 4


def test_a_missing_column_is_named_before_the_model_loads(trainer_of, monkeypatch):
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    with pytest.raises(ValueError, match="needs the column 'demands', which the data set lacks"):
        trainer_of(lambda completions, demands: [0.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_reward_error": "ignore"}, "on_reward_error = 'ignore' must be one of: raise, none"),
        ({"reward_timeout": 0}, "reward_timeout = 0 must be > 0"),
        ({"reward_weights": [0.0, 0.0]}, r"reward_weights = \[0.0, 0.0\]: nothing would be trained on"),
        ({"reward_weights": [math.nan]}, "must be finite"),
    ],
)
def test_reward_options_that_cannot_work_are_refused(trainer_of, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(**options)
