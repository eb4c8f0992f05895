"""Metric files: values of one process, in the format that prometheus_client's multiprocess collector reads.

The files are written directly, not through prometheus_client's metric objects: those decide once, at import, between
memory and files, and take the directory from an environment variable that changes what vLLM's ``/metrics`` reads. Here
neither the host's metrics nor its environment are touched, and a process that imported prometheus_client early, or was
forked, exports like any other.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict

FILE_MARK = "kvplugin-"
"""Begins the last part of every file name, where prometheus_client puts a process id: our files never meet its own."""


class MetricFile:
    """A file of series and their values, complete from the moment a scrape can see it. Not thread-safe.

    Args:
        path: ``<type>_<mark>.db``, or ``gauge_<multiprocess mode>_<mark>.db``. Missing folders are made; a file of that
            name is replaced.
        values: first value of each series by its key.

    Raises:
        OSError: the directory cannot be made or written, or is full.
    """

    def __init__(self, path: Path, values: Mapping[str, float]) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        try:
            # Written in full: on a full disk, a hole in the file would kill the process (SIGBUS) at some later store.
            draft.write_bytes(bytes(_size(values)))
            self._values = MmapedDict(str(draft))  # type: ignore[no-untyped-call]
            for key, value in values.items():
                self.set(key, value)
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def set(self, key: str, value: float, time: float = 0.0) -> None:
        """Set the value of one of the file's series, and when it was found where that decides between processes."""
        self._values.write_value(key, value, time)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close the file; its values stay on disk."""
        self._values.close()  # type: ignore[no-untyped-call]


def unique_mark() -> str:
    """Last part of a file name that no other writer uses, not even one with this process id in another container."""
    return f"{FILE_MARK}{os.getpid()}-{secrets.token_hex(4)}"


def process_mark() -> str:
    """Such a mark, always the same within one process."""
    return _mark_of(os.getpid())


@cache
def _mark_of(_process: int) -> str:
    return unique_mark()


def _size(keys: Iterable[str]) -> int:
    """Bytes the format needs at most: a header, and for each series a length, a padded key and two doubles."""
    return 8 + sum(4 + len(key.encode()) + 8 + 16 for key in keys)
