"""Serve a tiny model in the foreground with the plugin on: ``python -m integration.serve``."""

from __future__ import annotations

import sys
import tempfile
from contextlib import closing
from pathlib import Path
from time import sleep as pause
from typing import Annotated

import typer
from rich.console import Console

from integration.recipes import (
    SERVED_NAME,
    cpu_environment,
    model_arguments,
    plugin_arguments,
    require_vllm,
    tiny_model,
)
from integration.server import Server, ServerError, ServerOptions
from integration.server_log import LogFollower
from integration.startup_view import StartupView
from integration.tiny_dsa import ModelKind
from kvplugin.config import Mode

EXAMPLES = """
Examples:

  python -m integration.serve

  python -m integration.serve --kind v32 --mode observe -- --api-server-count 2
"""
_POLL_S = 0.5

app = typer.Typer(add_completion=False)


@app.command(epilog=EXAMPLES)
def main(
    vllm_arguments: Annotated[
        list[str] | None, typer.Argument(help="Further arguments for vLLM, after --.", show_default=False)
    ] = None,
    kind: Annotated[ModelKind, typer.Option(help="Tiny model to serve.")] = ModelKind.GLM52,
    mode: Annotated[Mode, typer.Option(help="Mode of the topology policy.")] = Mode.SPARSE_MERGE,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 = any free one.")] = 8000,
) -> None:
    """Build a tiny model where it is missing and serve it on this machine's CPU until Ctrl-C."""
    errors = Console(stderr=True)
    plugin = plugin_arguments(mode) if kind.is_sparse else ()
    try:
        with tempfile.TemporaryDirectory(prefix="kvplugin-serve-") as directory:
            require_vllm()
            options = ServerOptions(
                arguments=(*model_arguments(tiny_model(kind)), *plugin, *(vllm_arguments or ())),
                log=Path(directory, "server.log"),
                environment=cpu_environment(),
                port=port,
            )
            _serve(options, errors, f"{kind} {mode}" if plugin else kind.value)
    except ServerError as error:
        typer.echo(f"serve failed: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("server stopped", err=True)


def _serve(options: ServerOptions, errors: Console, title: str) -> None:
    with StartupView(errors, title) as view, Server(options, view) as server:
        view.close()
        typer.echo(_try_it(server.url))
        with closing(LogFollower(options.log)) as log:
            while True:
                sys.stderr.writelines(f"{line}\n" for line in log.new_lines())
                server.check_alive()
                pause(_POLL_S)


def _try_it(url: str) -> str:
    body = f'{{"model": "{SERVED_NAME}", "prompt": "The first token", "max_tokens": 32, "temperature": 0}}'
    return f"""
Try it:
  curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'
  curl -s {url}/metrics | grep ^kvplugin_
Stop it with Ctrl-C. The server's log follows.
"""


if __name__ == "__main__":
    app()
