"""A vision-language model as judge, behind any OpenAI-compatible chat endpoint: vLLM, SGLang, or a hosted one."""

import functools
import logging
import math
import re
import string
from collections.abc import Sequence
from typing import Any, Literal

from janus_trl.rewards.calling import Scores
from janus_trl.rewards.http_calls import (
    Call,
    JsonService,
    MalformedReply,
    NoVerdict,
    call_counts,
    check_some_answered,
    data_url,
    read_key,
    unscored,
)

logger = logging.getLogger(__name__)

QUESTION = 'Does this picture show "{prompt}" correctly and completely? Answer with yes or no only.'
TOP_LOGPROBS = 20  # the most that the interface allows


class VLMJudge:
    """P(yes) / (P(yes) + P(no)) of the judge's answer to a question about picture and caption, from 0 to 1.

    The probabilities are summed over all spellings of both words among the first 20 candidates of the token at which
    the judge gives its verdict. Where the server gives no log-probabilities, or the verdict is a word of several
    tokens, the verdict itself is 1 or 0. A call that fails for good (after retries, or at the time limit) and an answer
    without a verdict are None: the row is not trained on, whatever other rewards say, and counted in
    `rewards/<name>/failed`, `/timed_out`, `/no_verdict`, `/retries`. A step in which every call fails ends the run.

    Args:
        base_url: Address of the server up to `/v1`; `/chat/completions` is added.
        model: Name of the model there.
        question: What is asked; `{prompt}` is the row's caption.
        api_key_env: Name of the environment variable that holds the key; None for servers without.
        use_logprobs: Ask for log-probabilities; a server that refuses them is asked without from then on.
        max_tokens: Length of the answer; more for a judge that thinks before it answers (`</think>` ends that).
        yes, no: Words of the verdict, compared without case.
        image_format: `png` (exact) or `jpeg` (smaller).
        concurrency, timeout, max_retries: Calls at a time; seconds for one try; further tries, after 0.5, 1, 2, ...
            seconds or what `Retry-After` says.
        extra_body: Further keys of the request; they replace those above, and a value of None removes one (e.g.
            `{max_tokens: null, max_completion_tokens: 8}`).

    Raises:
        ValueError: An address that is none, a template without `{prompt}`, a key in place of its variable's name, a
            variable that is not set, words that are both yes and no, numbers out of range, `messages` in extra_body.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        question: str = QUESTION,
        api_key_env: str | None = None,
        use_logprobs: bool = True,
        max_tokens: int = 8,
        yes: list[str] = ["yes"],  # noqa: B006  (never changed)
        no: list[str] = ["no"],  # noqa: B006
        image_format: Literal["png", "jpeg"] = "png",
        concurrency: int = 16,
        timeout: float = 60.0,
        max_retries: int = 3,
        extra_body: dict | None = None,
    ):
        check_question(question)
        self._words = _verdict_words(yes, no)
        if max_tokens < 1:
            raise ValueError(f"reward 'vlm_judge': max_tokens is {max_tokens}; it must be at least 1.")
        if not isinstance(extra_body, dict | None):
            raise ValueError(f"reward 'vlm_judge': extra_body is {extra_body!r:.60}; write keys and values.")
        if "messages" in (extra_body or {}):
            raise ValueError(
                "reward 'vlm_judge': extra_body holds messages, which are picture and `question`; set that."
            )
        url = base_url.rstrip("/")
        url += "" if url.endswith("/chat/completions") else "/chat/completions"
        key = read_key("vlm_judge", api_key_env)
        self._service = JsonService("vlm_judge", url, key, timeout, max_retries, concurrency)
        self._model, self._question, self._max_tokens = model, question, max_tokens
        self._format, self._use_logprobs, self._extra_body = image_format, use_logprobs, extra_body or {}

    async def __call__(self, prompts: list[str], generated_images: list, **columns: Any) -> Scores:
        """One value per row; `prompts` are the captions, `generated_images` RGB PIL pictures.

        Raises:
            NoAnswer: (a ValueError) every call failed.
        """
        calls = await self._ask(prompts, generated_images)
        check_some_answered(self._service, calls)
        return Scores([call.value for call in calls], counts=call_counts(calls), failed=unscored(calls))

    def load(self) -> None:
        """Ask once about a blank picture, so that a wrong address, model or key shows before the first rollout.

        Raises:
            NoAnswer: (a ValueError) the call failed.
        """
        from PIL import Image

        build = functools.partial(self._body, "a blank picture", Image.new("RGB", (64, 64), "white"))
        call = self._service.post(build, self._read)
        if self._refused_logprobs([call]):
            call = self._service.post(build, self._read)
        check_some_answered(self._service, [call])

    async def _ask(self, prompts: Sequence[str], images: Sequence[Any]) -> list[Call]:
        builds = [functools.partial(self._body, *row) for row in zip(prompts, images, strict=True)]
        calls = await self._service.post_all(builds, self._read)
        if self._refused_logprobs(calls):
            calls = await self._service.post_all(builds, self._read)
        return calls

    def _refused_logprobs(self, calls: list[Call]) -> bool:
        """Whether the server takes no request for log-probabilities; then they are left out from now on."""
        refused = self._use_logprobs and calls and all("logprobs" in (call.failure or "").lower() for call in calls)
        if refused and all((call.failure or "").startswith("HTTP 4") for call in calls):
            logger.warning("reward 'vlm_judge': no log-probabilities (%s); verdicts count 1 or 0.", calls[0].failure)
            self._use_logprobs = False
            return True
        return False

    def _body(self, prompt: str, image: Any) -> dict:
        content = [
            {"type": "image_url", "image_url": {"url": data_url(image, self._format)}},
            # Not `format`: braces in a caption or in the question are text.
            {"type": "text", "text": self._question.replace("{prompt}", prompt)},
        ]
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self._max_tokens,
            "temperature": 0,
        }
        body |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS} if self._use_logprobs else {}
        return {name: value for name, value in (body | self._extra_body).items() if value is not None}

    def _read(self, reply: dict) -> float:
        choice = reply["choices"][0]
        text = choice["message"]["content"]
        if not isinstance(text, str):
            raise MalformedReply(f"content is {text!r:.40}")
        found = find_verdict(text, self._words)
        if found is None:
            raise NoVerdict(f"no verdict in {text[-80:]!r}")
        position, verdict = found
        probability = yes_probability((choice.get("logprobs") or {}).get("content"), position, self._words, verdict)
        return float(verdict) if probability is None else probability


def find_verdict(text: str, words: dict[str, bool]) -> tuple[int, bool] | None:
    """Where `text` says yes or no, and which; None if it does not, or says both.

    The first word of the answer counts; else the word after "answer:" or "verdict is", or in `\\boxed{}`; else the only
    one of both that is said. What comes before `</think>` is no answer.
    """
    start = text.rfind("</think>") + len("</think>") if "</think>" in text else 0
    spelled = "|".join(sorted(map(re.escape, words), key=len, reverse=True))
    word = re.compile(rf"(?<!\w)(?:{spelled})(?!\w)", re.I)
    first = re.compile(r"[\s*_\"'`(\[]*").match(text, start).end()
    if match := word.match(text, first):
        return match.start(), words[match[0].casefold()]
    cue = re.compile(
        rf"(?:\b(?:answer|verdict|judgment)\b[\s*_]*(?:is|:)|\\boxed\{{)[\s*_\"'`:(]*({word.pattern})", re.I
    )
    found = list(cue.finditer(text, start))
    if found:
        return found[-1].start(1), words[found[-1][1].casefold()]
    said = list(word.finditer(text, start))
    verdicts = {words[match[0].casefold()] for match in said}
    return (said[-1].start(), verdicts.pop()) if len(verdicts) == 1 else None


def yes_probability(tokens: Any, position: int, words: dict[str, bool], verdict: bool) -> float | None:
    """P(yes) / (P(yes) + P(no)) at the token that covers character `position` of the answer; None without candidates.

    A candidate counts if it is one of the words, without case, spaces and punctuation. None as well if the token itself
    is not the verdict: a part of a word ("in" of "incorrect", beside the candidate "correct"), or a token of a thought
    that the server keeps out of the text.

    Raises:
        MalformedReply: Candidates without token or log-probability.
    """
    end = 0
    for token in tokens or []:
        end += len(token["token"])
        if end > position:
            if words.get(_bare(token["token"])) is not verdict:
                return None
            mass = {True: 0.0, False: 0.0}
            for candidate in token.get("top_logprobs") or []:
                word = _bare(candidate["token"])
                if word in words:
                    mass[words[word]] += math.exp(min(float(candidate["logprob"]), 0.0))
            total = mass[True] + mass[False]
            if math.isnan(total):
                raise MalformedReply("a log-probability is NaN")
            return mass[True] / total if total > 0 else None
    return None


def check_question(question: str) -> None:
    """Refuse a template without a place for the caption."""
    if "{prompt}" not in question:
        raise ValueError(
            f"reward 'vlm_judge': question is {question!r:.80}; it must contain {{prompt}}, the place of the caption."
        )


def _bare(word: str) -> str:
    # Tokenizers mark a leading space as a space, "Ġ" or "▁".
    return word.strip(string.whitespace + string.punctuation + "Ġ▁").casefold()


def _verdict_words(yes: Sequence[str], no: Sequence[str]) -> dict[str, bool]:
    words = {_bare(word): False for word in no} | {_bare(word): True for word in yes}
    if not yes or not no or "" in words or set(map(_bare, yes)) & set(map(_bare, no)):
        raise ValueError(f"reward 'vlm_judge': yes is {yes!r} and no is {no!r}; each needs words of its own.")
    return words
