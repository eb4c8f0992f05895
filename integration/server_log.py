"""Read a vLLM server's log while it is written: what the server is doing, and why it died."""

from __future__ import annotations

import re
from collections import deque
from enum import StrEnum
from pathlib import Path


class Stage(StrEnum):
    """What a starting server does, in order; the value is what people read."""

    STARTING = "starting"
    CONFIGURING = "reading the model's configuration"
    ENGINE = "starting the engine"
    LOADING = "loading weights"
    PROFILING = "profiling and warming up"
    SERVING = "starting the HTTP server"
    READY = "ready"


# Log lines of vLLM 0.32 that open a stage. A line that moves costs a progress message, nothing else.
_OPENING_LINES = (
    ("non-default args", Stage.CONFIGURING),
    ("Initializing a V1 LLM engine", Stage.ENGINE),
    ("Starting to load model", Stage.LOADING),
    ("Loading weights took", Stage.PROFILING),
    ("Starting vLLM API server", Stage.SERVING),
    ("Starting vLLM server", Stage.SERVING),
)
# An exception's own line, bare or behind vLLM's "(process) ERROR time [place] "; not one that a warning mentions.
_EXCEPTION = re.compile(r"^(?:\([^)]*\) )?(?:ERROR [^\[]*\[[^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception|Mismatch): .*)")


def stage_of(line: str) -> Stage | None:
    """The stage that a log line opens, or ``None``."""
    return next((stage for text, stage in _OPENING_LINES if text in line), None)


def first_exception(log: str) -> str | None:
    """The first exception that a log reports: its class and message.

    A failure deep in the engine is followed by the tracebacks of every process above it, so the log's end names only
    the last of them; the cause stands first.
    """
    return next((found[1] for line in log.splitlines() if (found := _EXCEPTION.match(line))), None)


class LogFollower:
    """Reads the complete lines that were added to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self._file = path.open(encoding="utf-8", errors="replace")
        self._partial = ""

    def new_lines(self) -> list[str]:
        """Lines finished since the last call, without line ends."""
        *lines, self._partial = (self._partial + self._file.read()).split("\n")
        return lines

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def tail(path: Path, lines: int) -> str:
    """The last lines of a log."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return "".join(deque(file, maxlen=lines))
