import logging
import math
from types import SimpleNamespace

import pytest
from PIL import Image

from janus_trl.callbacks import (
    MARGIN,
    CurveCallback,
    SampleGridCallback,
    drift_over_noise,
    read_series,
    save_curve,
    save_grid,
)
from janus_trl.run_log import drift_per_step, read_messages, reward_trend


def item(color: str, size: int = 32, **values) -> dict:
    return {"image": Image.new("RGB", (size, size), color), "prompt": f"a {color} square", "reward": 0.5, **values}


def state(step: int = 0, main: bool = True, log_history: list | None = None, max_steps: int = 100) -> SimpleNamespace:
    return SimpleNamespace(
        global_step=step, is_world_process_zero=main, log_history=log_history or [], max_steps=max_steps
    )


# ---- drift over noise -----------------------------------------------------------------------------------------------


def test_drift_over_noise_of_a_line_with_known_noise():
    # The noise pattern (+, -, -, +) has mean 0 and no slope over each block of four: the fitted line is the true one.
    n, slope, amplitude = 40, 0.01, 0.05
    noise = [amplitude, -amplitude, -amplitude, amplitude] * (n // 4)
    rewards = [0.3 + slope * t + noise[t] for t in range(n)]
    expected = slope * (n - 1) / (amplitude * math.sqrt(n / (n - 2)))
    assert drift_over_noise(rewards) == pytest.approx(expected, rel=1e-9)
    assert drift_over_noise(rewards[::-1]) == pytest.approx(-expected, rel=1e-9)


def test_drift_over_noise_does_not_depend_on_scale_and_offset_of_the_reward():
    rewards = [0.1, 0.3, 0.2, 0.5, 0.4]
    assert drift_over_noise([100 * r - 7 for r in rewards]) == pytest.approx(drift_over_noise(rewards))


def test_drift_over_noise_at_the_edges():
    assert math.isnan(drift_over_noise([0.1, 0.2]))
    assert drift_over_noise([0.1, 0.1, 0.1, 0.1]) == 0.0
    assert drift_over_noise([0.1, 0.2, 0.3, 0.4]) == math.inf
    assert drift_over_noise([0.4, 0.3, 0.2, 0.1]) == -math.inf
    assert drift_over_noise([0.1, math.nan, 0.3, 0.2, None]) == drift_over_noise([0.1, 0.3, 0.2])


def test_drift_to_noise_does_not_depend_on_how_often_is_logged():
    pattern = [0.05, -0.05, -0.05, 0.05]
    rows = [{"step": t + 1, "reward": 0.3 + 0.002 * t + pattern[t % 4]} for t in range(100)]
    ratio, error = drift_per_step(rows)
    assert ratio == pytest.approx(drift_over_noise([row["reward"] for row in rows]))
    assert error == pytest.approx(math.sqrt(12 / 100))
    # Rows of five steps: as noisy as independent steps would be, sqrt(5) less.
    rare = [{"step": 5 * t, "reward": 0.3 + 0.01 * t + pattern[t % 4] / math.sqrt(5)} for t in range(1, 21)]
    assert drift_per_step(rare) == pytest.approx((ratio, error), rel=0.1)


def test_the_trend_covers_the_window_up_to_the_step_that_is_logged():
    falling_then_rising = [*range(20, 0, -1), *range(0, 20)]
    log = [{"step": s, "reward": r + 0.1 * (s % 3)} for s, r in enumerate(falling_then_rising, start=1)]
    now = SimpleNamespace(log_history=log, global_step=41)
    assert reward_trend(now, [21.0, math.nan], window=20) > 10
    assert abs(reward_trend(now, [21.0], window=100)) < 1
    assert reward_trend(now, [], window=20) is None and reward_trend(now, [math.nan], window=20) is None
    assert reward_trend(state(log_history=log[:5]), [1.0], window=20) is None  # noise


# ---- grids ----------------------------------------------------------------------------------------------------------


def test_grid_has_the_expected_size_and_pixels(tmp_path):
    colors = ["red", "lime", "blue"]
    path = save_grid([item(c) for c in colors], tmp_path / "deep" / "grid.png", scale=6, columns=2)
    grid = Image.open(path)
    assert grid.width == 2 * (6 * 32 + MARGIN) + MARGIN
    row = (grid.height - MARGIN) // 2  # two rows of equal height
    centre = MARGIN + 96
    assert grid.getpixel((centre, centre)) == (255, 0, 0)
    assert grid.getpixel((centre + 192 + MARGIN, centre)) == (0, 255, 0)
    assert grid.getpixel((centre, centre + row)) == (0, 0, 255)
    assert grid.getpixel((centre + 192 + MARGIN, centre + row)) == (255, 255, 255)  # the empty cell


def test_small_pictures_are_enlarged_with_nearest_neighbour(tmp_path):
    picture = Image.new("RGB", (2, 1), "black")
    picture.putpixel((1, 0), (255, 255, 255))
    grid = Image.open(save_grid([{"image": picture, "prompt": "", "reward": None}], tmp_path / "g.png", scale=100))
    row = [grid.getpixel((MARGIN + x, MARGIN + 50)) for x in range(200)]
    assert row == [(0, 0, 0)] * 100 + [(255, 255, 255)] * 100  # no grey in between


def test_large_pictures_keep_their_size(tmp_path):
    grid = Image.open(save_grid([item("red", size=384)], tmp_path / "g.png"))
    assert grid.width == 384 + 2 * MARGIN


def test_caption_of_a_long_prompt_stays_below_its_picture(tmp_path):
    long = "three yellow circles left of a very long and narrow purple cross " * 10
    short, tall = (save_grid([item("red", **v)], tmp_path / f"{i}.png") for i, v in enumerate(({}, {"prompt": long})))
    short, tall = Image.open(short), Image.open(tall)
    assert short.height < tall.height < short.height + 150
    ink = tall.convert("L").point(lambda value: 255 if value < 128 else 0).getbbox()
    assert ink[2] <= tall.width - MARGIN and ink[3] <= tall.height - MARGIN


def test_reasoning_and_reward_change_the_caption(tmp_path):
    variants = [{}, {"reward": 0.25}, {"reward": None}, {"reasoning": "left: red circle"}]
    files = {save_grid([item("red", **v)], tmp_path / f"{i}.png").read_bytes() for i, v in enumerate(variants)}
    assert len(files) == 4


def test_an_empty_grid_is_refused(tmp_path):
    with pytest.raises(ValueError, match="empty list"):
        save_grid([], tmp_path / "g.png")


def test_grids_are_written_at_step_0_every_n_steps_and_at_the_end(tmp_path):
    seen = []
    callback = SampleGridCallback(lambda step: seen.append(step) or [item("red")], every=2)
    args = SimpleNamespace(output_dir=str(tmp_path))
    callback.on_train_begin(args, state(0), None)
    for step in range(1, 6):
        callback.on_step_end(args, state(step), None)
    callback.on_train_end(args, state(5), None)
    assert seen == [0, 2, 4, 5]
    names = sorted(path.name for path in (tmp_path / "samples").glob("*.png"))
    assert names == ["step-000000.png", "step-000002.png", "step-000004.png", "step-000005.png"]


def test_the_last_step_is_not_sampled_twice(tmp_path):
    seen = []
    callback = SampleGridCallback(lambda step: seen.append(step) or [item("red")], every=2)
    args = SimpleNamespace(output_dir=str(tmp_path))
    callback.on_step_end(args, state(2), None)
    callback.on_train_end(args, state(2), None)
    assert seen == [2]


def test_other_ranks_sample_but_do_not_write(tmp_path):
    seen = []
    callback = SampleGridCallback(lambda step: seen.append(step) or [item("red")], every=1)
    callback.on_step_end(SimpleNamespace(output_dir=str(tmp_path)), state(1, main=False), None)
    assert seen == [1]
    assert not list(tmp_path.iterdir())


def test_a_failure_in_drawing_warns_once_and_does_not_raise(tmp_path, caplog):
    (tmp_path / "samples").write_text("a file where the folder should be")
    callback = SampleGridCallback(lambda step: [item("red")], every=1)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            callback.on_step_end(SimpleNamespace(output_dir=str(tmp_path)), state(step), None)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "step-000001.png" in caplog.text


def test_a_failure_in_sampling_is_not_hidden(tmp_path):
    def broken(step: int) -> list:
        raise RuntimeError("collective mismatch")

    with pytest.raises(RuntimeError, match="collective mismatch"):
        SampleGridCallback(broken, every=1).on_step_end(SimpleNamespace(output_dir=str(tmp_path)), state(1), None)


def test_every_0_samples_at_the_start_and_at_the_end_only(tmp_path):
    seen = []
    callback = SampleGridCallback(lambda step: seen.append(step) or [item("red")], every=0)
    args = SimpleNamespace(output_dir=str(tmp_path))
    callback.on_train_begin(args, state(0), None)
    for step in range(1, 4):
        callback.on_step_end(args, state(step), None)
    callback.on_train_end(args, state(3), None)
    assert seen == [0, 3]


def test_negative_every_is_refused():
    with pytest.raises(ValueError, match="every=-1"):
        SampleGridCallback(lambda step: [], every=-1)


# ---- curve ----------------------------------------------------------------------------------------------------------


def test_series_skip_what_is_not_finite_and_count_a_repeated_step_once():
    log = [
        {"step": 1, "reward": 0.1},
        {"step": 2, "reward": 0.2},
        {"step": 2, "eval_reward": 0.9},
        {"step": 3, "reward": math.nan},
        {"step": 2, "reward": 0.25},  # logged again after a resume: the later one holds
        {"step": 4, "train_runtime": 3.0},
    ]
    assert read_series(log, "reward") == ([1, 2], [0.1, 0.25])


def test_curve_draws_one_panel_per_logged_metric(tmp_path):
    log = [{"step": s, "reward": 0.1 * s, "entropy/text": 1.0, "entropy/image": 2.0} for s in range(1, 5)]
    one = Image.open(save_curve([{"step": 1, "reward": 0.5}], tmp_path / "one.png"))
    three = Image.open(save_curve(log, tmp_path / "three.png"))
    assert three.height == one.height and three.width == 3 * one.width
    assert len(set(three.convert("L").get_flattened_data())) > 2  # not a blank page


def test_both_spreads_of_the_reward_share_a_panel_and_five_panels_take_two_rows(tmp_path):
    spread = {"signal/within_group_std": 0.1, "signal/between_group_std": 0.3, "signal/flat_groups": 0.5}
    rest = {"entropy/image": 2.0, "grad_norm": 0.4}
    log = [{"step": s, "reward": 0.1 * s, **spread} for s in range(1, 5)]
    three = Image.open(save_curve(log, tmp_path / "three.png"))
    five = Image.open(save_curve([{**row, **rest} for row in log], tmp_path / "five.png"))
    one = Image.open(save_curve([{"step": 1, "reward": 0.5}], tmp_path / "one.png"))
    assert three.width == 3 * one.width and five.width == 4 * one.width and five.height == 2 * one.height


def red_pixels(path) -> int:
    return sum(count for count, (r, g, b) in Image.open(path).convert("RGB").getcolors(2**24) if r > 200 > 100 > g + b)


def test_the_curve_shows_where_the_monitor_spoke_and_what_it_said(tmp_path):
    log = [{"step": s, "reward": 0.1 * s} for s in range(1, 5)]
    said = [{"step": 3, "monitor/no_signal": "No group had any spread. " * 9}]
    plain, marked, twice = (
        save_curve(rows, tmp_path / f"{i}.png") for i, rows in enumerate([log, log + said, log + said + said])
    )
    assert red_pixels(plain) == 0 and red_pixels(marked) > 500  # a line and a text
    assert Image.open(marked).height > Image.open(plain).height  # the text has room of its own
    assert marked.read_bytes() == twice.read_bytes()  # told again after a resume
    assert read_messages(said + log) == [(3, "no_signal", "No group had any spread. " * 9)]


def test_curve_without_metrics_writes_no_file(tmp_path):
    assert save_curve([{"step": 1, "loss": 0.0}], tmp_path / "curve.png") is None
    assert not list(tmp_path.iterdir())


def test_curve_is_written_at_save_and_at_the_end_by_the_main_process_only(tmp_path):
    log = [{"step": s, "reward": 0.1 * s * s} for s in range(1, 5)]
    args = SimpleNamespace(output_dir=str(tmp_path))
    callback = CurveCallback()
    callback.on_save(args, state(4, main=False, log_history=log), None)
    assert not list(tmp_path.iterdir())
    callback.on_save(args, state(4, log_history=log), None)
    first = (tmp_path / "curve.png").read_bytes()
    callback.on_train_end(args, state(5, log_history=[*log, {"step": 5, "reward": 9.0}]), None)
    assert (tmp_path / "curve.png").read_bytes() != first


def test_an_unreadable_log_does_not_end_the_training(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        CurveCallback().on_save(SimpleNamespace(output_dir=str(tmp_path)), state(1, log_history=[None]), None)
    assert "curve.png" in caplog.text
