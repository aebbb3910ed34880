"""The event loop of `async` rewards: one per process, never closed."""

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


def run_until_complete(value: Any) -> Any:
    """The result of a coroutine; any other value is returned as it is.

    All coroutines of a process run on one loop: a client that a reward keeps belongs to the loop of its first call, and
    `asyncio.run` would close that behind it. The loop has a thread of its own, so that this works in notebooks, too.
    """
    if not inspect.iscoroutine(value):
        return value
    return submit(value).result()


def submit(coroutine: Coroutine) -> Future:
    """Start a coroutine on the loop of this process."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop(os.getpid()))


@functools.cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    # By process: a fork has no threads of its parent.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name=f"rewards-{process}").start()
    return loop
