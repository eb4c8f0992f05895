"""Command line: ``python -m integration.tiny_dsa.train``: train the tiny model, check it, write its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import load_file

from integration.recipes import MODELS
from integration.tiny_dsa.spec import ModelKind
from integration.tiny_dsa.training.card import accuracy_table, card
from integration.tiny_dsa.training.evaluation import BAR, BAR_LENGTH, accuracies, below_bar
from integration.tiny_dsa.training.export import TRAINED, checkpoint_weights, export, export_committed, load_model
from integration.tiny_dsa.training.recipe import PARKING_STEPS, Recipe, Step, Trained, Watch, park, train

EXAMPLES = """
Examples:

  python -m integration.tiny_dsa.train --seed 1 --seed 2 --seed 3 --out models/trained

  python -m integration.tiny_dsa.train --park models/trained/seed-1

  python -m integration.tiny_dsa.train --export v32 --out models/trained-v32
"""
CARD_LENGTHS = (256, BAR_LENGTH)
WEIGHTS = "model.safetensors"

app = typer.Typer(add_completion=False)


@app.command(epilog=EXAMPLES)
def main(
    out: Annotated[Path, typer.Option(help="Receives a folder per seed (seed-1, …), or the exported form.")] = MODELS
    / "trained",
    seed: Annotated[list[int] | None, typer.Option(min=0, help="Seed; repeat for more.", show_default="1")] = None,
    sink: Annotated[bool, typer.Option(help="Build in a head that rests on <bos> when nothing matches.")] = True,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
    commit: Annotated[bool, typer.Option(help=f"Also write the first seed to {TRAINED.name}/, with its card.")] = False,
    park_from: Annotated[
        Path | None,
        typer.Option(
            "--park", help="Train this checkpoint on until rows with nothing to match rest on <bos>: OUT/parked-1."
        ),
    ] = None,
    export_form: Annotated[
        ModelKind | None,
        typer.Option("--export", help="Train nothing; write the committed checkpoint in this form (glm52 or v32)."),
    ] = None,
) -> None:
    """Train the tiny DSA model on recall and copying, and check that it answers at three budgets.

    Exits with 0 only if every seed answers recall, needle and copy at 1024 tokens for K = 16, 32 and 64.
    """
    console = Console()
    if export_form is not None:
        if not export_form.is_sparse:
            raise typer.BadParameter(f"{export_form} has no indexer; use glm52 or v32", param_hint="'--export'")
        console.print(f"{export_form} in {export_committed(export_form, out)}")
        return
    torch.set_num_threads(threads)
    # Attention that has converged is full of numbers too small for a CPU to be quick with.
    torch.set_flush_denormal(True)
    seeds, missed = seed or [1], 0
    if park_from is not None:
        start = load_model(load_file(park_from / WEIGHTS))
        trained = _watched(PARKING_STEPS, seeds[0], partial(park, start, seeds[0]), console)
        missed = _finish(trained, [out / f"parked-{seeds[0]}"], console)
        raise typer.Exit(1 if missed else 0)
    for index, each in enumerate(seeds):
        recipe = Recipe(seed=each, sink=sink)
        trained = _watched(recipe.steps, each, partial(train, recipe), console)
        missed += _finish(trained, [out / f"seed-{each}", *([TRAINED] if commit and index == 0 else [])], console)
    raise typer.Exit(1 if missed else 0)


def _finish(trained: Trained, places: Sequence[Path], console: Console) -> int:
    """Check and export a model; returns how many figures are below the bar."""
    recipe = trained.recipe
    weights = checkpoint_weights(trained.model)
    # What is checked is what is written: the bf16 weights.
    model = load_model(weights)
    found = accuracies(model, CARD_LENGTHS)
    text = card(recipe, trained.seconds, torch.get_num_threads(), model, found)
    for place in places:
        export(weights, ModelKind.GLM52, place)
        (place / "README.md").write_text(text)
    console.print(accuracy_table(found), highlight=False, markup=False, soft_wrap=True)
    missed = below_bar(found)
    for each in missed:
        console.print(f"below {BAR}: {each.task} at K = {each.budget}: {each.right} of {each.total}", style="red")
    console.print(f"seed {recipe.seed}: {trained.seconds:.0f} s, {places[0]}", highlight=False)
    return len(missed)


def _watched(steps: int, seed: int, work: Callable[[Watch], Trained], console: Console) -> Trained:
    """Train under a progress bar; where there is no terminal, a line a stage remains."""
    columns = (
        TextColumn("seed {task.fields[seed]} {task.fields[stage]:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.2f}  right {task.fields[right]:.2f}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=steps, seed=seed, stage="", loss=0.0, right=0.0)
        smooth = {"stage": "", "loss": 0.0, "right": 0.0}

        def watch(step: Step) -> None:
            if smooth["stage"] != step.stage:
                progress.console.print(f"seed {seed}: {step.stage}", highlight=False)
                smooth.update(stage=step.stage, loss=step.loss, right=step.accuracy)
            smooth["loss"] = 0.9 * float(smooth["loss"]) + 0.1 * step.loss
            smooth["right"] = 0.9 * float(smooth["right"]) + 0.1 * step.accuracy
            progress.update(bar, advance=1, **smooth)

        return work(watch)


if __name__ == "__main__":
    app()
