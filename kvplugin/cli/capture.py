"""``kvplugin capture``: writes what one step of a running engine read and computed, for ``kvplugin replay``."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import typer

from kvplugin.config import Mode
from kvplugin.errors import EngineMismatch
from kvplugin.replay import Capture, CaptureFileError, write_capture
from kvplugin.vllm.capture_client import CaptureClient, server_call
from kvplugin.vllm.capture_request import ALL, CHOICES, NEXT, CaptureRequest

COMMAND = "kvplugin capture"
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelOptions:
    """Options that only ``--model`` has; see their help."""

    prompt: Path | None
    tokens: int
    mode: Mode
    dtype: str
    kv_gib: float


def render(folder: Path, capture: Capture) -> str:
    """What lies in the folder now."""
    first = capture.records[0]
    layers = ", ".join(str(record.layer) for record in capture.records)
    lines = [
        f"{folder}: request {first.request}, step {first.step}, {int(first.inputs.kv_seq_lens[0])} tokens, "
        f"positions {first.positions[0]} to {first.positions[-1]}, layers {layers}"
    ]
    if capture.dropped:
        lines.append(f"left out at the size limit: {capture.dropped} layers; raise --limit, or name fewer --layers")
    return "\n".join([*lines, f"look at it with: kvplugin replay {folder}"])


def capture(
    out: Path = typer.Argument(..., help="Folder to write; must not hold a capture."),
    model: Path | None = typer.Option(None, help="Load this checkpoint and run one prompt."),
    url: str | None = typer.Option(None, help="Capture from a server; it needs VLLM_SERVER_DEV_MODE=1."),
    step: str = typer.Option("1", help="Generated tokens that the step sees: 0 the prefill, 1 the first decode step."),
    layers: str = typer.Option(ALL, help="Layers, such as 0,3-5."),
    rows: int = typer.Option(16, min=1, max=4096, help="Query tokens of a prefill to keep, the newest."),
    limit: int = typer.Option(256, min=1, max=4096, help="MiB of tensors at most."),
    request: str = typer.Option("0", help="With --url: a request id, or n for the n-th running request."),
    wait: float = typer.Option(60.0, min=0, help="With --url: seconds until the step must have come."),
    prompt: Path | None = typer.Option(None, exists=True, dir_okay=False, help="With --model: a text file."),
    tokens: int = typer.Option(1024, min=1, help="With --model and no --prompt: tokens of a made-up prompt."),
    mode: Mode = typer.Option(Mode.DISABLED, help="With --model: the policy's mode."),
    dtype: str = typer.Option("float32", help="With --model: auto, float32, bfloat16 or float16."),
    kv_gib: float = typer.Option(1.0, min=0.001, help="With --model: GiB for the KV cache."),
) -> None:
    """Capture one step of one request: queries, KV pages, selections, output. No prompt text, no token ids.

    Examples:  kvplugin capture out --model models/tiny --step 5  |  kvplugin capture out --url http://localhost:8000
    """
    if (model is None) == (url is None):
        raise typer.BadParameter("give one of --model PATH and --url URL", param_hint="--model, --url")
    if (out / "manifest.json").exists():
        raise CaptureFileError(str(out), "already holds a capture", "choose an empty folder")
    fields = {
        "request": int(request) if request.isdecimal() or url is None else request,
        "step": _step(step, offline=url is None),
        "layers": _layers(layers),
        "rows": rows,
        "limit": limit << 20,
    }
    wanted = CaptureRequest.parse(json.dumps(fields))
    if url is not None:
        found = from_server(url, wanted, wait)
    else:
        assert model is not None
        found = _from_model(model, wanted, ModelOptions(prompt, tokens, mode, dtype, kv_gib))
    write_capture(found, out, limit << 20)
    typer.echo(render(out, found))


def from_server(url: str, wanted: CaptureRequest, wait: float) -> Capture:
    """A capture from a running server.

    Raises:
        ArgumentError: the engine refuses the request.
        CaptureFailed: nothing was captured in time.
        EngineMismatch: the server cannot capture.
    """
    client = CaptureClient(server_call(url))
    client.arm(wanted)
    try:
        client.wait(wait)
        return client.fetch()
    finally:
        client.disarm()


def _from_model(model: Path, wanted: CaptureRequest, options: ModelOptions) -> Capture:
    if options.dtype not in DTYPES:
        raise typer.BadParameter(f"got {options.dtype!r}; use {', '.join(DTYPES)}", param_hint="--dtype")
    if not (model / "config.json").is_file():
        raise typer.BadParameter(f"{model} has no config.json; give a checkpoint's folder", param_hint="--model")
    if find_spec("vllm") is None:
        raise EngineMismatch(COMMAND, "vLLM is not installed", "pip install 'kvplugin[cpu]' on a CPU")
    # Only the result belongs on standard output.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from kvplugin.vllm.capture_offline import OfflineRun, run_offline

    assert isinstance(wanted.step, int)
    return run_offline(OfflineRun(model, step=wanted.step, **vars(options)), wanted)


def _step(text: str, *, offline: bool) -> int | str:
    if text.isdecimal():
        return int(text)
    if text == NEXT and not offline:
        return NEXT
    allowed = "a number from 0 on" if offline else CHOICES["step"]
    raise typer.BadParameter(f"got {text!r}; use {allowed}", param_hint="--step")


def _layers(text: str) -> str | tuple[int, ...]:
    if text == ALL:
        return ALL
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()) or part.strip().endswith("-"):
            raise typer.BadParameter(f"got {text!r}; use {ALL}, or numbers such as 0,3-5", param_hint="--layers")
        found += range(int(first), int(last or first) + 1)
    if not found:
        raise typer.BadParameter(f"got {text!r}, which names no layer", param_hint="--layers")
    return tuple(dict.fromkeys(found))
