"""Drift statistics, log-sum-exp bases, fingerprints."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from kvplugin.replay import (
    CompareSettings,
    KVPool,
    RopeLayout,
    compare,
    content_fingerprint,
    execution_fingerprint,
    prefix_fingerprint,
)
from kvplugin.replay.drift import Drift, measure
from kvplugin.replay.fingerprint import content_digest, digest
from kvplugin.replay.lse_base import named_ratio
from kvplugin.replay.selftest.synthetic import Shape, make_inputs

INF = math.inf


def drift(found: list[float], expected: list[float], tolerance: float = 0.0, **options: object) -> Drift:
    return measure("x", torch.tensor(found), torch.tensor(expected), tolerance, ("place",), **options)  # type: ignore[arg-type]


def test_statistics() -> None:
    found = drift([float(i) for i in range(100)], [0.0] * 100, 98.0)
    assert (found.max, found.mean, found.p95, found.p99) == (99.0, 49.5, 94.0, 98.0)
    assert (found.active, found.over, found.unmatched) == (100, 1, 0)
    assert (found.worst, found.found, found.expected) == ({"place": 99}, 99.0, 0.0)


def test_equal_values_count_as_zero_infinities_included() -> None:
    found = drift([1.0, INF, -INF], [1.0, INF, -INF])
    assert (found.max, found.mean, found.active, found.unmatched, found.over) == (0.0, 0.0, 3, 0, 0)


@pytest.mark.parametrize("found", [INF, -INF, math.nan])
def test_infinite_on_one_side_only(found: float) -> None:
    result = drift([1.0, found], [1.0, 2.0], tolerance=INF)
    assert (result.unmatched, result.over, result.max, result.worst) == (1, 1, 0.0, {"place": 1})
    assert (result.found, result.expected) == (None, 2.0)
    json.loads(result.model_dump_json(), parse_constant=pytest.fail)


def test_only_active_elements_count() -> None:
    found = drift([5.0, 1.0], [0.0, 0.5], active=torch.tensor([False, True]))
    assert (found.active, found.max, found.worst) == (1, 0.5, {"place": 1})
    nothing = drift([5.0], [0.0], active=torch.tensor([False]))
    assert (nothing.active, nothing.max, nothing.worst, nothing.within) == (0, 0.0, None, True)


def test_the_larger_of_tolerance_and_floor() -> None:
    assert not drift([1.0], [1.5], 0.1).within
    assert drift([1.0], [1.5], 0.1, floor=0.5).within
    assert drift([1.0], [1.5], 0.5, floor=0.1).within


def test_bitwise() -> None:
    assert drift([1.0, -INF], [1.0, -INF], bitwise=True).within
    assert not drift([0.0], [-0.0], INF, bitwise=True).within
    assert not drift([1.0], [1.0 + 2**-20], INF, floor=1.0, bitwise=True).within


def test_the_worst_is_relative_to_its_tolerance() -> None:
    found = measure("x", torch.tensor([10.0, 1.0]), torch.zeros(2), torch.tensor([100.0, 0.5]), ("place",))
    assert (found.max, found.worst, found.tolerance) == (10.0, {"place": 1}, 0.5)


def test_ratios_of_bases_are_named() -> None:
    lse = torch.tensor([3.0, -2.0, -INF, 11.0])
    assert named_ratio(lse * math.log2(math.e), lse) == "log2(e)"
    assert named_ratio(lse * math.log(2), lse) == "1/log2(e)"
    assert named_ratio(lse * 1.44, lse) is None
    assert named_ratio(lse, lse) is None
    assert named_ratio(torch.tensor([1.0, INF]), torch.tensor([1.0, 2.0])) is None
    assert named_ratio(torch.zeros(2), torch.zeros(2)) is None


def test_fields_are_length_prefixed() -> None:
    assert digest(["ab", "c"]) != digest(["a", "bc"])
    assert digest(["a", ""]) != digest(["a"])
    assert len(digest([])) == 32


@pytest.mark.parametrize("latent", [0, 8])
def test_content_does_not_know_the_page_layout(latent: int) -> None:
    shape = Shape(length=50, page=16, latent=latent)
    inputs = make_inputs(shape)
    wide = 5
    tokens = content_tokens(inputs.pool.keys, inputs.block_table[0], 50)
    values = None if inputs.pool.values is None else content_tokens(inputs.pool.values, inputs.block_table[0], 50)

    def repaged(rows: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.cat([rows, rows.new_full((-len(rows) % wide, *rows.shape[1:]), fill)]).view(
            -1, wide, *rows.shape[1:]
        )

    positions = repaged(torch.arange(50), -1)
    other = replace(
        inputs,
        pool=KVPool(inputs.pool.format, repaged(tokens, 7.0), None if values is None else repaged(values, 7.0), latent),
        block_table=torch.arange(10).view(1, 10),
        global_token_positions=positions,
        key_position_ids=positions,
    )
    assert content_fingerprint(other, 0) == content_fingerprint(inputs, 0)
    assert prefix_fingerprint(other, 0, 37) == prefix_fingerprint(inputs, 0, 37)
    assert content_digest(other, 0).chunks == content_digest(inputs, 0).chunks


def content_tokens(elements: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    return elements[table].flatten(0, 1)[:length]


def test_content_knows_what_it_is_made_of() -> None:
    inputs = make_inputs(Shape(length=50))
    pool, seen = inputs.pool, {content_fingerprint(inputs, 0)}
    assert pool.values is not None
    table = inputs.block_table[0]
    for changed in (
        replace(inputs, pool=KVPool.gqa(pool.keys + 1, pool.values)),
        replace(inputs, pool=KVPool.gqa(pool.keys, pool.values + 1)),
        replace(inputs, pool=KVPool.gqa(pool.keys.bfloat16(), pool.values)),
        replace(inputs, rope=replace(inputs.rope, theta=500000.0)),
        replace(inputs, rope=replace(inputs.rope, layout=RopeLayout.INTERLEAVED)),
        replace(inputs, rope=replace(inputs.rope, k_dtype=torch.bfloat16)),
        replace(inputs, global_token_positions=inputs.global_token_positions + 1),
        replace(inputs, kv_seq_lens=inputs.kv_seq_lens - 1),
        replace(inputs, block_table=table.flip(0).unsqueeze(0)),
    ):
        found = content_fingerprint(changed, 0)
        assert found not in seen
        seen.add(found)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 40, 50])
def test_prefixes_know_every_token_and_no_more(length: int) -> None:
    inputs = make_inputs(Shape(length=50, page=8))
    pool, slot = inputs.pool, lambda token: (int(inputs.block_table[0, token // 8]), token % 8)
    assert pool.values is not None
    expected = prefix_fingerprint(inputs, 0, length)
    for elements in ("keys", "values"):
        for token in range(50):
            altered = getattr(pool, elements).clone()
            altered[slot(token)][..., 0] += 1
            changed = replace(inputs, pool=replace(pool, **{elements: altered}))
            assert (prefix_fingerprint(changed, 0, length) != expected) == (token < length), (elements, token)


def test_fingerprints_are_per_request() -> None:
    inputs = make_inputs(Shape(length=40, world=2), batch=2)
    before = compare(inputs).report.fingerprints
    altered = inputs.pool.keys.clone()
    altered[inputs.block_table[1, 0]] += 1
    after = compare(replace(inputs, pool=replace(inputs.pool, keys=altered))).report.fingerprints
    assert before[0] == after[0]
    assert before[1].content != after[1].content
    assert before[1].execution == after[1].execution


def test_execution_identity() -> None:
    settings = CompareSettings()
    base = execution_fingerprint(settings, 16, [0, 1], [[0, 1]])
    others = [
        execution_fingerprint(settings, 32, [0, 1], [[0, 1]]),
        execution_fingerprint(settings, 16, [1, 0], [[0, 1]]),
        execution_fingerprint(settings, 16, [0, 1], [[1, 0]]),
        execution_fingerprint(settings, 16, [0, 1], [[0], [1]]),
        execution_fingerprint(CompareSettings(split_size=16), 16, [0, 1], [[0, 1]]),
        execution_fingerprint(CompareSettings(backend="other"), 16, [0, 1], [[0, 1]]),
    ]
    assert len({base, *others}) == 7


def test_fingerprints_do_not_change_between_versions() -> None:
    """Captures and prefix stores outlive a release; a change of the digest needs a new version label in its header."""
    inputs = make_inputs(Shape(length=20, page=8, heads=1, kv_heads=1, dim=4))
    pool = KVPool.gqa(torch.arange(192.0).view(6, 8, 1, 4), torch.arange(192.0, 384.0).view(6, 8, 1, 4))
    positions = torch.arange(48).view(6, 8)
    plain = replace(
        inputs,
        pool=pool,
        block_table=torch.tensor([[0, 1, 2]]),
        global_token_positions=positions,
        key_position_ids=positions,
    )
    assert content_fingerprint(plain, 0) == "a98e1070fbb5badf9f7dfd4496145f32"
    assert prefix_fingerprint(plain, 0, 18) == "df25d65cea31bb3805b5a1750494439b"
    assert execution_fingerprint(CompareSettings(), 8, [0, 1, 0], [[0, 1, 2]]) == "3103f7fa1e51a2480f4ef5e9a0fc0c6c"
