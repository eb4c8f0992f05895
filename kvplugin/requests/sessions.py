"""The last fingerprint of each session: bounded, aging, and without a word of any prompt."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

from kvplugin.requests.fingerprint import Fingerprint

MOST_SESSIONS = 65536
LONGEST_AGE_S = 3600.0


class Standing(StrEnum):
    """How a request's prompt stands to the last one of its session."""

    HIT = "hit"
    MISS = "miss"
    INVALIDATED = "invalidated"


@dataclass(frozen=True)
class Finding:
    """What was found, and the fields that changed where it is invalidated."""

    standing: Standing
    changed: tuple[str, ...] = ()


class SessionStore:
    """Fingerprints by session; the ones used longest ago leave first. Not thread-safe.

    Args:
        capacity: sessions.
        max_age_s: seconds after which a session that was not seen is forgotten.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        capacity: int = MOST_SESSIONS,
        max_age_s: float = LONGEST_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity, self._max_age_s, self._clock = capacity, max_age_s, clock
        self._known: OrderedDict[bytes, tuple[float, Fingerprint]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def observe(self, session: str, found: Fingerprint) -> Finding:
        """Compare a prompt's fingerprint with the session's last one, and keep it in its place."""
        now = self._clock()
        self._forget(now - self._max_age_s)
        key = sha256(session.encode("utf-8", "surrogatepass")).digest()
        _, before = self._known.pop(key, (now, None))
        self._known[key] = now, found
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)
        if before is None:
            return Finding(Standing.MISS)
        changed = found.changes(before)
        return Finding(Standing.INVALIDATED if changed else Standing.HIT, changed)

    def _forget(self, before: float) -> None:
        """Drop sessions last seen before a time; the order of use is the order of time."""
        while self._known:
            key = next(iter(self._known))
            if self._known[key][0] >= before:
                return
            del self._known[key]
