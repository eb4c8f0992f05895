"""Stop a process together with everything it started, whatever those processes did to their parents and groups."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from types import FrameType

import psutil

MARKER = "KVPLUGIN_PROCESS_FAMILY"
"""Environment variable that marks a family of processes."""

_TERMINATING = (signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.05

ORPHANS_S = 2.0
"""Seconds that the rest of a family may take once its leader is gone."""


def family(leader: int, marker: str) -> list[psutil.Process]:
    """The running processes of a leader's session, and those whose environment holds ``MARKER=marker``.

    Neither sign is enough: a process may leave the session, and one that sets its title (vLLM's engine and workers do)
    overwrites its visible environment. Parents say nothing, orphans get a new one. Zombies are not counted.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                continue
            if os.getsid(process.pid) == leader or process.environ().get(MARKER) == marker:
                found.append(process)
    return found


def stop_family(leader: subprocess.Popen[bytes], marker: str, grace_s: float) -> None:
    """Interrupt a family as Ctrl-C would, and kill what is left of it; returns when nothing is.

    The whole group gets the SIGINT: a starting vLLM server does not react to a signal to itself alone.

    Args:
        leader: first process of the family; it must have been started in a session of its own.
        marker: the family's mark.
        grace_s: seconds the leader may take.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        leader.wait(grace_s)
    # With its leader gone nobody stops the rest; only those that clean up after it (shared memory) end by themselves.
    deadline = time.monotonic() + ORPHANS_S
    while family(leader.pid, marker) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    # A process that starts another one while it is looked for may hide it for one round.
    while left := family(leader.pid, marker):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)
    leader.wait()


@contextlib.contextmanager
def exit_on_termination() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into ``SystemExit(128 + signal)``, so that context managers clean up.

    Does nothing outside the main thread, or for a signal that the program already handles.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled({number: leave for number in _TERMINATING if signal.getsignal(number) is signal.SIG_DFL}):
        yield


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Let Ctrl-C and termination wait for the end of the block: half a start or half a stop leaves processes behind."""
    pending: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        pending.append(number)

    with _handled(dict.fromkeys((signal.SIGINT, *_TERMINATING), keep)):
        yield
    for number in pending[:1]:
        signal.raise_signal(number)


@contextlib.contextmanager
def _handled(handlers: dict[signal.Signals, signal._HANDLER]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
