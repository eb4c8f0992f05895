"""Command line: ``python -m integration.tiny_dsa glm52 --out models/tiny-glm52``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from integration.tiny_dsa.checkpoint import write_checkpoint
from integration.tiny_dsa.spec import DEFAULT_INDEX_TOPK, MAX_LAYERS, ModelKind, TinySpec
from kvplugin.errors import ConfigError

EXAMPLES = """
Examples:

  python -m integration.tiny_dsa glm52 --out models/tiny-glm52

  python -m integration.tiny_dsa v32 --out /tmp/v32 --layers 3 --pattern FFS --index-topk 32
"""

app = typer.Typer(add_completion=False)


@app.command(epilog=EXAMPLES)
def main(
    kind: Annotated[ModelKind, typer.Argument(help="Architecture to write.", show_choices=True)],
    out: Annotated[Path, typer.Option(help="Directory to write to; made where missing.")],
    layers: Annotated[int, typer.Option(help=f"Decoder layers, 1 to {MAX_LAYERS}.")] = 6,
    pattern: Annotated[
        str | None,
        typer.Option(help="One F (runs the indexer) or S (shares) a layer.", show_default="FSS repeated"),
    ] = None,
    index_topk: Annotated[
        int | None, typer.Option(help="Tokens the indexer selects a row.", show_default=str(DEFAULT_INDEX_TOPK))
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Write a tiny random checkpoint that vLLM serves (and, for glm52, transformers loads)."""
    try:
        spec = TinySpec(kind, layers, pattern, index_topk, seed)
        write_checkpoint(spec, out)
    except ConfigError as error:
        for problem in error.problems:
            option = "--" + problem.key.replace("_", "-")
            typer.echo(f"{option}: {problem.found}; {problem.cure}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.echo(f"--out: {error.filename or out}: {error.strerror}; give a directory that can be written", err=True)
        raise typer.Exit(2) from None
    size = sum(file.stat().st_size for file in out.iterdir() if file.is_file())
    typer.echo(f"{kind} in {out}: {spec.layers} layers, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    app()
