"""A package index on this machine: one wheel, served with or without byte ranges, and a log of who asked for what."""

from __future__ import annotations

import base64
import hashlib
import io
import random
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

COMPILED_BYTES = 6 << 20


@dataclass(frozen=True)
class Request:
    """One download: the client's name, and the bytes sent to it."""

    agent: str
    ranged: bool
    sent: int


@dataclass
class Index:
    """The address to give to pip, and what was asked of the wheel so far."""

    url: str
    requests: list[Request] = field(default_factory=list)

    def sent_to(self, agent: str) -> int:
        return sum(request.sent for request in self.requests if request.agent.startswith(agent))


def make_wheel(version: str, files: Mapping[str, str], *, false_record: bool = False) -> bytes:
    """A wheel of ``vllm`` with ``files``, metadata, and a large compiled part in the middle.

    ``false_record`` lists a wrong hash for the first file.
    """
    info = f"vllm-{version}.dist-info"
    contents: dict[str, bytes] = {
        **{name: text.encode() for name, text in list(files.items())[:1]},
        "vllm/_C.abi3.so": random.Random(0).randbytes(COMPILED_BYTES),
        **{name: text.encode() for name, text in list(files.items())[1:]},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": b"[console_scripts]\nvllm = vllm:main\n",
    }
    digests = {name: hashlib.sha256(content).digest() for name, content in contents.items()}
    if false_record:
        digests[next(iter(files))] = bytes(32)
    record = [f"{name},{_record_hash(digest)},{len(contents[name])}" for name, digest in digests.items()]
    contents[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,\n"]).encode()
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return wheel.getvalue()


def _record_hash(digest: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


@contextmanager
def serve_index(wheels: Mapping[str, bytes], *, ranges: bool) -> Iterator[Index]:
    """Serve the wheels, by version, as a simple index on a free port of this machine."""
    index = Index("")
    files = {f"vllm-{version}-py3-none-any.whl": wheel for version, wheel in wheels.items()}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.rstrip("/") == "/simple/vllm":
                links = "".join(f'<a href="/files/{name}">{name}</a>' for name in files)
                self._send(200, f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html")
            elif (name := unquote(self.path.removeprefix("/files/"))) in files:
                self._send_file(files[name])
            else:
                self._send(404, b"", "text/plain")

        def _send_file(self, wheel: bytes) -> None:
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if ranges else None
            if asked is None:
                self._send(200, wheel, "application/zip")
            else:
                start, end = int(asked[1]), int(asked[2]) + 1
                self._send(206, wheel[start:end], "application/zip", f"bytes {start}-{end - 1}/{len(wheel)}")

        def _send(self, status: int, body: bytes, kind: str, content_range: str | None = None) -> None:
            if kind == "application/zip":
                agent = self.headers.get("User-Agent", "")
                index.requests.append(Request(agent, content_range is not None, len(body)))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if content_range:
                self.send_header("Content-Range", content_range)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index.url = f"http://127.0.0.1:{server.server_port}/simple"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
