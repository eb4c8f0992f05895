"""A file on a web server, read in pieces."""

from __future__ import annotations

import io
import re

import httpx


class RangesRefused(Exception):
    """The server does not send pieces of this file."""


class RangedFile(io.RawIOBase):
    """A seekable read-only file over HTTP; each read is one request, so put a buffer before it.

    Raises:
        RangesRefused: at once, where the server ignores ranges, so that a large file is never loaded by accident.
        httpx.HTTPError: the server cannot be reached.
    """

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client, self._url = client, url
        self._position = 0
        self._size = self._request(0, 1)[1]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        content, _ = self._request(self._position, end)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _request(self, start: int, end: int) -> tuple[bytes, int]:
        """Bytes ``[start, end)``, and the size of the whole file."""
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        with self._client.stream("GET", self._url, headers=headers) as response:
            sent = re.fullmatch(rf"bytes {start}-{end - 1}/(\d+)", response.headers.get("Content-Range", ""))
            if response.status_code != httpx.codes.PARTIAL_CONTENT or sent is None:
                raise RangesRefused(f"{response.status_code} for a range of {self._url}")
            return response.read(), int(sent[1])
