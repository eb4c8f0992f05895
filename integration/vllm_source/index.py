"""Where a wheel is, asked of pip: it knows the operator's index, mirrors, certificates and passwords."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from integration.vllm_source.errors import SourceError

_SELECTION = ("--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "--quiet")
_SHOWN_VERSIONS = 8


@dataclass(frozen=True)
class WheelLocation:
    """The wheel that pip would install: its version and URL (``https:``, ``http:`` or ``file:``)."""

    version: str
    url: str


def locate_wheel(version: str) -> WheelLocation:
    """The wheel of ``version``, which may end in ``.*`` for the newest of a series.

    Before 23.3 pip downloads the wheel even for a dry run; newer ones ask the index for its metadata alone.

    Raises:
        SourceError: no such version, no index in reach, or only a CPU build of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        _pip(version, "install", "--dry-run", "--ignore-installed", "--report", str(report))
        (wheel,) = json.loads(report.read_text())["install"]
    found = wheel["metadata"]["version"]
    if "cpu" in found:
        raise SourceError(version, f"pip prefers the CPU build {found}", "hide it with PIP_FIND_LINKS= and try again")
    return WheelLocation(found, wheel["download_info"]["url"])


def download_wheel(version: str, folder: Path) -> Path:
    """The whole wheel, saved by pip into ``folder``, which must be empty.

    Raises:
        SourceError: pip cannot get it.
    """
    _pip(version, "download", "--dest", str(folder))
    (wheel,) = folder.glob("*.whl")
    return wheel


def _pip(version: str, *arguments: str) -> None:
    command = (sys.executable, "-m", "pip", *arguments, *_SELECTION, f"vllm=={version}")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise _explained(version, result.stderr)


def _explained(version: str, stderr: str) -> SourceError:
    """What went wrong, read from pip's messages."""
    offered = re.search(r"\(from versions: (.*)\)", stderr)
    if offered is None:
        return SourceError(version, f"pip failed: {stderr.strip()}", "cure what pip names, then try again")
    if offered[1] == "none":
        return SourceError(
            version, "pip finds no vLLM at all", "check the network, and the index with 'pip config list'"
        )
    newest = ", ".join(offered[1].split(", ")[-_SHOWN_VERSIONS:])
    return SourceError(version, "the package index has no such version", f"the newest it has are {newest}")
