"""The judge over HTTP: what it is asked, how its answer becomes a number, and what happens when it fails."""

import asyncio
import base64
import io
import math
import time

import numpy as np
import pytest
from PIL import Image

from janus_trl.rewards import get_reward_funcs, http_calls
from janus_trl.rewards.vlm_judge import VLMJudge, find_verdict, yes_probability
from tests.json_server import JsonServer, Reply

WORDS = {"yes": True, "no": False}
KEY = "key-0123456789"


def completion(text: str, candidates: dict[str, float] | None = None, before: tuple[str, ...] = ()) -> dict:
    """A chat completion; `candidates` are the probabilities at the token after `before`."""
    choice = {"message": {"role": "assistant", "content": text}}
    if candidates is not None:
        top = [{"token": token, "logprob": math.log(p)} for token, p in candidates.items()]
        content = [{"token": token, "logprob": 0.0, "top_logprobs": []} for token in before]
        choice["logprobs"] = {"content": [*content, {"token": text[len("".join(before)) :], "top_logprobs": top}]}
    return {"choices": [choice]}


def caption(body: dict) -> str:
    return body["messages"][0]["content"][1]["text"].split('"')[1]


@pytest.fixture
def judge_of(monkeypatch):
    """Starts a server and returns it with a judge that asks it."""
    monkeypatch.setattr(http_calls, "FIRST_WAIT", 0.01)
    open_servers = []

    def start(respond, **settings):
        running = JsonServer(respond).running()
        server = running.__enter__()
        open_servers.append(running)
        return server, VLMJudge(base_url=f"{server.url}/v1", model="judge", **settings)

    yield start
    for running in open_servers:
        running.__exit__(None, None, None)


def ask(judge: VLMJudge, prompts: list[str], images: list | None = None) -> tuple[list, dict, float]:
    """Values, counts and seconds."""
    images = images or [Image.new("RGB", (8, 8))] * len(prompts)
    start = time.perf_counter()
    values = asyncio.run(judge(prompts=prompts, generated_images=images, tag=None))
    return values, values.counts, time.perf_counter() - start


# ------------------------------------------------------------------------------------------------- question and answer


def test_the_judge_sees_the_exact_pixels_the_caption_and_the_key(judge_of, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server, judge = judge_of(
        lambda *_: Reply(completion("Yes")), api_key_env="JUDGE_KEY", question="Is {prompt} in {x}?"
    )
    pixels = np.random.default_rng(0).integers(0, 256, (24, 16, 3), dtype=np.uint8)
    assert ask(judge, ["a {red} cup"], [Image.fromarray(pixels)])[0] == [1.0]
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == f"Bearer {KEY}"
    picture, text = body["messages"][0]["content"]
    assert text["text"] == "Is a {red} cup in {x}?"
    kind, _, content = picture["image_url"]["url"].partition(";base64,")
    assert kind == "data:image/png"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(content)))), pixels)
    assert (body["model"], body["temperature"], body["logprobs"], body["top_logprobs"]) == ("judge", 0, True, 20)


def test_jpeg_is_sent_by_choice(judge_of):
    server, judge = judge_of(lambda *_: Reply(completion("no")), image_format="jpeg")
    assert ask(judge, ["x"])[0] == [0.0]
    assert server.requests[0][2]["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/jpeg;base64,")


def test_probabilities_are_summed_over_spellings_and_normalised(judge_of):
    candidates = {"Yes": 0.5, " yes": 0.1, "YES.": 0.04, "No": 0.1, "ĠNO": 0.06, "Maybe": 0.2}
    _, judge = judge_of(lambda *_: Reply(completion("Yes", candidates)))
    assert ask(judge, ["x"])[0] == [pytest.approx(0.64 / 0.8)]


def test_the_probability_is_read_at_the_token_of_the_verdict(judge_of):
    reply = completion(
        "<think>yes or no?</think> No", {" No": 0.7, " Yes": 0.2}, before=("<think>yes", " or no?</think>")
    )
    _, judge = judge_of(lambda *_: Reply(reply), max_tokens=200)
    assert ask(judge, ["x"])[0] == [pytest.approx(0.2 / 0.9)]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("Yes", True), ("no.", False), ("**Yes**, it does.", True), ("No, there is no dog.", False),
        ("Yes. There is no doubt.", True), ("(no)", False), ("NO!", False), ('"Yes"', True),
        ("The picture shows a cat. Answer: yes", True), ("Answer: No", False), ("The answer is **no**.", False),
        ("Final verdict: yes, although no hat is there.", True), (r"\boxed{Yes}", True), ("It does: yes.", True),
        ("<think>No.</think>Yes", True), ("<think>No, yes</think>\n\nno", False),
        ("I would say yes or no.", None), ("Nothing is there", None), ("Yesterday", None), ("noon", None), ("", None),
        ("maybe", None), ("<think>yes", True), ("<think>yes</think>", None),
    ],
)  # fmt: skip
def test_the_verdict_is_found_in_the_text(text, verdict):
    found = find_verdict(text, WORDS)
    assert (found if found is None else found[1]) is verdict
    if found:
        assert text[found[0] :].lower().startswith(("yes", "no"))


def test_other_words_and_no_candidates():
    words = {"1": True, "0": False}
    assert find_verdict(r"So it is \boxed{1}", words)[1] is True
    assert find_verdict("10", words) is None
    assert yes_probability([{"token": "1", "top_logprobs": [{"token": "1", "logprob": 0.0}]}], 0, words, True) == 1.0
    assert yes_probability([{"token": "1", "top_logprobs": []}], 0, words, True) is None
    assert yes_probability(None, 0, words, True) is None


def test_an_answer_without_a_verdict_is_unscored_and_counted(judge_of):
    server, judge = judge_of(lambda body, _: Reply(completion("Yes" if caption(body) == "a" else "A fine picture!")))
    values, counts, _ = ask(judge, ["a", "b", "a"])
    assert values == [1.0, None, 1.0]
    assert counts == {"failed": 0.0, "timed_out": 0.0, "no_verdict": 1.0, "retries": 0.0}
    assert len(server.requests) == 3  # the same question would get the same answer


def test_a_server_without_logprobs_is_asked_for_the_verdict_alone(judge_of, caplog):
    def respond(body, _):
        refused = Reply({"error": "logprobs is not supported by this model"}, status=400)
        return refused if "logprobs" in body else Reply(completion("yes"))

    server, judge = judge_of(respond)
    assert ask(judge, ["a", "b"])[0] == [1.0, 1.0]
    assert "verdicts count 1 or 0" in caplog.text
    assert ask(judge, ["c"])[0] == [1.0] and len(server.requests) == 5


def test_a_verdict_of_several_tokens_is_not_read_from_candidates_for_its_parts():
    def token(text, **candidates):
        top = [{"token": word, "logprob": math.log(p)} for word, p in candidates.items()]
        return {"token": text, "top_logprobs": top}

    words = {"correct": True, "incorrect": False}
    assert yes_probability([token("in", correct=0.1), token("correct")], 0, words, False) is None  # not 1.0
    assert yes_probability([token("Y", No=0.05), token("es")], 0, WORDS, True) is None  # not 0.0
    thought = [token("No", No=0.9, Yes=0.1), token(" wait"), token("Yes", Yes=0.9)]  # the text is "Yes" alone
    assert yes_probability(thought, 0, WORDS, True) is None


# ------------------------------------------------------------------------------------------------------------ failures


def test_a_failing_server_is_asked_again(judge_of):
    server, judge = judge_of(lambda _, n: Reply(status=500) if n < 2 else Reply(completion("yes")))
    values, counts, _ = ask(judge, ["x"])
    assert values == [1.0] and len(server.requests) == 3
    assert counts == {"failed": 0.0, "timed_out": 0.0, "no_verdict": 0.0, "retries": 2.0}


@pytest.mark.parametrize("body", [b"<html>busy</html>", b'{"choices"', {"choices": []}, {"error": "x"}, b"\xff", 3])
def test_malformed_replies_are_asked_for_again_and_then_unscored(judge_of, body):
    bad = Reply(body)
    server, judge = judge_of(lambda b, _: bad if caption(b) == "bad" else Reply(completion("no")), max_retries=2)
    values, counts, _ = ask(judge, ["bad", "good"])
    assert values == [None, 0.0] and len(server.requests) == 4
    assert (counts["failed"], counts["retries"]) == (1.0, 2.0)


def test_a_rate_limit_is_waited_for_as_long_as_it_says(judge_of):
    limited = Reply(status=429, headers={"Retry-After": "0.4"})
    server, judge = judge_of(lambda _, n: limited if n == 0 else Reply(completion("yes")))
    values, counts, seconds = ask(judge, ["x"])
    assert values == [1.0] and counts["retries"] == 1.0
    assert 0.4 <= seconds < 2.0


def test_waiting_times_double_and_have_a_limit():
    service = VLMJudge("http://localhost:1", "m", max_retries=20)._service
    waits = [service._wait(http_calls._TryFailed("", True), n) for n in range(20)]
    assert all(0.75 * 0.5 * 2**n <= wait <= 1.25 * 0.5 * 2**n for n, wait in enumerate(waits[:5]))
    assert waits[-1] == 30.0
    assert service._wait(http_calls._TryFailed("", True, retry_after=3600), 0) == 30.0
    assert service._wait(http_calls._TryFailed("", True), 20) is None
    assert service._wait(http_calls._TryFailed("", temporary=False), 0) is None
    assert http_calls._retry_after("soon") is None and http_calls._retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


def test_a_slow_answer_is_cut_at_the_time_limit_and_only_that_row_is_lost(judge_of):
    slow = Reply(completion("yes"), delay=5)
    server, judge = judge_of(lambda b, _: slow if caption(b) == "slow" else Reply(completion("yes")), timeout=0.4)
    values, counts, seconds = ask(judge, ["a", "slow", "b"])
    assert values == [1.0, None, 1.0] and seconds < 1.5
    assert counts == {"failed": 1.0, "timed_out": 1.0, "no_verdict": 0.0, "retries": 0.0}


def test_an_answer_that_drips_is_cut_too(judge_of):
    drip = Reply(completion("yes"), drip=0.05)  # each byte comes in time, all of them take seconds
    _, judge = judge_of(lambda b, _: drip if caption(b) == "slow" else Reply(completion("yes")), timeout=0.4)
    values, counts, seconds = ask(judge, ["slow", "a"])
    assert values == [None, 1.0] and counts["timed_out"] == 1.0 and seconds < 1.5


def test_eight_calls_of_a_fifth_of_a_second_run_together(judge_of):
    server, judge = judge_of(lambda *_: Reply(completion("yes"), delay=0.2))
    values, _, seconds = ask(judge, ["x"] * 8)
    assert values == [1.0] * 8 and seconds < 1.5 and server.most_open > 4  # one by one: 1.6 s


def test_no_more_calls_are_open_than_allowed(judge_of):
    server, judge = judge_of(lambda *_: Reply(completion("yes"), delay=0.05), concurrency=2)
    assert ask(judge, ["x"] * 8)[0] == [1.0] * 8 and server.most_open == 2


def test_values_stay_with_their_rows(judge_of):
    def respond(body, _):
        number = int(caption(body))
        return Reply(
            completion("yes", {"yes": (number + 1) / 20, "no": 1 - (number + 1) / 20}), delay=0.02 * (number % 3)
        )

    _, judge = judge_of(respond)
    assert ask(judge, [str(n) for n in range(12)])[0] == [pytest.approx((n + 1) / 20) for n in range(12)]


def test_when_all_calls_fail_the_address_and_the_last_status_are_said_without_the_key(judge_of, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    denied = Reply({"error": f"Incorrect key {KEY}"}, status=401)
    server, judge = judge_of(lambda *_: denied, api_key_env="JUDGE_KEY")
    with pytest.raises(ValueError, match=r"all 2 calls to http://127.*/v1/chat/completions failed.*HTTP 401") as raised:
        ask(judge, ["a", "b"])
    assert KEY not in str(raised.value) and "***" in str(raised.value)
    assert len(server.requests) == 2  # a wrong key is wrong the second time, too
    with pytest.raises(ValueError, match="HTTP 401"):
        judge.load()


def test_nobody_at_the_address():
    judge = VLMJudge("http://127.0.0.1:9/v1", "m", max_retries=0)
    with pytest.raises(ValueError, match="127.0.0.1:9.*ConnectionRefusedError"):
        judge.load()


def test_a_redirect_is_not_followed_with_the_key(judge_of, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    other, _ = judge_of(lambda *_: Reply(completion("yes")))
    away = Reply(status=302, headers={"Location": f"{other.url}/v1/chat/completions"})
    _, judge = judge_of(lambda *_: away, api_key_env="JUDGE_KEY")
    with pytest.raises(ValueError, match="HTTP 302"):
        ask(judge, ["x"])
    assert other.requests == []


def test_loading_asks_once_and_learns_about_logprobs(judge_of):
    refuse = Reply({"error": "no logprobs"}, status=422)
    server, judge = judge_of(lambda body, _: refuse if "logprobs" in body else Reply(completion("no")))
    judge.load()
    assert len(server.requests) == 2 and ask(judge, ["x"])[0] == [0.0]


def test_keys_of_the_recipe_replace_and_remove_those_of_the_request(judge_of):
    extra = {"max_tokens": None, "max_completion_tokens": 32, "temperature": 0.5, "logprobs": None}
    server, judge = judge_of(lambda *_: Reply(completion("no")), extra_body=extra)
    assert ask(judge, ["x"])[0] == [0.0]
    _, _, body = server.requests[0]
    assert set(body) == {"model", "messages", "temperature", "max_completion_tokens", "top_logprobs"}
    assert body["max_completion_tokens"] == 32 and body["temperature"] == 0.5


# ------------------------------------------------------------------------------------------------- settings and recipe


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"base_url": "localhost:8000"}, "is no address; write e.g. http://localhost:8000/v1"),
        ({"base_url": "file:///etc/passwd"}, "is no address"),
        ({"base_url": "http://me:secret@host/v1"}, "holds a password"),
        ({"question": "Is it good?"}, r"must contain \{prompt\}"),
        ({"api_key_env": "NO_SUCH_KEY_HERE"}, "'NO_SUCH_KEY_HERE', but this variable is not set; export it"),
        ({"api_key_env": "sk-abcdef"}, "the name of an environment variable"),
        ({"timeout": 0}, "timeout is 0.0; it must be at least"),
        ({"max_retries": -1}, "max_retries is -1"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"extra_body": {"messages": []}}, "extra_body holds messages"),
        ({"extra_body": "x"}, "extra_body is 'x'; write keys and values"),
        ({"yes": ["ok"], "no": ["OK"]}, "each needs words of its own"),
        ({"image_format": "gif"}, "valid: jpeg, png"),
        ({"modle": "x"}, "unknown argument 'modle'.*did you mean 'model'"),
        ({"model": None}, "argument 'model' is None"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_loads(args, message):
    args = {"base_url": "http://localhost:8000/v1", "model": "m"} | args
    with pytest.raises(ValueError, match=message) as raised:
        get_reward_funcs({"name": "vlm_judge", "args": args}, task="t2i", columns=["prompt"])
    assert "sk-abcdef" not in str(raised.value) and "secret@" not in str(raised.value)


def test_a_judged_run_trains_on_its_values_and_logs_its_failures(judge_of, trainer_of):
    def respond(_, number):
        bad = Reply(status=404)
        return bad if number == 3 else Reply(completion("yes", {"yes": (number + 1) / 10, "no": 1 - (number + 1) / 10}))

    server, _ = judge_of(respond)
    args = {"base_url": f"{server.url}/v1", "model": "judge", "concurrency": 1}
    rewards = get_reward_funcs({"name": "vlm_judge", "args": args}, task="t2i", columns=["prompt"])
    trainer = trainer_of(reward_funcs=rewards.funcs)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["rewards/vlm_judge/mean"] == pytest.approx((0.1 + 0.2 + 0.3) / 3, abs=1e-4)
    assert log["rewards/vlm_judge/failed"] == 1.0 and log["grad_norm"] > 0


def test_a_run_whose_judge_never_answers_ends_before_it_trains_on_anything(judge_of, trainer_of):
    server, _ = judge_of(lambda *_: Reply(status=403))
    args = {"base_url": f"{server.url}/v1", "model": "judge"}
    trainer = trainer_of(reward_funcs=get_reward_funcs({"name": "vlm_judge", "args": args}, task="t2i").funcs)
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    with pytest.raises((ValueError, RuntimeError), match="vlm_judge.*all 4 calls to http.*HTTP 403"):
        trainer.train()
    assert trainer.state.global_step == 0 and len(server.requests) == 4
    assert all(bool((a == b).all()) for a, b in zip(weights, trainer.model.parameters()))


def test_a_row_without_a_verdict_does_not_stand_below_its_group(judge_of, trainer_of):
    """Other rewards score it too: counted as 0, a failed call would be the worst of verdicts."""
    server, _ = judge_of(lambda _, n: Reply(status=404) if n == 2 else Reply(completion("yes")))
    spec = {"name": "vlm_judge", "args": {"base_url": f"{server.url}/v1", "model": "judge", "concurrency": 1}}
    rewards = get_reward_funcs([spec, lambda completions: [0.1, 0.2, 0.3, 0.4][: len(completions)]], task="t2i")
    trainer = trainer_of(reward_funcs=rewards.funcs)
    trainer.train()
    advantages = list(trainer._logs["advantages"])
    assert advantages[2] == 0.0 and advantages[0] < 0 < advantages[3]
    assert trainer.state.log_history[0]["reward"] == pytest.approx(1 + (0.1 + 0.2 + 0.4) / 3)
