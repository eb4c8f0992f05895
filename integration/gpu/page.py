"""``python -m integration.gpu.page gpu-check.json``: the result of a check as the tables of docs/gpu-results.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEADINGS = {
    "Machine": ("what", "value"),
    "Stages": ("stage", "result", "seconds", "checks passed", "reason"),
    "Times": ("contestant", "median, µs"),
    "Aims": ("ratio", "found", "at most", ""),
}


def page(report: dict[str, Any]) -> str:
    """The tables of a report, as Markdown."""
    facts = {stage["name"]: stage["facts"] for stage in report["stages"]}
    timings = facts.get("timings", {})
    rows: dict[str, Sequence[Sequence[str]]] = {
        "Machine": [(name, _cell(value)) for name, value in facts.get("facts", {}).items()],
        "Stages": [_stage_row(stage) for stage in report["stages"]],
        "Times": [(name, f"{value:.2f}") for name, value in timings.get("medians_us", {}).items()],
        "Aims": [
            (aim["name"], f"{aim['ratio']:.3f}", f"{aim['at_most']:g}", "met" if aim["met"] else "missed")
            for aim in timings.get("aims", [])
        ],
    }
    notes = {"Times": timings.get("method", "")}
    sections = (_section(title, rows[title], notes.get(title, "")) for title in HEADINGS)
    return "\n".join(sections)


def _stage_row(stage: dict[str, Any]) -> tuple[str, ...]:
    passed = sum(not check["problem"] for check in stage["checks"])
    reason = _cell(stage["reason"].partition("\n")[0])
    return stage["name"], stage["status"], f"{stage['seconds']:.1f}", f"{passed} of {len(stage['checks'])}", reason


def _section(title: str, rows: Sequence[Sequence[str]], note: str) -> str:
    table = [HEADINGS[title], ["---"] * len(HEADINGS[title]), *(rows or [["-"] * len(HEADINGS[title])])]
    lines = [f"### {title}", "", *("| " + " | ".join(row) + " |" for row in table), ""]
    return "\n".join([*lines, f"{note}.", ""] if note else lines)


def _cell(value: object) -> str:
    return "-" if value is None else str(value).replace("|", "\\|")


if __name__ == "__main__":
    print(page(json.loads(Path(sys.argv[1]).read_text())))
