"""What every benchmark reports, as a table or as JSON."""

from __future__ import annotations

import io
import json as json_module
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

import torch
from rich.console import Console
from rich.table import Table

Fact = int | float | str


@dataclass(frozen=True)
class BenchReport:
    """Result of one benchmark.

    Attributes:
        title: what was measured.
        medians_ms: median time of each contestant, in milliseconds.
        ratios: ``"a/b"`` = a's median ÷ b's.
        context: shape, settings and machine, by name.
    """

    title: str
    medians_ms: Mapping[str, float]
    ratios: Mapping[str, float]
    context: Mapping[str, Fact]

    @classmethod
    def of(
        cls,
        title: str,
        seconds: Mapping[str, Sequence[float]],
        compared: Sequence[tuple[str, str]],
        shape: Mapping[str, Fact],
    ) -> Self:
        """Summarise the measured ``seconds`` of each contestant; ``compared`` lists the pairs to divide."""
        medians = {name: median(values) * 1e3 for name, values in seconds.items()}
        ratios = {f"{a}/{b}": medians[a] / medians[b] for a, b in compared}
        return cls(title, medians, ratios, {**shape, **machine_facts()})


def machine_facts() -> dict[str, Fact]:
    """What a reader needs to know about the machine to place the times."""
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def render(report: BenchReport, *, json: bool) -> str:
    """The report as text: one JSON object (``medians_ms``, ``ratios`` and the context's own keys), or tables."""
    if json:
        return json_module.dumps(
            {**report.context, "medians_ms": dict(report.medians_ms), "ratios": dict(report.ratios)}, indent=2
        )
    medians = Table("contestant", "median, ms", title=report.title)
    for name, value in report.medians_ms.items():
        medians.add_row(name, f"{value:.3f}")
    ratios = Table("ratio", "value")
    for name, value in report.ratios.items():
        ratios.add_row(name, f"{value:.1f}" if value >= 10 else f"{value:.3f}")
    console = Console(file=io.StringIO(), width=100)
    console.print(medians, ratios, ", ".join(f"{name} {value}" for name, value in report.context.items()), sep="\n")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()
