"""SIGTERM: the run finishes its step, saves and ends with exit status 0, and says how to go on."""

import ctypes
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

RESUME = "--resume_from_checkpoint"
PR_SET_PDEATHSIG = 1  # of prctl(2)


class Stop:
    """Whether this process was asked to end."""

    requested = False

    def request(self, *_) -> None:
        """The signal handler."""
        self.requested = True


@contextmanager
def stop_on_sigterm() -> Iterator[Stop]:
    """While inside, SIGTERM is noted instead of ending the process. In another than the main thread: no effect."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, stop.request)
    if any("accelerate" in word for word in _parent_words()):
        _end_with_parent()
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def _end_with_parent() -> None:
    """Get SIGTERM when the launcher dies: with one process, `accelerate launch` does not pass its own on (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def resume_command(module: str, argv: list[str], processes: int = 1, parent: list[str] | None = None) -> str:
    """The command line that goes on with a run.

    Args:
        module: of the script, e.g. `janus_trl.scripts.grpo`.
        argv: its arguments.
        processes: of the run.
        parent: words of the command that started this process; read from the system if None.
    """
    parent = _parent_words() if parent is None else parent
    at = parent.index(module) if module in parent else 0
    if at > 1 and parent[at - 1] == "-m":  # a launcher, which gave its last words to this process
        prefix = parent[: at - 1]
    elif processes > 1:
        prefix = ["accelerate", "launch", "--num_processes", str(processes)]
    else:
        prefix = [sys.executable]
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith(f"{RESUME}=") else [word])]
    kept = [word for i, word in enumerate(words) if word != RESUME and (i == 0 or words[i - 1] != RESUME)]
    return shlex.join([*prefix, "-m", module, *kept, RESUME, "true"])


def _parent_words() -> list[str]:
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # not Linux
        return []
    return [word for word in words if word]
