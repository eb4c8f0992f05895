from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.requests.assignment import choose_arm
from kvplugin.requests.rollout import Rollout, rollout_of

KEYS = [f"session-{number}" for number in range(4000)]


def rollout(**shares: float) -> Rollout:
    return rollout_of({"arms": {name: {} for name in shares}, "shares": shares, "default_arm": next(iter(shares))})


def assigned(of: Rollout) -> dict[str, str]:
    return {key: choose_arm(of, key) for key in KEYS}


def test_golden() -> None:
    """Another answer here would move every session of every installation."""
    half = rollout(control=0.5, candidate=0.5)
    assert [choose_arm(half, key) for key in ("a", "b", "c", "d", "", "ä", "\ud800")] == GOLDEN


GOLDEN = ["candidate", "candidate", "candidate", "candidate", "control", "candidate", "control"]
"""Computed apart, from the documented formula."""


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.5, 0.99, 1.0])
def test_shares_are_kept(share: float) -> None:
    """Four standard deviations; keys are fixed, so this passes or fails for good."""
    found = Counter(assigned(rollout(control=1 - share, candidate=share)).values())["candidate"]
    spread = 4 * (share * (1 - share) * len(KEYS)) ** 0.5
    assert abs(found - share * len(KEYS)) <= spread


weights = st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any)


@given(weights, weights, st.text(max_size=12))
def test_a_key_moves_only_where_shares_moved(before: list[int], after: list[int], key: str) -> None:
    """From an arm whose share fell, to one whose share rose, relative to each other."""
    size = max(len(before), len(after))
    old, new = ([*w, *[0] * (size - len(w))] for w in (before, after))
    names = [f"arm{i}" for i in range(size)]
    was = choose_arm(rollout(**{n: w / sum(old) for n, w in zip(names, old, strict=True)}), key)
    now = choose_arm(rollout(**{n: w / sum(new) for n, w in zip(names, new, strict=True)}), key)
    i, j = names.index(was), names.index(now)
    assert old[i] > 0
    assert new[j] > 0
    if i != j:
        assert new[j] * old[i] > new[i] * old[j], "it moved to an arm that did not gain on the one it left"


def test_the_order_of_arms_does_not_matter() -> None:
    assert assigned(rollout(a=0.2, b=0.3, c=0.5)) == assigned(rollout(c=0.5, a=0.2, b=0.3))


def test_a_larger_share_moves_no_more_than_it_must() -> None:
    before, after = assigned(rollout(a=0.9, b=0.1)), assigned(rollout(a=0.8, b=0.2))
    moved = [key for key in KEYS if before[key] != after[key]]
    assert all(before[key] == "a" for key in moved)
    assert len(moved) == pytest.approx(0.1 * len(KEYS), rel=0.25)
