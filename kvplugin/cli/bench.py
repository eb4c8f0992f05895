"""``kvplugin bench``: how long the parts take on this machine, and what the GPU kernels need of one."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvplugin.cli import bench_kernels
from kvplugin.cli.bench_policy import LEAST_REPEATS, BenchPolicyRequest, Structure, run_bench_policy
from kvplugin.cli.bench_remap import LEAST_REPEATS as LEAST_REMAP_REPEATS
from kvplugin.cli.bench_remap import BenchRemapRequest, run_bench_remap
from kvplugin.cli.bench_replay import BenchReplayRequest, run_bench_replay
from kvplugin.cli.bench_report import BenchReport, Fact, render
from kvplugin.config import Eviction
from kvplugin.errors import ArgumentError, EngineMismatch
from kvplugin.kernels.static import ARCHITECTURES

if TYPE_CHECKING:
    from kvplugin.vllm.bench_engine import EngineBench

app = typer.Typer(no_args_is_help=True, help="Measure the parts of kvplugin on this machine.")


@app.command("policy")
def policy(
    rows: int = typer.Option(128, min=1, help="Query tokens in the call."),
    width: int = typer.Option(2048, min=1, help="Slots per row (K)."),
    length: int = typer.Option(8192, min=1, help="Visible tokens per row (L)."),
    eviction: Eviction = typer.Option(Eviction.LOWEST_SCORE, help="Which learned tokens make room."),
    structure: Structure = typer.Option(Structure.DEFAULT, help="How much structure needs room."),
    repeats: int = typer.Option(9, min=LEAST_REPEATS, help="Timings of each contestant; the median counts."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Time one call of the topology policy in its reference, torch and numba forms, and a plain copy of the buffer.

    Examples:  kvplugin bench policy  |  kvplugin bench policy --structure wide --json
    """
    request = BenchPolicyRequest(rows, width, length, eviction, structure, repeats)
    try:
        report = run_bench_policy(request)
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--structure, --width") from None
    typer.echo(render(report, json=as_json))


@app.command("remap")
def remap(
    rows: int = typer.Option(512, min=1, help="Query tokens in the call."),
    width: int = typer.Option(2048, min=1, help="Slots per row (K)."),
    length: int = typer.Option(8192, min=1, help="Tokens of each request."),
    layers: int = typer.Option(4, min=1, help="Layers of the index group."),
    block_size: int = typer.Option(64, min=1, help="Tokens per block of the KV pool."),
    repeats: int = typer.Option(9, min=LEAST_REMAP_REPEATS, help="Timings of each contestant; the median counts."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Time the remap of one index group: in one call, in a call per layer, behind the policy and fused with it.

    Beside them, a plain copy of what it writes.

    Examples:  kvplugin bench remap  |  kvplugin bench remap --rows 1 --layers 8 --json
    """
    report = run_bench_remap(BenchRemapRequest(rows, width, length, layers, block_size, repeats))
    typer.echo(render(report, json=as_json))


@app.command("kernels")
def kernels(
    static: bool = typer.Option(False, "--static", help="Look at the machine code; needs no GPU. Must be given."),
    arch: list[int] = typer.Option(ARCHITECTURES, help="Compute capability to compile for, such as 90; repeatable."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Compile every GPU kernel for every architecture and show registers, memory and instructions, without a GPU.

    Also the bytes that one row moves, and the launches of one step. Exit status 1 where a kernel needs local memory.

    Examples:  kvplugin bench kernels --static  |  kvplugin bench kernels --static --arch 90 --json
    """
    if not static:
        raise typer.BadParameter(
            "not given, and kernels are not timed, on no machine; give --static to compile them and show registers, "
            "memory, instructions, bytes per row and launches per step, without a GPU",
            param_hint="--static",
        )
    for each in arch:
        if each not in ARCHITECTURES:
            known = ", ".join(map(str, ARCHITECTURES))
            raise typer.BadParameter(f"{each} is not known; use {known}", param_hint="--arch")
    report = bench_kernels.run_bench_kernels(arch)
    typer.echo(bench_kernels.render(report, json=as_json))
    if report.in_local_memory:
        names = ", ".join(f"{facts.variant} (sm_{facts.arch})" for facts in report.in_local_memory)
        typer.echo(f"error: kernels that need local memory: {names}", err=True)
        raise typer.Exit(1)


@app.command("replay")
def replay(
    context: int = typer.Option(32768, min=1, help="Cached tokens."),
    kv_heads: int = typer.Option(8, min=1, help="Heads of the KV cache."),
    group: int = typer.Option(4, min=1, help="Query heads per KV head."),
    dim: int = typer.Option(128, min=2, help="Elements per head."),
    page: int = typer.Option(64, min=1, help="Tokens per page."),
    repeats: int = typer.Option(9, min=LEAST_REPEATS, help="Timings of each contestant; the median counts."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Time the replay of one query: reconstruction beside a loop, a whole comparison beside one dense attention.

    Examples:  kvplugin bench replay  |  kvplugin bench replay --context 8192 --json
    """
    try:
        request = BenchReplayRequest(context, kv_heads, group, dim, page, repeats)
    except ArgumentError as error:
        raise typer.BadParameter(f"{error.found}; {error.allowed}", param_hint=error.where.split()[-1]) from None
    report = run_bench_replay(request)
    typer.echo(render(report, json=as_json))


@app.command("engine")
def engine(
    model: Path | None = typer.Option(
        None, exists=True, file_okay=False, help="DSA checkpoint; default a small random GLM-5.2 made for the run."
    ),
    requests: int = typer.Option(8, min=1, help="Requests that decode side by side."),
    context: int = typer.Option(1024, min=1, help="Prompt tokens of each request."),
    index_topk: int = typer.Option(256, min=1, help="Tokens the indexer selects a row."),
    steps: int = typer.Option(100, min=7, help="Decode steps of each contestant."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Time decode steps of one real engine: the policy off, on, exported, and with signals, by turns.

    Examples:  kvplugin bench engine  |  kvplugin bench engine --requests 16 --context 2048 --json
    """
    if find_spec("vllm") is None:
        raise EngineMismatch("kvplugin bench engine", "vLLM is not installed", "pip install 'kvplugin[cpu]' on a CPU")
    # Only the report belongs on standard output.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from kvplugin.vllm.bench_engine import EXPORTED, OFF, ON, SIGNALS, EngineBench, run

    bench = EngineBench(model, requests, context, index_topk, steps)
    compared = [(ON, OFF), (EXPORTED, ON), (SIGNALS, ON)]
    report = BenchReport.of("decode step, one engine", run(bench), compared, _engine_shape(bench))
    typer.echo(render(report, json=as_json))


def _engine_shape(bench: EngineBench) -> dict[str, Fact]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(bench).items() if value}
