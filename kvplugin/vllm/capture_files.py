"""A finished capture on the worker's disk, handed out in pieces until it is dropped."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path

from kvplugin.errors import ArgumentError
from kvplugin.replay import CaptureWriter
from kvplugin.vllm.capture_identity import EngineIdentity
from kvplugin.vllm.capture_recorder import StepRecorder
from kvplugin.vllm.capture_request import CHOICES

PIECE = 8 << 20
"""Bytes of a file in one answer."""


class CaptureFiles:
    """A capture folder in a temporary directory of its own, private to the worker's user; gone with this object.

    Args:
        recorder: of the finished step.
        limit: bytes of tensors.

    Attributes:
        written, left_out: layers that the capture holds, and those that the limit kept out.
        sizes: bytes of each file, the manifest last.

    Raises:
        ArgumentError: not one record fits the limit.
        MissingExtra: safetensors is not installed.
    """

    def __init__(self, recorder: StepRecorder, identity: EngineIdentity, limit: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvplugin-capture-")
        folder = Path(self._folder.name)
        names = (identity.engine, identity.model)
        with CaptureWriter(folder, *names, limit, len(recorder.left_out), identity.policy) as writer:
            self.written = [record.layer for record in recorder.records if writer.add(record)]
        seen = [record.layer for record in recorder.records] + recorder.left_out
        self.left_out = sorted(set(seen) - set(self.written))
        if not self.written:
            found = f"{limit} bytes hold no record of a request with {recorder.target.length} tokens"
            raise ArgumentError("capture.limit", found, CHOICES["limit"])
        found_files = sorted(folder.iterdir(), key=lambda path: path.name == "manifest.json")
        self.sizes = {path.name: path.stat().st_size for path in found_files}

    def read(self, name: str, offset: int) -> str:
        """At most :data:`PIECE` bytes of a file from ``offset`` on, in base64.

        Raises:
            ArgumentError: there is no such file or offset.
        """
        if name not in self.sizes or not 0 <= offset < max(1, self.sizes[name]):
            files = ", ".join(f"{each} ({size} bytes)" for each, size in self.sizes.items())
            raise ArgumentError("capture.read", f"got {name[:100]!r} from byte {offset}", f"the capture holds {files}")
        with (Path(self._folder.name) / name).open("rb") as file:
            file.seek(offset)
            return base64.b64encode(file.read(PIECE)).decode()

    def close(self) -> None:
        """Delete the folder."""
        self._folder.cleanup()
