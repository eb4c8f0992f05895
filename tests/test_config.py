from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from kvplugin.config import (
    Eviction,
    Fill,
    KvpluginConfig,
    MismatchAction,
    Mode,
    Phase,
    Placement,
    PolicyConfig,
    Witness,
    before_topk_conflicts,
    load_config,
    policy_conflicts,
)
from kvplugin.errors import ConfigError

MODES = "disabled, observe, topology_sparse_merge, topology_compress_sparse, topology_only"
INT32_MAX = 2**31 - 1
NOT_A_NUMBER = "input should be a valid integer, unable to parse string as an integer"

DEFAULTS = {
    "policy.mode": Mode.DISABLED,
    "policy.sink_tokens": 4,
    "policy.sink_blocks": None,
    "policy.local_tokens": "auto",
    "policy.local_blocks": None,
    "policy.witness_blocks": 0,
    "policy.witness": Witness.UNIFORM,
    "policy.coverage_segments": 0,
    "policy.block_size": 64,
    "policy.max_structural_fraction": 0.25,
    "policy.eviction": Eviction.LOWEST_SCORE,
    "policy.fill": Fill.LOCAL,
    "policy.coordinate_mismatch": MismatchAction.FALLBACK,
    "policy.check_duplicates": False,
    "policy.phases": (Phase.PREFILL, Phase.DECODE),
    "policy.limits.max_row_length": None,
    "policy.limits.max_rows": None,
    "policy.limits.max_elements": None,
    "policy.limits.max_width": 8192,
    "placement": Placement.AFTER_TOPK,
    "remap.grouped": True,
    "metrics.enabled": True,
    "metrics.sample_every": 64,
    "metrics.signals_every": 64,
    "rollout": None,
    "rollout_state": None,
    "rollout_writable": True,
}

ACCEPTED = [
    ("rollout", "arms.yaml", "arms.yaml"),
    ("rollout_writable", "false", False),
    ("policy.mode", " Topology_Sparse_Merge ", Mode.SPARSE_MERGE),
    ("policy.mode", Mode.ONLY, Mode.ONLY),
    ("policy.sink_tokens", "4", 4),
    ("policy.sink_tokens", 0, 0),
    ("policy.sink_tokens", INT32_MAX, INT32_MAX),
    ("policy.sink_blocks", "1", 1),
    ("policy.local_tokens", " AUTO ", "auto"),
    ("policy.local_tokens", "16", 16),
    ("policy.local_tokens", 0, 0),
    ("policy.local_blocks", 2, 2),
    ("policy.witness_blocks", "3", 3),
    ("policy.witness", "DRIFT", Witness.DRIFT),
    ("policy.block_size", 1, 1),
    ("policy.block_size", "65536", 65536),
    ("policy.max_structural_fraction", "0.5", 0.5),
    ("policy.max_structural_fraction", 1, 1.0),
    ("policy.eviction", "None", Eviction.NONE),
    ("policy.coordinate_mismatch", "raise", MismatchAction.RAISE),
    ("policy.check_duplicates", "true", True),
    ("policy.phases", "decode", (Phase.DECODE,)),
    ("policy.phases", " Prefill , decode", (Phase.PREFILL, Phase.DECODE)),
    ("policy.phases", ["prefill"], (Phase.PREFILL,)),
    ("policy.limits.max_row_length", 1, 1),
    ("policy.limits.max_rows", "12", 12),
    ("policy.limits.max_elements", 2**62, 2**62),
    ("policy.limits.max_width", None, None),
    ("placement", "After_TopK", Placement.AFTER_TOPK),
    ("remap.grouped", "false", False),
    ("metrics.enabled", False, False),
    ("metrics.sample_every", 2**20, 2**20),
    ("metrics.signals_every", 0, 0),
]

REFUSED = [
    ("policy.mode", "topology_merge",
     f"'topology_merge' is unknown; use {MODES}; did you mean 'topology_sparse_merge'?"),
    ("policy.mode", 3, f"3 is unknown; use {MODES}"),
    ("policy.mode", None, f"None is unknown; use {MODES}"),
    ("policy.sink_tokens", -1, "-1 is not valid; input should be greater than or equal to 0"),
    ("policy.sink_tokens", INT32_MAX + 1, f"{2**31} is not valid; input should be less than or equal to {INT32_MAX}"),
    ("policy.sink_tokens", True, "True is not a count; use a whole number"),
    ("policy.sink_tokens", "x", f"'x' is not valid; {NOT_A_NUMBER}"),
    ("policy.sink_blocks", -1, "-1 is not valid; input should be greater than or equal to 0"),
    ("policy.local_tokens", "many", "'many' is not a count; use auto or a whole number of at least 0"),
    ("policy.local_tokens", True, "True is not a count; use auto or a whole number of at least 0"),
    ("policy.local_tokens", -3, "-3 is not a count; use auto or a whole number of at least 0"),
    ("policy.local_tokens", [1], "[1] is not a count; use auto or a whole number of at least 0"),
    ("policy.local_blocks", 1.5,
     "1.5 is not valid; input should be a valid integer, got a number with a fractional part"),
    ("policy.witness_blocks", -1, "-1 is not valid; input should be greater than or equal to 0"),
    ("policy.witness", "uni", "'uni' is unknown; use uniform, drift, coverage; did you mean 'uniform'?"),
    ("policy.coverage_segments", -1, "-1 is not valid; input should be greater than or equal to 0"),
    ("policy.block_size", 0, "0 is not valid; input should be greater than or equal to 1"),
    ("policy.block_size", 65537, "65537 is not valid; input should be less than or equal to 65536"),
    ("policy.max_structural_fraction", 0, "0 is not valid; input should be greater than 0"),
    ("policy.max_structural_fraction", 1.01, "1.01 is not valid; input should be less than or equal to 1"),
    ("policy.max_structural_fraction", "nan", "'nan' is not valid; input should be a finite number"),
    ("policy.eviction", "inputorder",
     "'inputorder' is unknown; use lowest_score, none, oldest, input_order; did you mean 'input_order'?"),
    ("policy.fill", "locl", "'locl' is unknown; use local, none; did you mean 'local'?"),
    ("policy.coordinate_mismatch", "ignore", "'ignore' is unknown; use fallback, drop, raise"),
    ("policy.check_duplicates", "maybe",
     "'maybe' is not valid; input should be a valid boolean, unable to interpret input"),
    ("policy.phases", [], "[] is not valid; value should have at least 1 item after validation, not 0"),
    ("policy.phases", 5, "5 is not valid; input should be a valid tuple"),
    ("policy.limits", 3, "3 is not valid; input should be a valid dictionary or instance of Limits"),
    ("policy.limits.max_row_length", 0, "0 is not valid; input should be greater than or equal to 1"),
    ("policy.limits.max_rows", True, "True is not a count; use a whole number"),
    ("policy.limits.max_elements", "null", f"'null' is not valid; {NOT_A_NUMBER}"),
    ("policy.limits.max_width", -5, "-5 is not valid; input should be greater than or equal to 1"),
    ("policy.limits.rows", 1,
     "unknown key; use max_row_length, max_rows, max_elements, max_width; did you mean 'max_rows'?"),
    ("polcy", {}, "unknown key; use policy, placement, remap, metrics, rollout, rollout_state, rollout_writable; "
     "did you mean 'policy'?"),
    ("policy", 3, "3 is not valid; input should be a valid dictionary or instance of PolicyConfig"),
    ("rollout", "", "'' is not valid; string should have at least 1 character"),
    ("rollout_state", 3, "3 is not valid; input should be a valid string"),
    ("rollout_writable", "maybe", "'maybe' is not valid; input should be a valid boolean, unable to interpret input"),
    ("placement", "before", "'before' is unknown; use after_topk, before_topk; did you mean 'before_topk'?"),
    ("remap.grouped", "x", "'x' is not valid; input should be a valid boolean, unable to interpret input"),
    ("remap.group", True, "unknown key; use grouped; did you mean 'grouped'?"),
    ("metrics.enabled", "x", "'x' is not valid; input should be a valid boolean, unable to interpret input"),
    ("metrics.signals_every", -1, "-1 is not valid; input should be greater than or equal to 0"),
    ("metrics.sample_every", 0, "0 is not valid; input should be greater than or equal to 1"),
    ("metrics.sample_every", 2**20 + 1, "1048577 is not valid; input should be less than or equal to 1048576"),
]  # fmt: skip


def nested(dotted: str, value: object) -> dict[str, Any]:
    for name in reversed(dotted.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def settings_of(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from settings_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def refusals(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        load_config(raw)
    assert str(refusal.value) == "\n".join(map(str, refusal.value.problems))
    return str(refusal.value).splitlines()


def test_defaults() -> None:
    assert dict(settings_of(load_config({}))) == DEFAULTS
    assert load_config({}) == KvpluginConfig()


@pytest.mark.parametrize(("key", "raw", "value"), ACCEPTED)
def test_accepted(key: str, raw: object, value: object) -> None:
    assert dict(settings_of(load_config(nested(key, raw))))[key] == value


@pytest.mark.parametrize(("key", "raw", "message"), REFUSED)
def test_refused(key: str, raw: object, message: str) -> None:
    assert refusals(nested(key, raw)) == [f"kvplugin.{key}: {message}"]


def test_every_setting_has_an_accepted_and_a_refused_value() -> None:
    constrained_by_others = {"policy.coverage_segments", "policy.fill", "rollout_state"}
    assert {key for key, *_ in ACCEPTED} | constrained_by_others == set(DEFAULTS)
    assert set(DEFAULTS) <= {key for key, *_ in REFUSED}


def test_every_setting_is_described() -> None:
    def undescribed(model: type[BaseModel]) -> list[str]:
        return [name for name, field in model.model_fields.items() if not field.description]

    config = KvpluginConfig()
    assert [undescribed(type(model)) for model in (config, config.policy, config.policy.limits, config.metrics)] == [
        []
    ] * 4


def test_an_unknown_key_of_the_policy_lists_the_valid_ones() -> None:
    valid = ", ".join(PolicyConfig.model_fields)
    assert refusals({"policy": {"sink_token": 1}}) == [
        f"kvplugin.policy.sink_token: unknown key; use {valid}; did you mean 'sink_tokens'?"
    ]


def test_a_bad_phase_is_named_by_its_position() -> None:
    assert refusals(nested("policy.phases", "decode,x")) == [
        "kvplugin.policy.phases.1: 'x' is unknown; use prefill, decode"
    ]


@pytest.mark.parametrize("raw", [[], "policy.mode", None])
def test_something_else_than_a_mapping(raw: Any) -> None:
    assert refusals(raw) == [f"kvplugin: {raw!r} is not a mapping; give keys such as policy.mode"]


def test_several_problems_are_told_at_once() -> None:
    found = refusals({"policy": {"mode": "foo", "block_size": 0, "limits": {"max_rows": 0}}, "placement": "x", "y": 1})
    assert [line.partition(":")[0] for line in found] == [
        "kvplugin.policy.mode",
        "kvplugin.policy.block_size",
        "kvplugin.policy.limits.max_rows",
        "kvplugin.placement",
        "kvplugin.y",
    ]


@pytest.mark.parametrize("kind", ["sink", "local"])
def test_blocks_replace_the_default_in_tokens(kind: str) -> None:
    policy = PolicyConfig(**{f"{kind}_blocks": 2})
    assert (getattr(policy, f"{kind}_tokens"), getattr(policy, f"{kind}_blocks")) == (None, 2)


CONFLICTS = [
    ({"sink_tokens": 4, "sink_blocks": 1}, ["sink_blocks: 1 given beside sink_tokens = 4; give one of the two"]),
    ({"local_tokens": 0, "local_blocks": 0}, ["local_blocks: 0 given beside local_tokens = 0; give one of the two"]),
    ({"sink_tokens": None}, ["sink_tokens: null without blocks; give a number, or sink_blocks"]),
    ({"local_tokens": None}, ["local_tokens: null without blocks; give a number, or local_blocks"]),
    ({"witness": "coverage"}, ["coverage_segments: 0 with witness = coverage; give at least 1 segment"]),
    ({"witness": "coverage", "coverage_segments": 4, "eviction": "oldest"},
     ["eviction: 'oldest' with witness = coverage; use lowest_score"]),
    ({"coverage_segments": 4}, ["coverage_segments: 4 with witness = uniform; use witness = coverage, or 0"]),
    ({"mode": "topology_only", "sink_tokens": 0, "local_blocks": 0},
     ["mode: 'topology_only' with no sink, local or witness tokens; give at least one; rows would attend to nothing"]),
    ({"fill": "none"}, ["fill: 'none' with mode = disabled; use local; only topology_only may leave slots empty"]),
    ({"fill": "none", "sink_tokens": None, "coverage_segments": 2},
     ["sink_tokens: null without blocks; give a number, or sink_blocks",
      "coverage_segments: 2 with witness = uniform; use witness = coverage, or 0",
      "fill: 'none' with mode = disabled; use local; only topology_only may leave slots empty"]),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "messages"), CONFLICTS)
def test_settings_that_cannot_stand_together(policy: dict[str, Any], messages: list[str]) -> None:
    assert refusals({"policy": policy}) == [f"kvplugin.policy.{message}" for message in messages]


@pytest.mark.parametrize(
    "settings",
    [
        {"sink_tokens": 1, "local_tokens": 0},
        {"sink_tokens": 0, "local_blocks": 1},
        {"sink_tokens": 0, "local_tokens": 0, "witness_blocks": 1},
        {"sink_tokens": 0, "local_tokens": 0, "witness": "coverage", "coverage_segments": 1},
        {"fill": "none"},
    ],
)
def test_topology_only_needs_one_kind_of_structure(settings: dict[str, Any]) -> None:
    assert list(policy_conflicts(PolicyConfig(mode=Mode.ONLY, **settings))) == []


BEFORE_TOPK = [
    ({}, ["policy.mode: 'disabled' with placement = before_topk; "
          "use topology_sparse_merge or topology_compress_sparse, or placement = after_topk"]),
    ({"mode": "topology_only"}, ["policy.mode: 'topology_only' with placement = before_topk; "
                                 "use topology_sparse_merge or topology_compress_sparse, or placement = after_topk"]),
    ({"mode": "topology_sparse_merge", "eviction": "none", "witness": "drift"},
     ["policy.eviction: 'none' with placement = before_topk; use lowest_score, or placement = after_topk",
      "policy.witness: 'drift' with placement = before_topk; use uniform, or placement = after_topk"]),
    ({"mode": "topology_sparse_merge", "witness": "coverage", "coverage_segments": 4},
     ["policy.witness: 'coverage' with placement = before_topk; use uniform, or placement = after_topk"]),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "messages"), BEFORE_TOPK)
def test_before_topk_refuses_what_a_lift_cannot_do(policy: dict[str, Any], messages: list[str]) -> None:
    found = refusals({"placement": "before_topk", "policy": policy})
    assert found == [f"kvplugin.{message}" for message in messages]


@pytest.mark.parametrize("mode", [Mode.SPARSE_MERGE, Mode.COMPRESS_SPARSE])
def test_before_topk_takes_the_merge_modes(mode: Mode) -> None:
    config = load_config({"placement": " Before_TopK ", "policy": {"mode": mode, "witness_blocks": 2}})
    assert config.placement is Placement.BEFORE_TOPK
    assert list(before_topk_conflicts(config.policy)) == []


def test_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        KvpluginConfig().policy.mode = Mode.ONLY  # type: ignore[misc]


@pytest.mark.parametrize(
    ("raw", "messages"),
    [
        (
            {"rollout": "r.yaml", "policy": {"mode": "observe"}},
            ["policy: given beside a rollout; give each arm of the rollout its policy, or drop rollout"],
        ),
        ({"rollout_state": "s.json"}, ["rollout_state: given without a rollout; give rollout, or drop rollout_state"]),
    ],
)
def test_a_rollout_takes_the_place_of_the_policy(raw: dict[str, Any], messages: list[str]) -> None:
    assert refusals(raw) == [f"kvplugin.{message}" for message in messages]


@pytest.mark.parametrize("beside", [{"placement": "before_topk"}, {"policy": {}}, {"rollout_state": "s.json"}])
def test_what_goes_with_a_rollout(beside: dict[str, Any]) -> None:
    assert load_config({"rollout": "r.yaml", **beside}).rollout == "r.yaml"
