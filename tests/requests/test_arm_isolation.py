"""Salts, epochs, slots."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvplugin.config import PolicyConfig
from kvplugin.requests.epochs import ArmEpochs
from kvplugin.requests.rollout import Rollout, rollout_of
from kvplugin.requests.salt import UNMODIFIED, cache_salt, policy_digest
from kvplugin.requests.slots import ArmSlots, StepRollout

MERGE = {"mode": "topology_sparse_merge"}


def rollout(enabled: bool = True, **arms: dict[str, Any]) -> Rollout:
    return rollout_of({"enabled": enabled, "arms": arms, "default_arm": next(iter(arms))})


def test_no_two_inputs_have_one_salt() -> None:
    inputs = list(product([None, "", "a", "b", "none"], ["a", "b", "ab"], ["x", "y"], [0, 1, 11]))
    assert len({cache_salt(*each) for each in inputs}) == len(inputs)


def test_policies_that_select_alike_have_one_digest() -> None:
    def digest(enabled: bool = True, **settings: Any) -> str:
        return policy_digest(PolicyConfig(**settings), enabled=enabled)

    assert digest(mode="observe") == digest(mode="disabled") == digest(enabled=False, **MERGE) == UNMODIFIED
    assert policy_digest(None, enabled=True) == UNMODIFIED
    assert digest(**MERGE) == digest(**MERGE, check_duplicates=True) != UNMODIFIED
    different = [MERGE, MERGE | {"sink_tokens": 5}, MERGE | {"limits": {"max_rows": 4}}, MERGE | {"phases": ["decode"]}]
    assert len({digest(**settings) for settings in different}) == len(different)


def test_an_epoch_ends_with_what_the_arm_selects() -> None:
    epochs = ArmEpochs()
    assert epochs.advance(rollout(a={"mode": "observe"}, b=MERGE)) == {"b"}
    first = {arm: epochs.salt(None, arm) for arm in "ab"}
    assert epochs.advance(rollout(a={"mode": "disabled"}, b=MERGE)) == frozenset()
    assert epochs.advance(rollout(enabled=False, a={}, b=MERGE)) == {"b"}
    off = epochs.salt(None, "b")
    assert epochs.advance(rollout(a={}, b=MERGE)) == {"b"}
    assert len({first["b"], off, epochs.salt(None, "b")}) == 3, "the same policy again is another epoch"
    assert epochs.salt(None, "a") == first["a"], "the control arm keeps its cache"


def test_an_arm_that_returns_finds_nothing_of_before() -> None:
    epochs = ArmEpochs()
    epochs.advance(rollout(a={}, b=MERGE))
    before = epochs.salt(None, "b")
    assert epochs.advance(rollout(a={})) == {"b"}
    gone = epochs.salt(None, "b")
    epochs.advance(rollout(a={}, b=MERGE))
    assert len({before, gone, epochs.salt(None, "b")}) == 3


names = st.sets(st.sampled_from([f"arm{i}" for i in range(30)]), min_size=1, max_size=16)


@given(st.lists(names, min_size=1, max_size=8))
def test_arms_keep_their_slots_while_they_exist(steps: list[set[str]]) -> None:
    slots, before = ArmSlots(), dict[str, int]()
    for arms in steps:
        placed = slots.place(rollout(**{name: {} for name in sorted(arms)}))
        now = {arm[0]: slot for slot, arm in enumerate(placed) if arm is not None}
        assert now.keys() == arms
        assert all(now[name] == before[name] for name in arms & before.keys())
        before = now


def test_a_step_survives_its_way() -> None:
    placed = ArmSlots(3).place(
        rollout(a=MERGE | {"limits": {"max_rows": 4}}, b={"mode": "topology_only", "fill": "none"})
    )
    step = StepRollout(7, "abc", False, placed)
    assert StepRollout.decode(step.encode()) == step
