"""``python -m integration.quality.markdown REPORT``: the figures of quality.json as the tables of docs/quality.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def page(report: dict[str, Any]) -> str:
    """The claims; then, per length and budget, a table of changes (selections by damages) and one of accuracies."""
    cells: list[dict[str, Any]] = report["cells"]
    sizes = list(dict.fromkeys((cell["length"], cell["budget"]) for cell in cells))
    parts = [_size([cell for cell in cells if (cell["length"], cell["budget"]) == size]) for size in sizes]
    return "\n".join([_claims(report["claims"]), *parts])


def _claims(claims: Sequence[dict[str, Any]]) -> str:
    rows = [[f"{each['claim']} ({each['expected']})", each["verdict"], str(each["cells"])] for each in claims]
    return "\n".join([*_table(["claim", "verdict", "cells"], rows), ""])


def _size(cells: Sequence[dict[str, Any]]) -> str:
    damages = list(dict.fromkeys(cell["damage"] for cell in cells))
    names = list(dict.fromkeys(cell["contestant"] for cell in cells))
    by_case = {(cell["damage"], cell["contestant"]): cell for cell in cells}
    seeds = sorted({cell["seeds"] for cell in cells})
    lines = [f"### {cells[0]['length']} tokens, K = {cells[0]['budget']}, training seeds: {_list(seeds)}", ""]
    lines += ["Accuracy of the indexer's own selection, by task:", ""]
    tasks = list(cells[0]["tasks"])
    lines += _table(
        ["damage", *tasks],
        [[damage, *(_share(by_case[damage, "learned"]["tasks"][task]) for task in tasks)] for damage in damages],
    )
    lines += ["", "Points against it, all tasks, paired by sequence:", ""]
    compared = [name for name in names if name != "learned"]
    lines += _table(
        ["damage", *compared],
        [[damage, *(_points(by_case.get((damage, name))) for name in compared)] for damage in damages],
    )
    return "\n".join([*lines, ""])


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (heading, ["---"] * len(heading), *rows)]


def _share(task: dict[str, Any]) -> str:
    value, low, high = task["accuracy"]
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def _points(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    value, low, high = (100 * each for each in cell["change"])
    text = f"{value:+.1f} ({low:+.1f} to {high:+.1f})"
    # Bold where the sign is beyond doubt.
    return f"**{text}**" if low > 0 or high < 0 else text


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


if __name__ == "__main__":
    print(page(json.loads(Path(sys.argv[1]).read_text())))
