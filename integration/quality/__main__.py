"""Command line: ``python -m integration.quality``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file

from integration.quality.claims import Verdict, judge
from integration.quality.engines import EngineCheckError, check_engines
from integration.quality.page import page
from integration.quality.plans import quick_plan, whole_plan
from integration.quality.results import as_json, read_found, write_found
from integration.quality.suite import Block, run
from integration.quality.summary import summarise
from integration.quality.tables import WIDTH, claims_table, tables
from integration.recipes import MODELS
from integration.tiny_dsa.training.export import TRAINED, load_model

EXAMPLES = """
Examples:

  python -m integration.quality --quick

  python -m integration.quality --model models/trained/seed-1 --model models/trained/seed-2 --out build/quality
"""
WEIGHTS = "model.safetensors"

app = typer.Typer(add_completion=False)


@app.command(epilog=EXAMPLES)
def main(
    model: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder of a trained checkpoint in GLM form; repeat for more seeds.",
            show_default="models/trained/seed-*, else the committed one",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Receives quality.json, quality.html and each model's sequences.")] = Path(
        "build/quality"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="A small plan for CI: one context length, few damages.")
    ] = False,
    reuse: Annotated[bool, typer.Option("--reuse", help="Do not repeat models whose sequences lie in --out.")] = False,
    engine: Annotated[bool, typer.Option("--engine", help="Also ask through real vLLM and compare.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
) -> None:
    """Measure what policies do to the answers of a trained tiny model, on clean and on damaged indexers.

    Exits with 1 where the figures refute a claim of docs/quality.md, or an engine disagrees with the torch model.
    """
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    console = Console()
    folders = model or sorted(MODELS.glob("trained/seed-*")) or [TRAINED]
    for folder in folders:
        if not (folder / WEIGHTS).is_file():
            raise typer.BadParameter(f"{folder} has no {WEIGHTS}; run 'make train'", param_hint="'--model'")
    out.mkdir(parents=True, exist_ok=True)
    blocks = quick_plan() if quick else whole_plan()
    files = [_sequences(folder, out, blocks, console, reuse) for folder in folders]
    cells = summarise(read_found(files))
    wide = Console(width=max(console.width, WIDTH))
    for table in tables(cells):
        wide.print(table)
    judgements = judge(cells)
    wide.print(claims_table(judgements))
    for name, content in (("quality.json", as_json(cells, judgements)), ("quality.html", page(cells, judgements))):
        (out / name).write_text(content)
        console.print(f"{out / name}", highlight=False)
    refuted = any(each.verdict is Verdict.REFUTED for each in judgements)
    disagree = engine and not _engines_agree(console)
    raise typer.Exit(1 if refuted or disagree else 0)


def _sequences(folder: Path, out: Path, blocks: Sequence[Block], console: Console, reuse: bool) -> Path:
    """The file of one model's sequences, measured where it is not there."""
    path = out / f"{folder.name}.jsonl"
    if reuse and path.exists():
        return path
    loaded = load_model(load_file(folder / WEIGHTS))
    with Progress(console=console) as progress:
        bar = progress.add_task(folder.name, total=sum(block.size for block in blocks))
        write_found(run(blocks, folder.name, loaded, lambda: progress.advance(bar)), path)
    return path


def _engines_agree(console: Console) -> bool:
    agree = True
    try:
        for each in check_engines():
            agree &= each.agrees
            console.print(
                f"vLLM {each.form}, {each.contestant}: {each.same} of {each.tokens} tokens as in torch, "
                f"{each.right} right (torch {each.torch_right}), log-probs within {each.log_prob:.2g}, "
                f"{each.rewritten} rows rewritten",
                highlight=False,
            )
    except EngineCheckError as error:
        console.print(f"engine check failed: {error}", style="red", markup=False)
        return False
    return agree


if __name__ == "__main__":
    app()
