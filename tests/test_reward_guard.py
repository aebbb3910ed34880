"""How the rewards of a step are called: side by side, with time limits, and with faults kept apart from scores."""

import asyncio
import logging
import math
import threading
import time
from collections import defaultdict

import pytest
import torch
from accelerate import Accelerator

from janus_trl.reward_guard import guard
from janus_trl.reward_settlement import _raise, settle
from janus_trl.rewards import Scores, get_reward_funcs
from janus_trl.rewards.placement import Placement

CALL = dict(
    prompts=["a", "b", "c", "d"], completions=["w", "x", "y", "z"], completion_ids=[[1]] * 4, tag=[0, 1, 2, 3],
    trainer_state=None, log_extra=None, log_metric=None,
)  # fmt: skip
NAN, INF = math.nan, math.inf


def outcome(functions, weights=None, **options):
    """Call guarded rewards as TRL does, and settle: what is trained on, and the metrics."""
    functions = guard(functions, **options)
    columns = [[NAN if v is None else v for v in function(**CALL)] for function in functions]
    metrics = defaultdict(list)
    weights = torch.tensor(weights or [1.0] * len(functions))
    rewards = settle(functions, torch.tensor(columns).T, weights, Accelerator(cpu=True), metrics)
    return rewards.tolist(), {name: value for name, (value,) in metrics.items()}


def same(rows, expected):
    return [[None if math.isnan(v) else v for v in row] for row in rows] == expected


# -------------------------------------------------------------------------------------------------------------- names


def test_names_are_readable_and_differ():
    class Counter:
        def __call__(self, completions):
            return [0.0] * len(completions)

    functions = guard([lambda completions: completions, lambda completions: completions, Counter(), Counter()])
    assert [function.__name__ for function in functions] == ["lambda", "lambda_2", "Counter", "Counter_2"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("pickscore", "holds the name 'pickscore', where a function is needed. .*get_reward_funcs"),
        (torch.nn.Linear(1, 1), "holds a Linear, where a function is needed"),
        (3, "holds a int"),
        (lambda images, solution: [], r"needs the column 'solution'.*did you mean 'solutions'"),
    ],
)
def test_what_cannot_be_called_is_refused_before_the_model_loads(function, message):
    with pytest.raises(ValueError, match=message):
        guard([function], columns=["prompt", "images", "solutions"])


def test_a_plain_function_gets_only_what_it_declares():
    rows, _ = outcome([lambda completions: [1, 2, 3, 4], lambda tag: tag], columns=["tag"])
    assert rows == [[1, 0], [2, 1], [3, 2], [4, 3]]


# ------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_is_counted_and_its_row_is_left_out(bad, caplog):
    def broken(tag):
        return [bad, 1.0, None, 0.5]

    def fine(tag):
        return [1.0, 2.0, 3.0, 4.0]

    with caplog.at_level(logging.WARNING):
        rows, metrics = outcome([broken, fine])
    assert same(rows, [[None, None], [1.0, 2.0], [None, 3.0], [0.5, 4.0]])
    assert metrics["rewards/broken/nan"] == 1 and metrics["rewards/fine/nan"] == 0
    assert f"reward 'broken' returned {bad} for row 0 (prompt 'a')" in caplog.text


def test_a_fault_is_said_once_and_counted_every_time(caplog):
    functions = guard([lambda tag: [NAN] * 4])
    for _ in range(3):
        values = functions[0](**CALL)
        assert values == [INF] * 4
    assert len(caplog.records) == 1


def test_a_reward_of_weight_zero_neither_keeps_a_row_nor_removes_one():
    def trained(tag):
        return [None, 1.0, 2.0, None]

    def watched(tag):
        return [5.0, 6.0, NAN, None]

    rows, _ = outcome([trained, watched], weights=[1.0, 0.0])
    assert same(rows, [[None, None], [1.0, 6.0], [2.0, None], [None, None]])


def test_rows_that_a_reward_says_it_failed_on_are_left_out_with_all_their_rewards():
    class Judge:
        def __call__(self, prompts):
            out = [i for i, prompt in enumerate(prompts) if prompt == "c"]
            return Scores([None if i in out else 1.0 for i in range(len(prompts))], failed=out)

    for on_error in ("raise", "none"):
        rows, metrics = outcome([Judge(), lambda tag: tag], on_error=on_error)
        assert same(rows, [[1.0, 0.0], [1.0, 1.0], [None, None], [1.0, 3.0]])
        assert metrics.get("rewards/Judge/errors", 0) == 0 and metrics["rewards/Judge/nan"] == 0
    rows, _ = outcome([Judge(), lambda tag: tag], weights=[0.0, 1.0])
    assert same(rows, [[1.0, 0.0], [1.0, 1.0], [None, 2.0], [1.0, 3.0]])


def test_a_service_that_answered_no_row_of_one_rank_ends_the_run_only_if_all_ranks_say_so():
    functions = guard([lambda tag: tag])

    def rank(unanswered):
        return [{"note": ": NoAnswer: gone" if unanswered else "", "unanswered": unanswered}]

    _raise(functions, [rank(True), rank(False)], None, rows=2)
    _raise(functions, [rank(True)], None, rows=1)
    with pytest.raises(RuntimeError, match="failed on rank 0: NoAnswer: gone; reward 'lambda' failed on rank 1"):
        _raise(functions, [rank(True), rank(True)], None, rows=2)
    with pytest.raises(RuntimeError, match="rank 0: KeyError"):
        _raise(functions, [[{"note": ": KeyError", "unanswered": False}], rank(True)], None, rows=2)


def test_an_exception_names_reward_rank_row_and_prompt():
    def picky(prompts):
        return [1 / (prompt != "c") for prompt in prompts]

    with pytest.raises(RuntimeError, match=r"reward 'picky' failed on rank 0, row 2 \(prompt 'c'\): ZeroDiv") as error:
        outcome([lambda tag: tag, picky])
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_an_exception_that_no_row_raises_alone_names_none():
    def crowded(prompts):
        if len(prompts) > 1:
            raise MemoryError("too many")
        return [1.0]

    with pytest.raises(RuntimeError, match=r"reward 'crowded' failed on rank 0: MemoryError: too many"):
        outcome([crowded])


def test_an_exception_that_brings_its_row_is_not_searched_for():
    calls = []

    def judge(prompts):
        calls.append(len(prompts))
        error = ValueError("no verdict")
        error.row = 3
        raise error

    with pytest.raises(RuntimeError, match=r"rank 0, row 3 \(prompt 'd'\): ValueError: no verdict"):
        outcome([judge])
    assert calls == [4]


def test_all_failing_rewards_are_named_together():
    async def later(prompts):
        raise KeyError("later")

    def now(prompts):
        raise KeyError("now")

    with pytest.raises(RuntimeError, match=r"'now' failed.*KeyError: 'now'; reward 'later' failed.*row 0.*'later'"):
        outcome([now, later])


def test_errors_can_be_left_out_and_counted_instead(caplog):
    def picky(prompts):
        return [1 / (prompt != "c") for prompt in prompts]

    async def slow(prompts):
        if "a" in prompts:
            raise KeyError("a")
        return [{"b": NAN, "d": None}.get(prompt, 7.0) for prompt in prompts]

    rows, metrics = outcome([picky, slow], weights=[1.0, 0.0], on_error="none")
    assert same(rows, [[1.0, None], [1.0, None], [None, None], [1.0, None]])
    assert metrics["rewards/picky/errors"] == 1 and metrics["rewards/slow/errors"] == 1
    assert metrics["rewards/picky/nan"] == 0 and metrics["rewards/slow/nan"] == 1
    assert "reward 'picky' failed, row 2 (prompt 'c'): ZeroDivisionError" in caplog.text


def test_counts_of_a_reward_are_logged():
    class Cutting:
        def __call__(self, prompts):
            return Scores([1.0] * len(prompts), counts={"truncated": 3})

    _, metrics = outcome(get_reward_funcs([Cutting, lambda tag: tag]).funcs)
    assert metrics["rewards/Cutting/truncated"] == 3 and "rewards/lambda/truncated" not in metrics


# -------------------------------------------------------------------------------------------------------- side by side


def test_async_rewards_wait_together_and_beside_the_others():
    def waiting(name):
        async def reward(completions):
            await asyncio.sleep(0.2)
            return [1.0] * len(completions)

        reward.__name__ = name
        return reward

    def busy(completions):
        time.sleep(0.2)
        return [0.0] * len(completions)

    start = time.perf_counter()
    rows, metrics = outcome([busy] + [waiting(f"judge_{i}") for i in range(8)])
    assert time.perf_counter() - start < 0.8  # 1.8 s one after the other
    assert rows == [[0.0] + [1.0] * 8] * 4
    assert all(0.19 < metrics[f"time/reward_s/{name}"] < 0.6 for name in ("busy", "judge_0", "judge_7"))


def test_an_async_reward_keeps_its_loop_from_step_to_step():
    loops = []

    async def reward(completions):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    functions = guard([reward])
    functions[0](**CALL)
    functions[0](**CALL)
    assert loops[0] is loops[1] and loops[0].is_running()


def test_an_async_reward_that_never_returns_is_cut_off(caplog):
    async def stuck(completions):
        await asyncio.sleep(3600)

    start = time.perf_counter()
    rows, metrics = outcome([lambda tag: tag, stuck], weights=[1.0, 0.0], timeout=0.2)
    assert time.perf_counter() - start < 2
    assert same(rows, [[0.0, None], [1.0, None], [2.0, None], [3.0, None]])
    assert metrics["rewards/stuck/timeouts"] == 4 and "rewards/lambda/timeouts" not in metrics
    assert "reward 'stuck' took longer than reward_timeout = 0.2 s" in caplog.text


def test_a_model_on_the_cpu_scores_beside_one_on_the_gpu():
    together = threading.Barrier(2, timeout=5)

    class OnCpu:
        placement = Placement("on_cpu", device="cpu")

        def __call__(self, completions):
            together.wait()
            return [float(threading.current_thread() is threading.main_thread())] * len(completions)

    def on_gpu(completions):
        together.wait()
        return [float(threading.current_thread() is threading.main_thread())] * len(completions)

    rows, _ = outcome(get_reward_funcs([OnCpu, on_gpu]).funcs)
    assert rows == [[0.0, 1.0]] * 4


def test_models_that_share_the_cpu_score_one_after_the_other():
    running = []

    class OnCpu:
        placement = Placement("on_cpu", device="cpu")

        def __call__(self, completions):
            running.append(1)
            time.sleep(0.05)
            assert len(running) == 1
            running.pop()
            return [0.0] * len(completions)

    rows, _ = outcome(get_reward_funcs([OnCpu, OnCpu, lambda tag: tag]).funcs)
    assert len(rows) == 4
    assert outcome(get_reward_funcs([OnCpu, OnCpu]).funcs)[0] == [[0.0, 0.0]] * 4
