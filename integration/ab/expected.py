"""What must come out, worked out apart from the plugin: the documented hash, and which policy a request met."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping


def documented_arm(shares: Mapping[str, float], key: str) -> str:
    """The arm of a key, from the formula in docs/ab.md."""

    def draw(arm: str) -> float:
        fields = b"".join(
            len(value).to_bytes(8, "little") + value for value in (b"kvplugin.arm.v1", arm.encode(), key.encode())
        )
        number = int.from_bytes(hashlib.sha256(fields).digest()[:8], "big")
        return -math.log((number + 1) / (2**64 + 1)) / shares[arm]

    return min((arm for arm, share in shares.items() if share > 0), key=lambda arm: (draw(arm), arm))
