"""Start the stand-in for vLLM, and see what it leaves behind."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
from stand_in_server import Behaviour

from integration.server import ServerOptions

PROGRAM = Path(__file__).with_name("stand_in_server.py")


@dataclass(frozen=True)
class StandIn:
    """A stand-in for vLLM, and what it left behind."""

    directory: Path

    @property
    def pids(self) -> Path:
        return self.directory / "pids"

    def command(self, behaviour: Behaviour) -> tuple[str, ...]:
        return (sys.executable, str(PROGRAM), str(self.pids), str(behaviour))

    def options(self, behaviour: Behaviour, **changes: object) -> ServerOptions:
        settings = {"ready_within_s": 30.0, "stop_within_s": 0.5} | changes
        return ServerOptions((), self.directory / "log", command=self.command(behaviour), **settings)

    def left_behind(self) -> list[psutil.Process]:
        """Processes that still run; fails if the stand-in never wrote down any."""
        pids = [int(line) for line in self.pids.read_text().split()]
        assert len(pids) >= 3
        running = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        return [process for process in running if process.status() != psutil.STATUS_ZOMBIE]
