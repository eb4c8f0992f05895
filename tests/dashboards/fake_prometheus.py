"""A server that answers as Prometheus would, from a table."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

Answer = tuple[int, Any]


@contextmanager
def answering(answer: Callable[[str, dict[str, str]], Answer]) -> Iterator[str]:
    """Address of a server that answers ``answer(path, query)``: a status, and JSON or a string as it is."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            address = urlparse(self.path)
            status, content = answer(address.path, {key: value[0] for key, value in parse_qs(address.query).items()})
            body = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def matrix(*series: tuple[dict[str, str], list[tuple[float, str]]]) -> Answer:
    """The answer to a range query."""
    result = [{"metric": labels, "values": values} for labels, values in series]
    return 200, {"status": "success", "data": {"resultType": "matrix", "result": result}}
