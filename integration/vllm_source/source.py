"""Fetch once, keep, and hand out: ``<folder>/<version>/`` is whole and checked, or not there."""

from __future__ import annotations

import io
import os
import re
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import httpx

from integration.vllm_source.errors import SourceError
from integration.vllm_source.index import WheelLocation, download_wheel, locate_wheel
from integration.vllm_source.ranged_file import RangedFile, RangesRefused
from integration.vllm_source.tree import unpack, unpack_file, verify

DEFAULT_VERSION = "0.32.0"
FOLDER_VARIABLE = "KVPLUGIN_VLLM_SOURCE"
"""Environment variable that names another folder to keep the sources in."""

_REPOSITORY = Path(__file__).resolve().parents[2]
_VERSION = re.compile(r"\d[0-9A-Za-z.]*?(\.\*)?")
_READ_AHEAD = 1 << 20
"""Bytes; the Python of a wheel lies nearly in one piece, so this makes about thirty requests of it."""
_TIMEOUT_S = 60.0


class Route(StrEnum):
    """How the sources came here."""

    CACHED = "cached"
    RANGES = "ranges"
    WHOLE = "whole wheel"


@dataclass(frozen=True)
class VllmSource:
    """One version's Python: ``root`` holds ``vllm/`` and its metadata, and belongs first on ``sys.path``."""

    version: str
    root: Path
    route: Route


def default_folder() -> Path:
    """Where sources are kept when the caller names no place."""
    return Path(os.environ.get(FOLDER_VARIABLE) or _REPOSITORY / ".cache" / "vllm-source")


def fetch_source(version: str = DEFAULT_VERSION, folder: Path | None = None) -> VllmSource:
    """The Python of vLLM's CUDA wheel of ``version``, fetched where it is not kept yet.

    A kept version needs no network; it is checked again, because an edited oracle proves nothing.

    Args:
        version: such as ``0.32.0``, or ``0.32.*`` for the newest of that series (asks the index).
        folder: where sources are kept; default ``default_folder()``.

    Raises:
        SourceError: the version is malformed, unknown or out of reach, or what is kept was changed.
    """
    if _VERSION.fullmatch(version) is None:
        raise SourceError(version, "not a version", "give one such as 0.32.0, or 0.32.* for the newest of a series")
    folder = (folder or default_folder()).resolve()
    if (folder / version).is_dir():
        return _kept(version, folder)
    location = locate_wheel(version)
    if (folder / location.version).is_dir():
        return _kept(location.version, folder)
    return _fetched(location, folder)


def _kept(version: str, folder: Path) -> VllmSource:
    verify(version, folder / version)
    return VllmSource(version, folder / version, Route.CACHED)


def _fetched(location: WheelLocation, folder: Path) -> VllmSource:
    """Unpack beside the final place and rename: a fetch that dies half-way leaves nothing that looks whole."""
    folder.mkdir(parents=True, exist_ok=True)
    # The folder may lie in a checkout; this keeps git and the linters out of it.
    (folder / ".gitignore").write_text("*\n")
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
        tree = Path(partial) / "tree"
        route = _unpack(location, tree)
        verify(location.version, tree)
        try:
            tree.rename(folder / location.version)
        except OSError:
            # Another process was faster.
            return _kept(location.version, folder)
    return VllmSource(location.version, folder / location.version, route)


def _unpack(location: WheelLocation, tree: Path) -> Route:
    """By ranges where the server sends them; whatever else it needs (a password, a certificate), pip knows."""
    parts = urlsplit(location.url)
    if parts.scheme == "file":
        unpack_file(Path(url2pathname(parts.path)), tree)
        return Route.WHOLE
    try:
        with httpx.Client(follow_redirects=True, timeout=_TIMEOUT_S) as client:
            unpack(io.BufferedReader(RangedFile(client, location.url), _READ_AHEAD), tree)
        return Route.RANGES
    except (httpx.HTTPError, RangesRefused):
        with (
            tempfile.TemporaryDirectory() as folder,
            download_wheel(location.version, Path(folder)).open("rb") as whole,
        ):
            unpack(whole, tree)
        return Route.WHOLE
