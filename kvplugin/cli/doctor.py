"""``kvplugin doctor``: is everything in place for the plugin to work here, and if not, what would cure it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from kvplugin import __version__
from kvplugin.checks import Check, Status
from kvplugin.metrics.directory import metrics_directory


@dataclass(frozen=True)
class DoctorReport:
    """All findings, in the order in which they build on each other."""

    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        """True where nothing that is needed is missing."""
        return all(check.status is not Status.FAILED for check in self.checks)


def run_doctor() -> DoctorReport:
    """Look at this process's Python environment; starts no engine and changes nothing."""
    checks = [*_environment_checks(), *_metrics_checks()]
    if find_spec("vllm") is None:
        checks.append(
            Check(
                "vllm",
                Status.FAILED,
                "not installed",
                "install vLLM for your GPU, or for a CPU: pip install 'kvplugin[cpu]'",
            )
        )
    else:
        from kvplugin.vllm.diagnosis import engine_checks

        checks += engine_checks()
    return DoctorReport(tuple(checks))


def render(report: DoctorReport) -> Table:
    """The report as a table."""
    table = Table("check", "status", "found", "cure", title=f"kvplugin {__version__}")
    colours = {Status.OK: "green", Status.NOTE: "yellow", Status.FAILED: "red"}
    for check in report.checks:
        table.add_row(check.name, f"[{colours[check.status]}]{check.status}[/]", check.found, check.cure)
    return table


def doctor(as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON.")) -> None:
    """Check the installation: versions, registration, vLLM's points, metrics directory. Exit 1 if one is missing.

    Examples:  kvplugin doctor  |  kvplugin doctor --json
    """
    report = run_doctor()
    if as_json:
        typer.echo(json.dumps({"healthy": report.healthy, "checks": [asdict(check) for check in report.checks]}))
    else:
        Console().print(render(report))
    if not report.healthy:
        raise typer.Exit(1)


def _environment_checks() -> Iterator[Check]:
    yield Check("python", Status.OK, platform.python_version())
    yield Check("kvplugin", Status.OK, __version__)
    for name, needed, cure in (
        ("torch", True, "pip install torch"),
        ("numba", False, "pip install numba; without it the CPU uses the slower torch form"),
        ("triton", False, "comes with torch's CUDA builds; the CPU engine does not need it"),
    ):
        found, works = _imported(name)
        broken = Status.FAILED if needed else Status.NOTE
        yield Check(name, Status.OK if works else broken, found, "" if works else cure)


def _imported(name: str) -> tuple[str, bool]:
    """Version of a package and whether it can be used; one that is installed and broken says why."""
    try:
        import_module(name)
        return version(name), True
    except PackageNotFoundError:
        return "not installed", False
    except Exception as error:
        return f"cannot be imported: {error}", False


def _metrics_checks() -> Iterator[Check]:
    directory = metrics_directory()
    existing = next(folder for folder in (directory, *directory.parents) if folder.exists())
    usable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    shown = str(directory) if existing == directory else f"{directory} (made when needed)"
    cure = "" if usable else f"make {Path(existing)} writable, or set KVPLUGIN_METRICS_DIR to a directory that is"
    yield Check("metrics directory", Status.OK if usable else Status.FAILED, shown, cure)
