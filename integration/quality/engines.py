"""Run the engine check in a process per engine, and collect what each found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

from integration.quality.agreement import Agreement
from integration.tiny_dsa.spec import ModelKind

RUNS = (
    (ModelKind.GLM52, "learned"),
    (ModelKind.GLM52, "default"),
    (ModelKind.V32, "default"),
    (ModelKind.GLM52, "structure only"),
)


class EngineCheckError(RuntimeError):
    """An engine did not get as far as an answer."""


def check_engines(runs: Sequence[tuple[ModelKind, str]] = RUNS) -> Iterator[Agreement]:
    """One agreement per run.

    Raises:
        EngineCheckError: with the end of the process's output.
    """
    for form, contestant in runs:
        command = [sys.executable, "-m", "integration.quality.engine_check", form, contestant]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            raise EngineCheckError(f"{form}, {contestant}: exit {ended.returncode}\n{ended.stderr[-2000:]}")
        yield Agreement(**json.loads(ended.stdout.splitlines()[-1]))
