"""``kvplugin capture``: options, exit status, and the conversation with a server, which a stand-in holds here."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvplugin.cli.capture import capture
from kvplugin.errors import ArgumentError, EngineMismatch, KvpluginError
from kvplugin.replay import CaptureFileError, read_capture, replay_capture, write_capture
from kvplugin.replay.selftest.synthetic import Shape, make_capture
from kvplugin.vllm.capture_client import CaptureClient, CaptureFailed, server_call
from kvplugin.vllm.capture_request import CaptureRequest

app = typer.Typer()
app.command("capture")(capture)
WIDE = {"COLUMNS": "200"}


@app.callback()
def main() -> None:
    """A command beside it, so that ``capture`` keeps its name."""


class Workers:
    """The worker methods, without an engine: ``answers`` overrides what a method says."""

    def __init__(self, folder: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in sorted(folder.iterdir(), reverse=True)}
        self.calls: list[tuple[str, ...]] = []
        self.answers: dict[str, Any] = {}
        self.status = 200

    def answer(self, method: str, *arguments: str) -> Any:
        self.calls.append((method, *arguments))
        name = method.removeprefix("kvplugin_capture_")
        if name in self.answers:
            return self.answers[name]
        if name == "result":
            return {"state": "captured", "files": {file: len(data) for file, data in self.files.items()}}
        if name == "read":
            start = int(arguments[1])
            return {"data": base64.b64encode(self.files[arguments[0]][start : start + 50_000]).decode()}
        return {"state": "armed"}


@pytest.fixture
def workers(tmp_path: Path) -> Workers:
    write_capture(make_capture(Shape()), tmp_path / "source")
    return Workers(tmp_path / "source")


@pytest.fixture
def url(workers: Workers) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = {"results": [workers.answer(body["method"], *body["args"])]}
            self.send_response(workers.status if self.path == "/collective_rpc" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(*arguments: str | Path) -> tuple[int, str, BaseException | None]:
    found = CliRunner().invoke(app, ["capture", *map(str, arguments)], env=WIDE)
    return found.exit_code, found.output, found.exception


def test_server_capture_is_written_and_replays(tmp_path: Path, url: str, workers: Workers) -> None:
    status, output, error = run(
        tmp_path / "out", "--url", url, "--request", "chat-7", "--step", "12", "--layers", "0,3-5"
    )
    assert (status, error) == (0, None), output
    assert f"look at it with: kvplugin replay {tmp_path / 'out'}" in output
    assert replay_capture(read_capture(tmp_path / "out")).within
    sent = CaptureRequest.parse(workers.calls[0][1])
    assert (sent.request, sent.step, sent.layers, sent.limit) == ("chat-7", 12, (0, 3, 4, 5), 256 << 20)
    (owner,) = {call[-1] for call in workers.calls}
    assert workers.calls[-1] == ("kvplugin_capture_disarm", owner)
    assert sum(call[0].endswith("read") for call in workers.calls) > 2, "files larger than one piece come in several"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of --model PATH and --url URL"),
        (("--model", "m", "--url", "u"), "give one of --model PATH and --url URL"),
        (("--url", "u", "--step", "-1"), "got '-1'; use 'next', or generated tokens that the step sees"),
        (("--model", "m", "--step", "next"), "got 'next'; use a number from 0 on"),
        (("--url", "u", "--layers", "0,x"), "got '0,x'; use all, or numbers such as 0,3-5"),
        (("--url", "u", "--layers", "5-3"), "got '5-3', which names no layer"),
        (("--model", ".", "--dtype", "int4"), "got 'int4'; use auto, float32, bfloat16, float16"),
        (("--model", "nowhere"), "nowhere has no config.json; give a checkpoint's folder"),
    ],
)
def test_wrong_options(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    status, output, _ = run(tmp_path / "out", *arguments)
    assert status == 2
    assert message in " ".join(output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_a_folder_with_a_capture_is_left_alone(tmp_path: Path, url: str, workers: Workers) -> None:
    _, _, error = run(tmp_path / "source", "--url", url)
    assert isinstance(error, CaptureFileError)
    assert str(error).endswith("already holds a capture; choose an empty folder")
    assert workers.calls == []


@pytest.mark.parametrize(
    ("answers", "kind", "message"),
    [
        (
            {"arm": {"error": ["capture.layers", "got [9]", "this worker holds layers 0 to 5"]}},
            ArgumentError,
            "capture",
        ),
        ({"result": {"state": "failed", "problem": "request 1 is at step 8 already"}}, CaptureFailed, "at step 8"),
        ({"result": {"state": "armed", "request": None}}, CaptureFailed, "no such request was seen"),
        ({"result": {"state": "armed", "request": "a"}}, CaptureFailed, "request a was seen"),
        ({"result": {"state": "captured", "files": {"../x": 9}}}, CaptureFailed, "offers files that are no capture"),
        ({"result": {"state": "captured", "files": {"manifest.json": 1 << 40}}}, CaptureFailed, "that are no capture"),
        ({"read": {"data": ""}}, CaptureFailed, "the engine sent 0 bytes"),
        (
            {"read": {"data": "AAAA" * 99}, "result": {"state": "captured", "files": {"manifest.json": 9}}},
            CaptureFailed,
            "the engine sent 297 bytes at 0 of 9",
        ),
        ({"arm": "a string"}, EngineMismatch, "answered 'a string'"),
    ],
)
def test_what_a_server_may_answer(
    tmp_path: Path, url: str, workers: Workers, answers: dict[str, Any], kind: type[KvpluginError], message: str
) -> None:
    workers.answers = answers
    _, _, error = run(tmp_path / "out", "--url", url, "--wait", "0")
    assert isinstance(error, kind), error
    assert message in str(error)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("status", "message"),
    [(404, "start it with VLLM_SERVER_DEV_MODE=1"), (500, "the workers know no capture, or failed (500)")],
)
def test_a_server_that_cannot(url: str, workers: Workers, status: int, message: str) -> None:
    workers.status = status
    with pytest.raises(EngineMismatch, match="/collective_rpc: ") as caught:
        CaptureClient(server_call(url)).arm(CaptureRequest())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_server() -> None:
    with pytest.raises(EngineMismatch, match=r"no usable answer: .*give the address of a vLLM server$"):
        server_call("http://127.0.0.1:9")("kvplugin_capture_result")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": -1}', "capture.step: got -1; 'next', or generated tokens that the step sees"),
        ('{"step": "last"}', "capture.step: got 'last'; 'next', or"),
        ('{"layers": []}', "capture.layers: got []; 'all', or a list of layer numbers"),
        ('{"rows": 0}', "capture.rows: got 0; 1 to 4096"),
        ('{"limit": 5}', "capture.limit: got 5; bytes, 1 KiB to 4 GiB"),
        ('{"request": true}', "capture.request: got True; a request id, or n"),
        ('{"prompt": 1}', "capture: Extra inputs are not permitted: 'prompt'; a JSON object with any of request, step"),
        ("[]", "capture: Input should be an object: '[]'; a JSON object with any of"),
        ("{", "capture: Invalid JSON"),
    ],
)
def test_a_worker_refuses(text: str, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        CaptureRequest.parse(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("wanted", "engine", "meant"),
    [
        ("a", "a", True),
        ("a", "a-12345678", True),
        ("a-12345678", "a-12345678", True),
        ("a", "ab-1234567", False),
        ("b", "a-12345678", False),
    ],
)
def test_names_of_requests(wanted: str, engine: str, meant: bool) -> None:
    assert CaptureRequest(request=wanted).names(engine) is meant
