"""Unpack the Python of a wheel, and check it against the wheel's own list of hashes."""

from __future__ import annotations

import base64
import csv
import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from integration.vllm_source.errors import SourceError

_WANTED = (".py", ".json")
"""vLLM reads some JSON at import; everything else is for compilers, GPUs and browsers."""


def unpack_file(wheel: Path, folder: Path) -> None:
    """``unpack`` for a wheel on this machine."""
    with wheel.open("rb") as opened:
        unpack(opened, folder)


def unpack(wheel: BinaryIO, folder: Path) -> None:
    """Write the Python files and the metadata of ``wheel`` into ``folder``, in the order in which they are stored."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in sorted(archive.infolist(), key=lambda entry: entry.header_offset):
            if _is_wanted(entry.filename):
                archive.extract(entry, folder)


def verify(version: str, folder: Path) -> None:
    """Check that ``folder`` holds what its RECORD lists, and no other Python.

    Raises:
        SourceError: a file is missing, added or changed.
    """
    record = folder / f"vllm-{version}.dist-info" / "RECORD"
    if not record.is_file():
        raise _damaged(version, folder, "RECORD is missing")
    listed = {path: digest for path, digest, _ in csv.reader(record.read_text().splitlines()) if _is_wanted(path)}
    present = set(_wanted_files(folder))
    if difference := present.symmetric_difference(listed):
        first = min(difference)
        raise _damaged(version, folder, f"{first} is {'missing' if first in listed else 'not in RECORD'}")
    for path, digest in listed.items():
        # RECORD cannot list its own hash.
        if digest and digest != _digest(folder / path):
            raise _damaged(version, folder, f"{path} is not what RECORD says")


def _is_wanted(path: str) -> bool:
    return path.endswith(_WANTED) or PurePosixPath(path).parts[0].endswith(".dist-info")


def _wanted_files(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        relative = path.relative_to(folder).as_posix()
        if path.is_file() and _is_wanted(relative):
            yield relative


def _digest(path: Path) -> str:
    """As RECORD writes it: URL-safe base64 without padding."""
    raw = hashlib.sha256(path.read_bytes()).digest()
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _damaged(version: str, folder: Path, what: str) -> SourceError:
    return SourceError(version, f"{what} in {folder}", "remove that folder and fetch again")
