"""Calls to a JSON service beside the training: in parallel, with a time limit, retries, and a count of what failed.

Standard library only: one thread per open call. No redirect is followed, as it would carry the key to another host.
"""

import asyncio
import base64
import contextvars
import email.utils
import http.client
import io
import json
import os
import random
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

# Answers that may be different a moment later: too many requests, and what servers say while they start or restart.
RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds
MAX_REPLY = 64 * 1024 * 1024  # bytes
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")


class MalformedReply(ValueError):
    """A reply that does not have the promised form."""


class NoVerdict(ValueError):
    """A reply in the right form that does not answer: asking again would cost the same and change nothing."""


class NoAnswer(ValueError):
    """A service that answered none of a step's calls (on one rank; `settle` ends the run if it is so on all)."""

    row = None  # no row of its own: all of them

    def __init__(self, message: str, counts: dict[str, float] | None = None):
        super().__init__(message)
        self.counts = counts or {}


@dataclass
class Call:
    """What came of one call: `value`, or None with the reason in `failure`."""

    value: Any = None
    failure: str | None = None
    retries: int = 0
    timed_out: bool = False
    answered: bool = False  # the service replied in the right form, with or without a usable value


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_args):
        return None


class JsonService:
    """One URL that takes and returns JSON.

    Args:
        reward: Name for messages.
        url: `http://` or `https://` address that the bodies are posted to.
        api_key: Sent as `Authorization: Bearer ...`, and never part of a message.
        timeout: Seconds for one call, from connecting to the last byte; a call that takes longer is not repeated.
        max_retries: Further tries after a refused connection, a malformed reply or one of `RETRIED_STATUS`.
        concurrency: Calls that are open at a time.

    Raises:
        ValueError: An address that is none, a time or number that is too small.
    """

    def __init__(self, reward: str, url: str, api_key: str | None, timeout: float, max_retries: int, concurrency: int):
        address = urllib.parse.urlsplit(url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ValueError(f"reward '{reward}': {url!r} is no address; write e.g. http://localhost:8000/v1.")
        if address.username or address.password:
            raise ValueError(f"reward '{reward}': the address holds a password; give keys by environment variable.")
        for name, value, least in (("timeout", timeout, 0.001), ("concurrency", concurrency, 1)):
            if value < least:
                raise ValueError(f"reward '{reward}': {name} is {value}; it must be at least {least}.")
        if max_retries < 0:
            raise ValueError(f"reward '{reward}': max_retries is {max_retries}; it must be 0 or more.")
        self.reward, self.url = reward, url
        self._key, self._timeout, self._max_retries, self._concurrency = api_key, timeout, max_retries, concurrency
        # A proxy of the environment is for the outside, not for a server on this machine.
        proxy = [urllib.request.ProxyHandler({})] if _LOOPBACK.fullmatch(address.hostname) else []
        self._opener = urllib.request.build_opener(_NoRedirect, *proxy)
        self._random = random.Random()  # its own generator: waiting must not move that of the training

    async def post_all(self, builds: Sequence[Callable[[], dict]], read: Callable[[Any], Any]) -> list[Call]:
        """Post every body, at most `concurrency` at a time.

        Args:
            builds: Functions that make a body (called in the thread that sends it, as encoding pictures takes time).
            read: Turns a decoded reply into the call's value; raises `MalformedReply` (tried again) or `NoVerdict`.

        Returns:
            One `Call` per body, in order; a failed call raises nothing.
        """
        limit = asyncio.Semaphore(self._concurrency)
        # Twice the threads: one that hangs in a name look-up, which has no time limit, must not hold up the others.
        pool = ThreadPoolExecutor(2 * self._concurrency, thread_name_prefix=self.reward)
        try:
            return await asyncio.gather(*(self._call(pool, limit, build, read) for build in builds))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def post(self, build: Callable[[], dict], read: Callable[[Any], Any]) -> Call:
        """One call, without an event loop."""
        # A thread of its own, as this one may already run a loop.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: asyncio.run(self.post_all([build], read))).result()[0]

    async def _call(self, pool, limit: asyncio.Semaphore, build: Callable, read: Callable) -> Call:
        call = Call()
        loop = asyncio.get_running_loop()
        while True:
            async with limit:
                task = loop.run_in_executor(pool, contextvars.copy_context().run, self._try, build, read)
                try:
                    return _succeeded(call, await asyncio.wait_for(task, self._timeout + 0.05))
                except (TimeoutError, asyncio.TimeoutError):
                    call.failure, call.timed_out = f"no answer within {self._timeout:g} s", True
                    return call
                except NoVerdict as error:
                    call.failure, call.answered = str(error), True
                    return call
                except _TryFailed as error:
                    call.failure, wait = self._without_key(str(error)), self._wait(error, call.retries)
            if wait is None:
                return call
            call.retries += 1
            await asyncio.sleep(wait)  # outside the limit: others go on meanwhile

    def _wait(self, error: "_TryFailed", retries: int) -> float | None:
        """Seconds before the next try, or None where there is none."""
        if not error.temporary or retries >= self._max_retries:
            return None
        own = FIRST_WAIT * 2**retries * self._random.uniform(0.75, 1.25)
        return min(error.retry_after if error.retry_after is not None else own, LONGEST_WAIT)

    def _try(self, build: Callable, read: Callable) -> Any:
        end = time.monotonic() + self._timeout
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        body = json.dumps(build()).encode()
        request = urllib.request.Request(self.url, body, headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout) as reply:
                content = _read_until(reply, end)
        except urllib.error.HTTPError as error:
            with error:
                raise _status_failure(error) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise reason from error
            raise _TryFailed(f"{type(reason).__name__}: {reason}", temporary=True) from error
        try:
            return read(json.loads(content))
        except NoVerdict:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # no JSON, or JSON of another form
            shown = content[:200].decode("utf-8", "replace")
            raise _TryFailed(f"malformed reply {shown!r} ({error})", temporary=True) from error

    def _without_key(self, message: str) -> str:
        return message.replace(self._key, "***") if self._key else message


class _TryFailed(Exception):
    def __init__(self, message: str, temporary: bool, retry_after: float | None = None):
        super().__init__(message)
        self.temporary, self.retry_after = temporary, retry_after


def check_some_answered(service: JsonService, calls: Sequence[Call]) -> None:
    """Refuse a step in which the service gave no answer at all: every row unscored would train on nothing.

    Raises:
        NoAnswer: (a ValueError) naming reward, address and the last failure.
    """
    if calls and not any(call.answered for call in calls):
        raise NoAnswer(
            f"reward '{service.reward}': all {len(calls)} calls to {service.url} failed; the last: "
            f"{calls[-1].failure}. Check that the server runs, its address, the model's name and the key.",
            call_counts(calls),
        )


def call_counts(calls: Sequence[Call]) -> dict[str, float]:
    """Counts to be logged, always the same keys: failed calls, those of them cut at the time limit, further tries."""
    return {
        "failed": float(sum(not call.answered for call in calls)),
        "timed_out": float(sum(call.timed_out for call in calls)),
        "no_verdict": float(sum(call.answered and call.value is None for call in calls)),
        "retries": float(sum(call.retries for call in calls)),
    }


def unscored(calls: Sequence[Call]) -> list[int]:
    """Rows whose call failed or gave no value."""
    return [row for row, call in enumerate(calls) if call.value is None]


def data_url(image: Any, image_format: str = "png") -> str:
    """A picture as `data:image/png;base64,...`."""
    buffer = io.BytesIO()
    options = {"compress_level": 1} if image_format == "png" else {"quality": 95}
    image.convert("RGB").save(buffer, image_format.upper(), **options)
    return f"data:image/{image_format};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def read_key(reward: str, variable: str | None) -> str | None:
    """The key in the environment variable of that name; a recipe names the variable and never holds the key.

    Raises:
        ValueError: No name of a variable (perhaps the key itself, which is not repeated), or one that is not set.
    """
    if variable is None:
        return None
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable) or variable.startswith(("sk_", "sk-", "hf_")):
        raise ValueError(
            f"reward '{reward}': api_key_env must be the name of an environment variable, such as OPENAI_API_KEY, and "
            "not the key itself."
        )
    if not os.environ.get(variable):
        raise ValueError(f"reward '{reward}': api_key_env is '{variable}', but this variable is not set; export it.")
    return os.environ[variable]


def _succeeded(call: Call, value: Any) -> Call:
    call.value, call.failure, call.answered = value, None, True
    return call


def _read_until(reply: Any, end: float) -> bytes:
    """The whole body; the time limit of a socket is for each read, that of a call for all of them."""
    parts, length = [], 0
    while part := reply.read1(65536):
        parts.append(part)
        length += len(part)
        if time.monotonic() > end:
            raise TimeoutError
        if length > MAX_REPLY:
            raise _TryFailed(f"a reply of more than {MAX_REPLY} bytes", temporary=False)
    return b"".join(parts)


def _status_failure(error: urllib.error.HTTPError) -> _TryFailed:
    try:
        shown = error.read(200).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException):
        shown = ""
    message = f"HTTP {error.code} {error.reason}" + (f": {shown}" if shown else "")
    return _TryFailed(message, error.code in RETRIED_STATUS, _retry_after(error.headers.get("Retry-After")))


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, which is a number or a date (RFC 9110, 10.2.3); None if it is neither."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
