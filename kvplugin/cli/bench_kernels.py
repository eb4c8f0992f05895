"""``kvplugin bench kernels --static``: what can be said about the GPU kernels without a GPU."""

from __future__ import annotations

import io
import json as json_module
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from kvplugin.kernels.static import (
    ARCHITECTURES,
    KernelFacts,
    KernelTraffic,
    kernel_facts,
    kernel_modules,
    kernel_traffic,
)
from kvplugin.remap.groups import GroupLayout
from kvplugin.remap.layouts import layout_from_config

GLM52 = layout_from_config(78, index_topk_freq=4)
"""GLM-5.2's index groups, from its published configuration."""

ABOUT_TRAFFIC = (
    "K = 2048 of 131072 tokens, fp32 scores, default policy. Loaded and stored: what a kernel asks for. Floor: each "
    "element once in and once out. In sectors: the floor in the units of 32 bytes that memory moves; scores gathered "
    "one by one weigh eight times as much. What is asked for twice comes from a cache the second time: table entries "
    "of one page, and the row that the fused kernel has just rewritten."
)
ABOUT_LAUNCHES = "The fused form's launches do both and stand under policy."


class Launches(NamedTuple):
    """Kernel launches of one step that runs every layer once."""

    form: str
    policy: int
    remap: int

    @property
    def total(self) -> int:
        """All of them; in the fused form one launch does both."""
        return self.policy + self.remap


@dataclass(frozen=True)
class KernelsReport:
    """Machine code of every kernel variant, bytes per row, and launches per step."""

    kernels: tuple[KernelFacts, ...]
    traffic: tuple[KernelTraffic, ...]
    launches: tuple[Launches, ...]

    @property
    def in_local_memory(self) -> tuple[KernelFacts, ...]:
        """Variants whose values do not fit the registers: each access then goes through the caches."""
        return tuple(facts for facts in self.kernels if facts.uses_local_memory)


def run_bench_kernels(archs: Sequence[int] = ARCHITECTURES) -> KernelsReport:
    """Compile every kernel variant for every architecture, and count what one row and one step need.

    Raises:
        KernelToolsError: triton is missing, or a variant does not compile.
    """
    return KernelsReport(kernel_facts(kernel_modules(), archs), kernel_traffic(), launches_of(GLM52))


def launches_of(layout: GroupLayout) -> tuple[Launches, ...]:
    """Launches per step with a conversion per layer, a conversion per group, and policy and conversion in one kernel.

    The policy runs where an indexer does, so once a group in every form.
    """
    policies = sum(group.leader is not None for group in layout.groups)
    layers = sum(len(group.layers) for group in layout.groups)
    return (
        Launches("per layer", policies, layers),
        Launches("grouped", policies, layout.conversions),
        Launches("fused", policies, layout.conversions - policies),
    )


def render(report: KernelsReport, *, json: bool) -> str:
    """The report as one JSON object (``kernels``, ``traffic``, ``launches``), or as tables."""
    if json:
        return json_module.dumps(
            {
                "kernels": [asdict(facts) for facts in report.kernels],
                "traffic": [{**asdict(traffic), "ratio": traffic.ratio} for traffic in report.traffic],
                "launches": [{**launches._asdict(), "total": launches.total} for launches in report.launches],
            },
            indent=2,
        )
    output = io.StringIO()
    console = Console(file=output, width=140)
    console.print(_kernels_table(report.kernels))
    console.print("", _traffic_table(report.traffic), ABOUT_TRAFFIC)
    console.print("", _launches_table(report.launches), ABOUT_LAUNCHES)
    return output.getvalue().rstrip()


def _kernels_table(kernels: Sequence[KernelFacts]) -> Table:
    columns = (
        "kernel variant",
        "arch",
        "warps",
        "registers",
        "local bytes",
        "LDL + STL",
        "shared bytes",
        "instructions",
    )
    table = _table(columns, title="kernels, compiled ahead of time")
    for facts in kernels:
        numbers = (facts.warps, facts.registers, facts.local_bytes, facts.local_accesses, facts.shared_bytes)
        style = "red" if facts.uses_local_memory else None
        table.add_row(facts.variant, f"sm_{facts.arch}", *map(str, (*numbers, facts.instructions)), style=style)
    return table


def _traffic_table(traffic: Sequence[KernelTraffic]) -> Table:
    columns = ("kernel", "loaded", "stored", "floor", "asked / floor", "in sectors")
    table = _table(columns, title="bytes per row")
    for entry in traffic:
        bytes_moved = map(str, (entry.loaded, entry.stored, entry.floor))
        table.add_row(entry.name, *bytes_moved, f"{entry.ratio:.3f}", str(entry.in_sectors))
    return table


def _launches_table(launches: Sequence[Launches]) -> Table:
    columns = ("form", "policy", "remap", "total")
    table = _table(columns, title="launches per step, GLM-5.2")
    for entry in launches:
        table.add_row(entry.form, str(entry.policy), str(entry.remap), str(entry.total))
    return table


def _table(columns: Sequence[str], title: str) -> Table:
    """The first column names what a line is about, the others hold its numbers."""
    table = Table(title=title, title_justify="left")
    for position, name in enumerate(columns):
        table.add_column(name, justify="right" if position else "left", no_wrap=True)
    return table
