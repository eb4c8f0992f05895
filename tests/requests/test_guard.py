"""The guard: its file, when it acts, and what an override with a trip puts in force."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.config import Mode, Phase
from kvplugin.errors import ConfigError
from kvplugin.requests.guard import GuardSignal, GuardTrip
from kvplugin.requests.guard_watch import ArmTotals, GuardWatch, SignalTotal
from kvplugin.requests.override import Override, read_override, update_override
from kvplugin.requests.rollout import Rollout, parse_rollout
from kvplugin.requests.slots import ArmSlots, StepRollout
from kvplugin.requests.watch import RolloutWatcher

MERGE = "{mode: topology_sparse_merge, sink_tokens: 2}"
ARMS = f"arms: {{control: {{mode: observe}}, candidate: {MERGE}, other: {MERGE}}}\ndefault_arm: control\n"
GUARD = "guard: {window: 10, windows: 2, conditions: [{signal: step_overlap, below: 0.5, clear: 0.7}]}\n"
AT = datetime(2026, 1, 1, tzinfo=UTC)
TRIP = GuardTrip(reason="why", at=AT, signal=GuardSignal.STEP_OVERLAP)
OVERLAP = (GuardSignal.STEP_OVERLAP, Phase.DECODE)


def rollout(text: str = ARMS + GUARD) -> Rollout:
    return parse_rollout(text, "rollout.yaml")


def step(found: Rollout, *, enabled: bool = True) -> StepRollout:
    return StepRollout(1, "digest", enabled, ArmSlots().place(found), found.guard)


class Traffic:
    """An arm's totals, as they grow."""

    def __init__(self, arm: str, key: tuple[GuardSignal, Phase] = OVERLAP) -> None:
        self.arm, self.key = arm, key
        self.total = SignalTotal(0, 0.0)

    def window(self, mean: float, values: int = 10) -> dict[str, ArmTotals]:
        self.total = SignalTotal(self.total.values + values, self.total.total + mean * values)
        return {self.arm: {self.key: self.total}}


def watch_of(text: str = ARMS + GUARD) -> GuardWatch:
    watch = GuardWatch()
    watch.follow(step(rollout(text)))
    return watch


def trips_of(watch: GuardWatch, traffic: Traffic, means: list[float]) -> list[int]:
    """Numbers of the windows after which the guard acted; what came before the first look is no window."""
    assert watch.observe(traffic.window(0.0)) == {}
    return [n for n, mean in enumerate(means) if watch.observe(traffic.window(mean))]


@pytest.mark.parametrize(
    ("means", "acts_after"),
    [
        ([0.4, 0.4], [1]),
        ([0.4, 0.6, 0.4], [2]),  # undecided: neither bad nor good again
        ([0.4, 0.8, 0.4], []),
        ([0.5, 0.5, 0.5], []),  # the limit itself is no breach
        ([0.4, 0.8, 0.4, 0.4, 0.4, 0.4], [3]),  # once
    ],
)
def test_acts_after_bad_windows_in_a_row(means: list[float], acts_after: list[int]) -> None:
    assert trips_of(watch_of(), Traffic("candidate"), means) == acts_after


def test_says_why() -> None:
    watch, traffic = watch_of(), Traffic("candidate")
    for mean in (0.9, 0.25):
        assert watch.observe(traffic.window(mean)) == {}
    trip = watch.observe(traffic.window(0.125))["candidate"]
    assert trip.reason == "decode step_overlap below 0.5: 0.250, 0.125 in 2 windows of 10 values"
    assert (trip.signal, trip.fallback) == (GuardSignal.STEP_OVERLAP, None)


def test_a_window_is_as_long_as_it_takes() -> None:
    """Traffic that trickles in gives the same windows as traffic that comes at once."""
    watch, traffic = watch_of(), Traffic("candidate")
    watch.observe(traffic.window(0.0))
    found = [watch.observe(traffic.window(0.1, values=3)) for _ in range(8)]
    assert [bool(trips) for trips in found] == [False] * 7 + [True]


@pytest.mark.parametrize(("arm", "guarded"), [("candidate", True), ("other", True), ("control", False)])
def test_guards_what_selects(arm: str, guarded: bool) -> None:
    assert bool(trips_of(watch_of(), Traffic(arm), [0.1] * 4)) is guarded


def test_guards_the_arms_it_is_given() -> None:
    text = ARMS + GUARD.replace("guard: {", "guard: {arms: [other], fallback: control, ")
    assert trips_of(watch_of(text), Traffic("candidate"), [0.1] * 4) == []
    watch, traffic = watch_of(text), Traffic("other")
    watch.observe(traffic.window(0.0))
    watch.observe(traffic.window(0.1))
    assert watch.observe(traffic.window(0.1))["other"].fallback == "control"


@pytest.mark.parametrize("enabled", [True, False])
def test_the_kill_switch_stops_it(enabled: bool) -> None:
    watch = GuardWatch()
    watch.follow(step(rollout(), enabled=enabled))
    assert bool(trips_of(watch, Traffic("candidate"), [0.1] * 4)) is enabled


def test_other_traffic_is_no_breach() -> None:
    watch, traffic = watch_of(), Traffic("candidate", (GuardSignal.STEP_OVERLAP, Phase.PREFILL))
    assert trips_of(watch, traffic, [0.1] * 9) == []


def test_starts_afresh_when_the_policy_comes_back() -> None:
    watch, traffic, found = watch_of(), Traffic("candidate"), rollout()
    assert trips_of(watch, traffic, [0.1, 0.1]) == [1]
    watch.follow(step(Override(guard={"candidate": TRIP}).over(found)))
    assert [bool(watch.observe(traffic.window(0.1))) for _ in range(3)] == [False] * 3
    watch.follow(step(found))
    assert trips_of(watch, traffic, [0.1, 0.1]) == [1]


def test_goes_on_where_nothing_of_the_arm_changed() -> None:
    watch, traffic, found = watch_of(), Traffic("candidate"), rollout()
    watch.observe(traffic.window(0.0))
    watch.observe(traffic.window(0.1))
    watch.follow(step(found.model_copy(update={"shares": {"control": 1.0}})))
    assert watch.observe(traffic.window(0.1))


def test_tries_again_after_a_failure() -> None:
    watch, traffic = watch_of(), Traffic("candidate")
    assert trips_of(watch, traffic, [0.1, 0.1]) == [1]
    watch.retry({"candidate": TRIP})
    assert watch.observe(traffic.window(0.1))


@given(means=st.lists(st.floats(0.5, 1.0), max_size=40))
def test_never_acts_on_healthy_traffic(means: list[float]) -> None:
    assert trips_of(watch_of(), Traffic("candidate"), means) == []


@pytest.mark.parametrize(
    ("guard", "message"),
    [
        ("{}", "rollout.guard.conditions: {} is not valid; field required"),
        ("{conditions: []}", "rollout.guard.conditions: [] is not valid"),
        ("{conditions: [{signal: overlap, below: 1}]}", "'overlap' is unknown; use sink_hit, local_hit"),
        ("{conditions: [{signal: sink_hit}]}", "above and below are both missing; give one of them"),
        ("{conditions: [{signal: sink_hit, below: 0.1, above: 0.2}]}", "given beside below; give one of them"),
        ("{conditions: [{signal: sink_hit, below: 0.5, clear: 0.4}]}", "bad side of the limit; use at least 0.5"),
        ("{conditions: [{signal: sink_hit, above: 0.5, clear: 0.6}]}", "bad side of the limit; use at most 0.5"),
        ("{conditions: [{signal: sink_hit, below: 2}]}", "less than or equal to 1"),
        ("{conditions: [{signal: sink_hit, below: .nan}]}", "finite number"),
        ("{window: 0, conditions: [{signal: sink_hit, below: 1}]}", "rollout.guard.window: 0 is not valid"),
        ("{arms: [x], conditions: [{signal: sink_hit, below: 1}]}", "'x' is an unknown arm; use control, candidate"),
        ("{fallback: x, conditions: [{signal: sink_hit, below: 1}]}", "rollout.guard.fallback: 'x' is an unknown arm"),
        (
            "{fallback: other, arms: [other], conditions: [{signal: sink_hit, below: 1}]}",
            "'other' is the fallback itself; guard other arms",
        ),
    ],
)
def test_refuses_a_bad_guard(guard: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rollout(f"{ARMS}guard: {guard}\n")
    assert message in str(caught.value)


def test_a_trip_puts_the_arm_in_observe() -> None:
    found = Override(guard={"candidate": TRIP}).over(rollout())
    assert found.arms["candidate"] == rollout().arms["candidate"].model_copy(update={"mode": Mode.OBSERVE})
    assert found.arms["other"] == rollout().arms["other"]


@pytest.mark.parametrize(("fallback", "same_as"), [("other", "other"), ("gone", None)])
def test_a_trip_may_name_another_arm(fallback: str, same_as: str | None) -> None:
    trips = {"candidate": TRIP.model_copy(update={"fallback": fallback}), "other": TRIP}
    found = Override(guard=trips).over(rollout())
    if same_as is None:
        assert found.arms["candidate"].mode is Mode.OBSERVE
    else:
        assert found.arms["candidate"] == rollout().arms[same_as]


def test_a_trip_of_an_arm_that_is_gone_harms_nothing() -> None:
    assert Override(guard={"gone": TRIP}).over(rollout()) == rollout()


def test_a_trip_is_kept_by_those_who_do_not_speak_of_it(tmp_path: Path) -> None:
    base, state = tmp_path / "rollout.yaml", tmp_path / "state.json"
    base.write_text(ARMS + GUARD)
    watcher = RolloutWatcher(base, state)
    update_override(state, lambda old: old.model_copy(update={"guard": {"candidate": TRIP}}))
    assert watcher.poll().rollout.arms["candidate"].mode is Mode.OBSERVE
    assert watcher.set_override(Override(enabled=False)).override.guard == {"candidate": TRIP}
    assert watcher.status()["guard"]["candidate"]["reason"] == "why"
    assert watcher.set_override(Override(guard={})).rollout.arms["candidate"].mode is Mode.SPARSE_MERGE
    assert read_override(state) == Override()
