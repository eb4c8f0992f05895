"""From a key to an arm: the same answer in every process, and few sessions that move when shares do."""

from __future__ import annotations

import math
from hashlib import sha256

from kvplugin.requests.digest import fields
from kvplugin.requests.rollout import Rollout

VERSION = "kvplugin.arm.v1"
"""Part of every hash: another rule would get another name, so that nobody mistakes one for the other."""


def choose_arm(rollout: Rollout, key: str) -> str:
    """The arm of a session or request, by weighted rendezvous hashing.

    Each arm draws for the key: with ``n`` the first 8 bytes, big-endian, of SHA-256 over the length-prefixed fields
    ``kvplugin.arm.v1``, arm, key, and ``u = (n + 1) / (2^64 + 1)``, it draws ``-ln(u) / share``. The smallest wins.
    A key changes its arm only to one whose share rose, or away from one whose share fell, relative to the others.

    Source: C. Schindelhauer, G. Schomaker, *Weighted distributed hash tables*, 2005 (the logarithmic method).
    """
    draws = (
        (-math.log((_number(arm, key) + 1) / (2**64 + 1)) / share, arm)
        for arm in rollout.arms
        if (share := rollout.share(arm)) > 0
    )
    return min(draws)[1]


def _number(arm: str, key: str) -> int:
    return int.from_bytes(sha256(fields(VERSION, arm, key)).digest()[:8], "big")
