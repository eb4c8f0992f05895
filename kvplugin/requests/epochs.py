"""Epochs of arms: one ends whenever what the arm selects changes, and what was computed in it is not used again."""

from __future__ import annotations

from collections import Counter

from kvplugin.requests.rollout import Rollout
from kvplugin.requests.salt import UNMODIFIED, cache_salt, policy_digest


class ArmEpochs:
    """The epochs of one engine core.

    Requests that live across a change write KV of both sides of it, so that the same policy after a switch off and on
    again is another epoch. An epoch's number never comes back, not even where an arm goes away and returns.
    """

    def __init__(self) -> None:
        self._policies: dict[str, str] = {}
        self._epochs: Counter[str] = Counter()

    def advance(self, rollout: Rollout) -> frozenset[str]:
        """Go by another rollout.

        Returns:
            Arms whose epoch ended.
        """
        found = {name: policy_digest(policy, enabled=rollout.enabled) for name, policy in rollout.arms.items()}
        names = self._policies.keys() | found.keys()
        ended = {name for name in names if self._policies.get(name, UNMODIFIED) != found.get(name, UNMODIFIED)}
        self._epochs.update(ended)
        self._policies = found
        return frozenset(ended)

    def salt(self, own: str | None, arm: str) -> str:
        """Salt of a request of an arm that enters now; see :func:`kvplugin.requests.salt.cache_salt`."""
        return cache_salt(own, arm, self._policies.get(arm, UNMODIFIED), self._epochs[arm])
