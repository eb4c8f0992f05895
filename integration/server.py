"""Run a real vLLM API server for the length of a ``with`` block."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import httpx

from integration.processes import MARKER, deferred_signals, exit_on_termination, stop_family
from integration.server_log import LogFollower, Stage, first_exception, stage_of, tail

HOST = "127.0.0.1"
VLLM_SERVER = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
_POLL_S = 0.2
_TAIL_LINES = 25


class ServerError(RuntimeError):
    """The server could not be started, or died."""


class Progress(NamedTuple):
    """What a starting server does, and the seconds since it was started."""

    stage: Stage
    elapsed_s: float


@dataclass(frozen=True)
class ServerOptions:
    """How to start a server.

    Attributes:
        arguments: command line after ``command``, without host and port.
        log: file that receives the server's output; replaced.
        environment: variables on top of this process's own.
        port: 0 = any free one.
        ready_within_s: seconds until the server must answer.
        stop_within_s: seconds it may take to stop by itself before it is killed.
        command: program; a stand-in for tests.
    """

    arguments: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    ready_within_s: float = 240.0
    stop_within_s: float = 10.0
    command: tuple[str, ...] = VLLM_SERVER


class Server:
    """A server with everything it starts; nothing of it is left after the ``with`` block, however the block ends.

    SIGTERM and SIGHUP end the block as Ctrl-C does. Only a SIGKILL of this very process leaves the server running.

    Raises:
        ServerError: on entry, with the end of the log, when the server dies, or is not ready in time.
    """

    def __init__(self, options: ServerOptions, on_progress: Callable[[Progress], None] = lambda progress: None) -> None:
        self._options = options
        self._on_progress = on_progress
        self._marker = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._resources = contextlib.ExitStack()
        self.port = options.port

    @property
    def url(self) -> str:
        """Base address, without a trailing slash."""
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as resources:
            resources.enter_context(exit_on_termination())
            resources.callback(self._stop)
            self._start()
            self._wait_until_ready()
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def check_alive(self) -> None:
        """Raise ``ServerError`` with the end of the log if the server has ended."""
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            raise self._failure(f"the server ended with {_exit_words(status)}")

    def _start(self) -> None:
        self.port = _reserve_port(self._options.port)
        command = [*self._options.command, "--host", HOST, "--port", str(self.port), *self._options.arguments]
        environment = {**os.environ, **self._options.environment, MARKER: self._marker}
        with deferred_signals(), self._options.log.open("wb") as log:
            # An own session keeps the terminal's Ctrl-C away: this process decides when the server stops.
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _wait_until_ready(self) -> None:
        started, stage = time.monotonic(), Stage.STARTING
        with contextlib.closing(LogFollower(self._options.log)) as log:
            while not self._answers():
                self.check_alive()
                elapsed = time.monotonic() - started
                if elapsed > self._options.ready_within_s:
                    raise self._failure(f"the server was not ready after {elapsed:.0f} s, still {stage}")
                stage = next(filter(None, map(stage_of, reversed(log.new_lines()))), stage)
                self._on_progress(Progress(stage, elapsed))
                time.sleep(_POLL_S)
        self._on_progress(Progress(Stage.READY, time.monotonic() - started))

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).is_success
        except httpx.TransportError:
            return False

    def _failure(self, what: str) -> ServerError:
        log = self._options.log.read_text(encoding="utf-8", errors="replace")
        cause = first_exception(log)
        first = f"\nfirst error: {cause}" if cause else ""
        return ServerError(f"{what}{first}\nend of its log:\n{tail(self._options.log, _TAIL_LINES)}")

    def _stop(self) -> None:
        if self._process is not None:
            with deferred_signals():
                stop_family(self._process, self._marker, self._options.stop_within_s)


def _reserve_port(port: int) -> int:
    """A port that is free now: the given one, or any for 0."""
    with socket.socket() as probe:
        # Without this, connections that a former server closed keep its port busy for a minute.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ServerError(f"port {port} cannot be used: {error.strerror}; choose another, or 0 for any") from None
        return int(probe.getsockname()[1])


def _exit_words(status: int) -> str:
    return f"exit code {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
