"""``python -m integration.gpu.check``: all stages one after the other, one JSON file, a short table."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from integration.gpu.requirements import complaint
from integration.gpu.runner import Stage, StageResult, Status, not_run, run_stage

FORMAT = 1
"""Rises when a reader of the JSON file has to change."""

STAGES = (
    Stage("facts", "integration.gpu.facts", 30, needs_cuda=False),
    Stage("correctness", "integration.gpu.correctness", 200, needs_cuda=False),
    Stage("graphs", "integration.gpu.graphs", 90, needs_cuda=True),
    Stage("races", "integration.gpu.races", 60, needs_cuda=True),
    Stage("timings", "integration.gpu.timings", 60, needs_cuda=True),
    Stage("operators", "integration.gpu.operators", 30, needs_cuda=True),
)
"""In the order in which they run; the limits together are what the check can take: under eight minutes."""

NO_DEVICE = "no CUDA device"


def main(arguments: Sequence[str] | None = None, stages: Sequence[Stage] = STAGES) -> int:
    """Run the check; 0 where every stage passed (in a dry run: or has nothing to do without a GPU)."""
    options = _options(arguments)
    if problem := complaint():
        print(problem, file=sys.stderr)
        return 1
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        results = _run_all(stages, Path(folder), dry_run=options.dry_run)
    report = report_of(results, dry_run=options.dry_run, seconds=time.monotonic() - started)
    options.path.write_text(json.dumps(report, indent=1) + "\n")
    for line in _aims(report):
        print(line)
    print(f"{'passed' if report['passed'] else 'FAILED'} in {report['seconds']:g} s; written to {options.path}")
    return 0 if report["passed"] else 1


def report_of(results: Sequence[StageResult], *, dry_run: bool, seconds: float) -> dict[str, Any]:
    """The content of the JSON file."""
    good = {Status.PASSED, Status.NOT_RUN} if dry_run else {Status.PASSED}
    return {
        "format": FORMAT,
        "dry_run": dry_run,
        "passed": all(result.status in good for result in results),
        "seconds": round(seconds, 1),
        "stages": [asdict(result) for result in results],
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="integration/gpu/check.sh", description="Check kvplugin's kernels on a GPU.")
    parser.add_argument("path", nargs="?", type=Path, default=Path("gpu-check.json"), help="JSON file to write")
    parser.add_argument(
        "--dry-run", action="store_true", help="try the check itself, without a GPU: tiny shapes, interpreted kernels"
    )
    return parser.parse_args(arguments)


def _run_all(stages: Sequence[Stage], folder: Path, *, dry_run: bool) -> list[StageResult]:
    environment = _environment(folder, dry_run=dry_run)
    results: list[StageResult] = []
    has_device = not dry_run
    for stage in stages:
        if not has_device and (stage.needs_cuda or not dry_run):
            result = not_run(stage, NO_DEVICE)
        else:
            result = run_stage(stage, folder, environment, tiny=dry_run)
        # Only the facts hold a card; where they could not be had, the others find out for themselves.
        has_device = has_device and result.facts.get("card", "unknown") is not None
        results.append(result)
        print(_line(result), flush=True)
    return results


def _environment(folder: Path, *, dry_run: bool) -> dict[str, str]:
    """Kernels are compiled anew, once for all stages; a dry run is the same on every machine."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "triton"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return environment | ({"CUDA_VISIBLE_DEVICES": ""} if dry_run else {})


def _line(result: StageResult) -> str:
    checks = f"{sum(not check['problem'] for check in result.checks)} of {len(result.checks)}" if result.checks else "-"
    line = f"{result.name:<12} {result.status:<10} {result.seconds:6.1f} s  checks {checks:<10}"
    return "\n    ".join([line.rstrip(), *result.reason.splitlines()])


def _aims(report: dict[str, Any]) -> list[str]:
    return [
        f"{'met' if aim['met'] else 'missed':<6} {aim['ratio']:.3f} (at most {aim['at_most']:g})  {aim['name']}"
        for stage in report["stages"]
        for aim in stage["facts"].get("aims", [])
    ]


if __name__ == "__main__":
    sys.exit(main())
