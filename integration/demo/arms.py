"""The policies that the demo compares, as arms of one rollout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from kvplugin.config import Eviction, Mode

OBSERVE, MERGE = "observe", "merge"
ARMS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        OBSERVE: {"mode": Mode.OBSERVE},
        MERGE: {"mode": Mode.SPARSE_MERGE, "eviction": Eviction.LOWEST_SCORE},
        "merge_input_order": {"mode": Mode.SPARSE_MERGE, "eviction": Eviction.INPUT_ORDER},
        "merge_oldest": {"mode": Mode.SPARSE_MERGE, "eviction": Eviction.OLDEST},
        "topology_only": {"mode": Mode.ONLY},
    }
)


def write_rollout(path: Path) -> Path:
    """Write the rollout file; every request names its arm, so that shares decide nothing."""
    shares = {arm: float(arm == OBSERVE) for arm in ARMS}
    path.write_text(json.dumps({"arms": dict(ARMS), "shares": shares, "default_arm": OBSERVE}, indent=2) + "\n")
    return path
