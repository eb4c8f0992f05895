"""What a stage finds out, on disk as soon as it is known: a stage that is stopped leaves what it had."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

Value = None | bool | int | float | str | Sequence["Value"] | Mapping[str, "Value"]


@dataclass(frozen=True)
class Check:
    """One question with its answer: ``problem`` is None where all was well."""

    name: str
    problem: str | None
    seconds: float


@dataclass
class Record:
    """Facts and checks of one stage, written to ``path`` with each of them."""

    path: Path
    facts: dict[str, Value] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    def fact(self, name: str, value: Value) -> None:
        """Keep a fact; one of the same name is replaced."""
        self.facts[name] = value
        self._write()

    def check(self, name: str, body: Callable[[], object]) -> None:
        """Run a check; whatever it raises is its problem, and the stage goes on."""
        started, problem = time.monotonic(), None
        try:
            body()
        except Exception as error:
            problem = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        self.checks.append(Check(name, problem, round(time.monotonic() - started, 2)))
        self._write()

    def _write(self) -> None:
        """In one step, as the reader may come at any time."""
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps({"facts": self.facts, "checks": [asdict(check) for check in self.checks]}))
        os.replace(draft, self.path)
