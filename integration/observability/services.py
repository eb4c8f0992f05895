"""Prometheus, Alertmanager and a receiver of its notifications, each for the length of a ``with`` block."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

READY_WITHIN_S = 30


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: Sequence[str], url: str, log: Path) -> Iterator[str]:
    """A program that serves ``url``, ready as its own endpoint says.

    Raises:
        RuntimeError: it ends, or is not ready in time; with its log.
    """
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        until = time.monotonic() + READY_WITHIN_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{command[0]} is not ready:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", trust_env=False, timeout=5).is_success
    except httpx.TransportError:
        return False


class Receiver:
    """What Alertmanager notifies, as a pager would be."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        notified = self.alerts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                notified.extend(json.loads(body)["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def wait_for(self, alert: str, within_s: float) -> dict[str, Any]:
        """The notification of an alert.

        Raises:
            TimeoutError: none comes.
        """
        until = time.monotonic() + within_s
        while True:
            for found in list(self.alerts):
                if found["labels"]["alertname"] == alert and found["status"] == "firing":
                    return found
            if time.monotonic() > until:
                names = sorted({found["labels"]["alertname"] for found in self.alerts})
                raise TimeoutError(f"no notification of {alert} in {within_s:.0f} s; there were {names}")
            time.sleep(0.1)
