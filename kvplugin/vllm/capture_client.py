"""The other end of the worker methods: arms a capture, waits for it, and brings its files here."""

from __future__ import annotations

import base64
import json
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from kvplugin.errors import ArgumentError, EngineMismatch, KvpluginError
from kvplugin.replay import Capture, read_capture
from kvplugin.replay.capture.manifest import FILE_NAME, MANIFEST_NAME
from kvplugin.vllm.capture_request import CaptureRequest

Call = Callable[..., dict[str, Any]]
"""``call(method, *arguments)``: the first worker's answer; arguments are strings."""
MANIFEST_ROOM = 64 << 20
"""Bytes that the files may have beside their tensors."""
POLL_S = 0.1


class CaptureFailed(KvpluginError):
    """The engine could not capture what was asked for; the text says why."""


class CaptureClient:
    """Speaks with the workers of one engine. With tensor parallelism the first rank answers, for its own heads."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._wanted = CaptureRequest()
        self._owner = uuid.uuid4().hex

    def arm(self, wanted: CaptureRequest) -> None:
        """Make the engine wait for a step.

        Raises:
            ArgumentError: the engine refuses the request.
        """
        self._wanted = wanted
        self._ask("arm", wanted.model_dump_json(), self._owner)

    def disarm(self) -> None:
        """Make the engine forget the capture, unless it is another client's by now."""
        self._ask("disarm", self._owner)

    def result(self) -> dict[str, Any]:
        """What has come of it; see ``kvplugin_capture_result``.

        Raises:
            ArgumentError: the limit holds no record, or another client has armed a capture since.
            CaptureFailed: the engine gave up.
        """
        found = self._ask("result", self._owner)
        if found["state"] == "failed":
            what = f"capture of request {self._wanted.request}, step {self._wanted.step}"
            raise CaptureFailed(f"{what}: {found['problem']}")
        return found

    def wait(self, seconds: float) -> dict[str, Any]:
        """The result once the step has been captured.

        Raises:
            CaptureFailed: nothing was captured in time, or the engine gave up.
        """
        until = time.monotonic() + seconds
        while (found := self.result())["state"] != "captured":
            if time.monotonic() > until:
                seen = f"request {found['request']} was seen" if found.get("request") else "no such request was seen"
                what = f"no step {self._wanted.step} of request {self._wanted.request} in {seconds:g} s"
                cure = "send it while the capture waits, for long enough to come to the step, or wait longer"
                raise CaptureFailed(f"{what}; {seen}; {cure}")
            time.sleep(POLL_S)
        return found

    def fetch(self) -> Capture:
        """The capture, read with the distrust that a file from elsewhere deserves.

        Raises:
            CaptureFailed: there is none yet, or the engine offers something else.
            CaptureFileError: what the engine sent is no capture.
        """
        found = self.result()
        if found["state"] != "captured":
            raise CaptureFailed(f"step {self._wanted.step} of request {self._wanted.request} has not come yet")
        files: dict[str, int] = found["files"]
        strange = [name for name in files if name != MANIFEST_NAME and not FILE_NAME.fullmatch(name)]
        if strange or sum(files.values()) > self._wanted.limit + MANIFEST_ROOM:
            raise CaptureFailed(f"the engine offers files that are no capture: {files}"[:300])
        with tempfile.TemporaryDirectory(prefix="kvplugin-capture-") as folder:
            for name, size in files.items():
                self._download(name, size, Path(folder) / name)
            return read_capture(Path(folder))

    def _download(self, name: str, size: int, path: Path) -> None:
        with path.open("wb") as file:
            while file.tell() < size:
                piece = base64.b64decode(self._ask("read", name, str(file.tell()), self._owner)["data"])
                if not 0 < len(piece) <= size - file.tell():
                    raise CaptureFailed(f"{name}: the engine sent {len(piece)} bytes at {file.tell()} of {size}")
                file.write(piece)

    def _ask(self, what: str, *arguments: str) -> dict[str, Any]:
        answer = self._call(f"kvplugin_capture_{what}", *arguments)
        if "error" in answer:
            raise ArgumentError(*answer["error"])
        return answer


def engine_call(llm: Any) -> Call:
    """Calls on an engine in this process's hands: a ``vllm.LLM``."""

    def call(method: str, *arguments: str) -> dict[str, Any]:
        answer: dict[str, Any] = llm.collective_rpc(method, args=arguments)[0]
        return answer

    return call


def server_call(url: str, timeout: float = 60.0) -> Call:
    """Calls on a running server, through vLLM's ``/collective_rpc``; proxies are left aside.

    A call raises :class:`EngineMismatch` where the endpoint or the methods are not there.
    """
    address = f"{url.rstrip('/')}/collective_rpc"
    opener = build_opener(ProxyHandler({}))

    def call(method: str, *arguments: str) -> dict[str, Any]:
        body = json.dumps({"method": method, "args": arguments}).encode()
        try:
            with opener.open(Request(address, body, {"Content-Type": "application/json"}), timeout=timeout) as response:
                answer: dict[str, Any] = json.load(response)["results"][0]
        except HTTPError as error:
            raise _refusal(address, error.code) from None
        except (URLError, OSError, ValueError, KeyError, IndexError) as error:
            raise EngineMismatch(address, f"no usable answer: {error}", "give the address of a vLLM server") from None
        if not isinstance(answer, dict):
            raise EngineMismatch(address, f"answered {str(answer)[:100]!r}", "serve with the kvplugin of this version")
        return answer

    return call


def _refusal(address: str, status: int) -> EngineMismatch:
    if status in (404, 405):
        cure = "start it with VLLM_SERVER_DEV_MODE=1, where only you can reach it: it lets callers run worker methods"
        return EngineMismatch(address, f"the server has no such endpoint ({status})", cure)
    cure = "serve on a CPU with --attention-backend KVPLUGIN, and see the server's log"
    return EngineMismatch(address, f"the workers know no capture, or failed ({status})", cure)
