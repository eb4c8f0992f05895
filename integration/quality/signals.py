"""``python -m integration.quality.signals``: which online signal shows which damage, and after how many values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file

from integration.quality.damage import Damage, damages
from integration.quality.signal_power import Power, power
from integration.quality.signal_tables import Study, over_models, table
from integration.quality.signal_values import BUDGET, LENGTH, Run, runs_under
from integration.tiny_dsa.training.export import TRAINED, load_model
from integration.tiny_dsa.training.model import TinyModel
from kvplugin.topology.signals import Signal

HEALTHY_RUNS, DAMAGED_RUNS = 50, 16
app = typer.Typer(add_completion=False)


@app.command(epilog="Example: python -m integration.quality.signals --out build/quality/signals.json")
def main(
    model: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a trained checkpoint in GLM form; repeat.", show_default="the committed one"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Receives the figures as JSON.")] = Path("build/quality/signals.json"),
    runs: Annotated[int, typer.Option(min=2, help="Healthy requests, none of whose windows may raise an alarm.")] = (
        HEALTHY_RUNS
    ),
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
) -> None:
    """Compare each damage with healthy requests, signal by signal; the policy is the default one."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    console = Console(width=150)
    studies = {}
    for folder in model or [TRAINED]:
        found = study(load_model(load_file(folder / "model.safetensors")), runs)
        console.print(table(folder.name, found, runs))
        studies[folder.name] = found
    if len(studies) > 1:
        console.print(over_models(studies))
    facts = {
        name: {damage: {signal: each._asdict() for signal, each in found.items()} for damage, found in study.items()}
        for name, study in studies.items()
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"length": LENGTH, "budget": BUDGET, "healthy_runs": runs, "models": facts}, indent=1))


def study(model: TinyModel, runs: int) -> Study:
    """Every damage against the same healthy requests; texts of damaged ones are others."""
    clean, *others = damages()
    healthy = list(runs_under(model, clean, runs, first_seed=1))
    # A second set of healthy requests: what is found here is chance.
    others = [Damage("none (A/A)"), *others]
    return {
        damage.name: _compare(healthy, list(runs_under(model, damage, DAMAGED_RUNS, first_seed=2)))
        for damage in track(others, "damages", console=Console(stderr=True))
    }


def _compare(healthy: list[Run], damaged: list[Run]) -> dict[str, Power]:
    found = {signal: power([r[signal] for r in healthy], [r[signal] for r in damaged]) for signal in Signal}
    return {signal.name.lower(): each for signal, each in found.items() if each is not None}


if __name__ == "__main__":
    app()
