from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvplugin.config import Mode, Placement
from kvplugin.errors import ConfigError
from kvplugin.requests.fits import engine_conflicts, most_listed
from kvplugin.requests.override import Override, parse_override
from kvplugin.requests.rollout import Key, parse_rollout, rollout_of
from kvplugin.requests.rollout_schema import schema

SCHEMA = Path(__file__).parents[2] / "docs" / "rollout-schema.json"
TWO = """
arms:
  control: {mode: observe}
  candidate: {mode: topology_sparse_merge, sink_tokens: 8}
shares: {control: 0.95, candidate: 0.05}
default_arm: control
"""


def refusals(text: str) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        parse_rollout(text, "rollout.yaml")
    return [str(problem) for problem in refusal.value.problems]


def test_a_whole_file() -> None:
    rollout = parse_rollout(TWO, "rollout.yaml")
    assert rollout.enabled
    assert rollout.key is Key.SESSION
    assert rollout.default == "control"
    assert rollout.arms["candidate"].mode is Mode.SPARSE_MERGE
    assert rollout.arms["candidate"].sink_tokens == 8
    assert [rollout.share(arm) for arm in rollout.arms] == [0.95, 0.05]


def test_json_is_yaml() -> None:
    rollout = parse_rollout(TWO, "a")
    assert parse_rollout(json.dumps(rollout.model_dump(mode="json")), "b") == rollout


def test_one_arm_needs_nothing_else() -> None:
    rollout = parse_rollout("arms: {only: {}}", "a")
    assert (rollout.default, rollout.share("only")) == ("only", 1.0)


def test_nothing_given_is_all_to_the_default_and_0_is_0() -> None:
    given = {"arms": {"a": {}, "b": {}, "c": {}}, "default_arm": "b"}
    assert [rollout_of(given).share(arm) for arm in "abc"] == [0, 1, 0]
    assert [rollout_of({**given, "shares": {"a": 1, "b": 0}}).share(arm) for arm in "abc"] == [1, 0, 0]


SIXTEEN = ", ".join(f"a{i}: {{}}" for i in range(17))


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("", ["rollout: None is not a mapping; give keys such as arms"]),
        ("arms: {a: {}}\nshares: {a: 0.9}", ["rollout.shares: add up to 0.9; make them add up to 1"]),
        (
            "arms: {a: {}}\nshares: {a: 0.5, b: 0.5}\ndefault_arm: c",
            [
                "rollout.shares.b: unknown arm; use a",
                "rollout.default_arm: 'c' is an unknown arm; use a",
            ],
        ),
        ("arms: {a: {}, b: {}}", ["rollout.default_arm: missing; name one of a, b"]),
        ("arms: {a: {}}\nshares: {a: true}", ["rollout.shares.a: True is not a share; use a number from 0 to 1"]),
        ("arms: {a: {}}\nshares: {a: .nan}", ["rollout.shares.a: nan is not a share; use a number from 0 to 1"]),
        (
            "arms: {a: {}}\nshares: {a: -0.5}",
            ["rollout.shares.a: -0.5 is not valid; input should be greater than or equal to 0"],
        ),
        (
            "arms: {a: {mode: topology_merge, sink_tokens: -1}}",
            [
                "rollout.arms.a.mode: 'topology_merge' is unknown; use disabled, observe, topology_sparse_merge, "
                "topology_compress_sparse, topology_only; did you mean 'topology_sparse_merge'?",
                "rollout.arms.a.sink_tokens: -1 is not valid; input should be greater than or equal to 0",
            ],
        ),
        (
            "arms: {a: {sinks: 3}}\nshare: {}",
            [
                "rollout.arms.a.sinks: unknown key; use mode, sink_tokens, sink_blocks, local_tokens, local_blocks, "
                "witness_blocks, witness, coverage_segments, block_size, max_structural_fraction, eviction, fill, "
                "coordinate_mismatch, check_duplicates, phases, limits; did you mean 'sink_tokens'?",
                "rollout.share: unknown key; use enabled, arms, shares, key, default_arm, guard; "
                "did you mean 'shares'?",
            ],
        ),
        ("arms: {}", ["rollout.arms: {} is not valid; dictionary should have at least 1 item after validation, not 0"]),
        (
            "arms: {a: {}}\narms: {b: {}}",
            ["rollout.yaml: key 'arms' stands twice in line 2, column 1; give plain YAML"],
        ),
        ("arms: {a: {}, a: {}}", ["rollout.yaml: key 'a' stands twice in line 1, column 15; give plain YAML"]),
        ("arms: {1: {}}", ["rollout.yaml: key 1 is no text in line 1, column 8; give plain YAML"]),
        ("a: &x [1]\nb: *x", ["rollout.yaml: alias *x in line 2, column 4; give plain YAML"]),
        ("a: !!python/object:os.system {}", None),
        ("arms: [", None),
        ("[" * 100_000, None),
        ("x" * (1 << 20) + "x", [f"rollout.yaml: {(1 << 20) + 1} characters long; use at most {1 << 20}"]),
        ("arms: {a: {}}\nkey: user", ["rollout.key: 'user' is unknown; use session, request"]),
        ("arms: {a: {}}\nkey: 3", ["rollout.key: 3 is unknown; use session, request"]),
    ],
)
def test_refused(text: str, messages: list[str] | None) -> None:
    found = refusals(text)
    assert messages is None or found == messages
    assert all(len(message) < 600 for message in found)


@pytest.mark.parametrize("name", ["", "A", "a b", "ä", "-a", "a" * 33, "a\n"])
def test_names_of_arms_are_plain(name: str) -> None:
    (message,) = refusals(json.dumps({"arms": {name: {}}}))
    assert "pattern" in message


def test_no_more_than_sixteen_arms() -> None:
    (message,) = refusals(f"arms: {{{SIXTEEN}}}\ndefault_arm: a0")
    assert "at most 16 items" in message


def test_an_override_replaces_what_it_names() -> None:
    base = parse_rollout(TWO, "a")
    assert Override().over(base) == base
    assert not Override(enabled=False).over(base).enabled
    moved = parse_override("shares: {candidate: 1}", "b").over(base)
    assert [moved.share(arm) for arm in moved.arms] == [0, 1]
    grown = parse_override("arms: {third: {mode: disabled}, candidate: {mode: observe}}", "b").over(base)
    assert {name: str(arm.mode) for name, arm in grown.arms.items()} == {
        "control": "observe",
        "candidate": "observe",
        "third": "disabled",
    }
    with pytest.raises(ConfigError, match=r"rollout\.shares\.third: unknown arm; use control, candidate"):
        parse_override("shares: {third: 1}", "b").over(base)


def test_what_one_engine_cannot_follow() -> None:
    rollout = rollout_of(
        {
            "arms": {
                "wide": {"mode": "topology_sparse_merge", "sink_tokens": 40, "local_tokens": 0},
                "drift": {"mode": "observe", "witness": "drift", "witness_blocks": 1},
                "listed": {
                    "mode": "topology_sparse_merge",
                    "witness": "coverage",
                    "coverage_segments": 2,
                    "sink_tokens": 1,
                    "local_tokens": 1,
                },
            },
            "default_arm": "wide",
        }
    )
    problems = [str(p) for p in engine_conflicts(rollout, placement=Placement.AFTER_TOPK, width=64, longest_list=1)]
    assert [p.partition(":")[0] for p in problems] == [
        "rollout.arms.wide",
        "rollout.arms.drift.witness",
        "rollout.arms.listed.coverage_segments",
    ]
    assert "2 in an engine that was started for 1" in problems[2]
    before = list(engine_conflicts(rollout, placement=Placement.BEFORE_TOPK, width=4096))
    assert [p.key for p in before] == ["rollout.arms.drift.witness", "rollout.arms.listed.witness"]


def test_before_topk_wants_the_same_limits_of_all_that_lift() -> None:
    arms = {"a": {"mode": "topology_sparse_merge"}, "b": {"mode": "observe", "limits": {"max_rows": 3}}}
    given = {"arms": arms, "default_arm": "a"}
    assert [p.key for p in engine_conflicts(rollout_of(given), placement=Placement.BEFORE_TOPK, width=64)] == [
        "rollout.arms.b.limits"
    ]
    assert list(engine_conflicts(rollout_of(given), placement=Placement.AFTER_TOPK, width=64)) == []


def test_the_longest_list_is_that_of_coverage() -> None:
    rollout = rollout_of({"arms": {"a": {"mode": "observe"}}})
    assert most_listed(rollout, 64) == 0


def test_schema_is_current() -> None:
    assert json.loads(SCHEMA.read_text()) == schema(), "run: python -m kvplugin.requests.rollout_schema"
