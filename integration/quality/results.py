"""Results on disk: every measured sequence of one model, so that models can be run one at a time and read together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from integration.quality.claims import Judgement
from integration.quality.intervals import CONFIDENCE
from integration.quality.measure import Case, Measured
from integration.quality.summary import Cell

MASS_WARNING = (
    "Attention mass misleads: a selection of the newest tokens keeps much of it and answers nothing. "
    "Judge by accuracy, and by the target hit."
)


def write_found(found: Mapping[Case, Measured], path: Path) -> None:
    """One line a sequence."""
    lines = (json.dumps([list(case), list(asdict(measured).values())]) for case, measured in found.items())
    path.write_text("\n".join(lines) + "\n")


def read_found(paths: Iterable[Path]) -> dict[Case, Measured]:
    """The sequences of several models."""
    pairs = (json.loads(line) for path in paths for line in path.read_text().splitlines())
    return {Case(*case): Measured(*measured) for case, measured in pairs}


def as_json(cells: Iterable[Cell], judgements: Iterable[Judgement]) -> str:
    """The figures as a JSON object; intervals are ``[value, low, high]``."""
    report = {
        "confidence": CONFIDENCE,
        "mass_warning": MASS_WARNING,
        "claims": [_claim(each) for each in judgements],
        "cells": [_cell(cell) for cell in cells],
    }
    return json.dumps(report, indent=1)


def _claim(judgement: Judgement) -> dict[str, Any]:
    against = judgement.against
    return {
        "claim": judgement.claim.text,
        "expected": judgement.claim.expected,
        "verdict": judgement.verdict,
        "cells": judgement.cells,
        "against": against and {**against.place._asdict(), "contestant": against.contestant},
    }


def _cell(cell: Cell) -> dict[str, Any]:
    figures = {name: _rounded(value) for name, value in vars(cell).items() if name not in ("place", "tasks")}
    tasks = {
        task: {"accuracy": _rounded(each.accuracy), "change": _rounded(each.change), "answers": each.answers}
        for task, each in cell.tasks.items()
    }
    return cell.place._asdict() | figures | {"tasks": tasks}


def _rounded(value: object) -> object:
    if isinstance(value, tuple):
        return [round(each, 5) for each in value]
    return round(value, 5) if isinstance(value, float) else value
