"""One finding about an installation, as ``kvplugin doctor`` reports it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Outcome of one check; only ``failed`` makes the exit status 1."""

    OK = "ok"
    NOTE = "note"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, how it stands, what is there, and the cure where it is not well."""

    name: str
    status: Status
    found: str
    cure: str = ""
