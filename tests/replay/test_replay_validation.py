"""Every rule of validation: what it refuses, by field, batch row, slot and value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvplugin.errors import ArgumentError
from kvplugin.replay import (
    CompareSettings,
    ContextParallel,
    IdentityError,
    KVPool,
    LogProbHead,
    LseBase,
    Observed,
    PageFormat,
    PrefixIdentity,
    ReplayInputs,
    RopeState,
    compare,
    decode_replay,
    paged,
    validate,
)
from kvplugin.replay.selftest.synthetic import Shape, make_inputs

GQA = Shape(length=20, page=8, queries=2, heads=4, kv_heads=2, dim=8, world=2)
MLA = Shape(length=20, page=8, latent=12, rope=4, kv_heads=1)


def good(**changes: Any) -> ReplayInputs:
    """Two requests of 20 and 19 tokens on pages of 8; page table and positions in plain order."""
    inputs = make_inputs(GQA, batch=2)
    table = torch.arange(6).view(2, 3)
    positions = torch.full((9, 8), -1)
    for row, length in enumerate((20, 19)):
        positions.view(-1)[row * 24 : row * 24 + length] = torch.arange(length)
    plain = replace(inputs, block_table=table, global_token_positions=positions, key_position_ids=positions.clone())
    return replace(plain, **changes)


def mla(**changes: Any) -> ReplayInputs:
    return replace(make_inputs(MLA), **changes)


def edited(field: str, index: tuple[int, ...], value: float, dtype: torch.dtype | None = None) -> ReplayInputs:
    """Good inputs with one element of one tensor replaced."""
    inputs = good()
    tensor = getattr(inputs, field).clone()
    tensor[index] = value
    return replace(inputs, **{field: tensor})


def rope(**changes: Any) -> ReplayInputs:
    inputs = good()
    return replace(inputs, rope=replace(inputs.rope, **changes))


def owners(index: tuple[int, int] | None = None, value: int = 0, world: object = 2) -> ReplayInputs:
    inputs = good()
    assert inputs.context_parallel is not None
    held = inputs.context_parallel.block_owners.clone()
    if index is not None:
        held[index] = value
    return replace(inputs, context_parallel=ContextParallel(held, world))  # type: ignore[arg-type]


def shorter(length: int = 7) -> ReplayInputs:
    """The second request with one active page."""
    inputs = good()
    lengths = torch.tensor([20, length])
    query = torch.tensor([[18, 19], [length - 2, length - 1]])
    return replace(inputs, kv_seq_lens=lengths, cache_position=query, query_position_ids=query, context_parallel=None)


def selected(*rows: list[int]) -> ReplayInputs:
    """The first request's first query selects these; the others select token 0."""
    selection = torch.full((2, 2, 4), -1)
    selection[..., 0] = 0
    selection[0, 0] = torch.tensor(rows[0])
    return good(selection=selection)


def head(**changes: Any) -> ReplayInputs:
    tensors = {
        "weight": torch.randn(5, 32),
        "targets": torch.zeros(2, 2, dtype=torch.long),
        "mask": torch.ones(2, 2, dtype=torch.bool),
    }
    return good(head=LogProbHead(**tensors | changes))


def pool(keys: torch.Tensor, values: torch.Tensor | None, **changes: Any) -> ReplayInputs:
    return good(pool=KVPool(**{"format": PageFormat.GQA, "keys": keys, "values": values} | changes))


KEYS = good().pool.keys
NAN = float("nan")

SHAPES: list[tuple[Callable[[], ReplayInputs], str]] = [
    (lambda: good(q=torch.zeros(2, 4, 8)),
     "replay.q: got float32 [2, 4, 8] on cpu; must be float32 or bfloat16 or float16 [B, Hq, Sq, 8] on cpu"),
    (lambda: good(q=torch.zeros(2, 4, 2, 7)),
     "replay.q: got float32 [2, 4, 2, 7] on cpu; must be float32 or bfloat16 or float16 [B, Hq, Sq, 8] on cpu"),
    (lambda: good(q=torch.zeros(2, 4, 0, 8)),
     "replay.q: got float32 [2, 4, 0, 8] on cpu; must be float32 or bfloat16 or float16 [B, Hq, Sq, 8] on cpu"),
    (lambda: good(q=torch.zeros(2, 4, 2, 8, dtype=torch.float64)),
     "replay.q: got float64 [2, 4, 2, 8] on cpu; must be float32 or bfloat16 or float16 [B, Hq, Sq, 8] on cpu"),
    (lambda: good(q=torch.zeros(2, 4, 2, 8, device="meta")),
     "replay.q: got float32 [2, 4, 2, 8] on meta; must be float32 or bfloat16 or float16 [B, Hq, Sq, 8] on cpu"),
    (lambda: good(q=torch.zeros(2, 3, 2, 8)), "replay.q: 3 query heads; must be a multiple of the 2 KV heads"),
    (lambda: pool(KEYS.flatten(2), KEYS),
     "replay.pool.keys: got float32 [9, 8, 16] on cpu; "
     "must be float32 or bfloat16 or float16 [P, page, Hkv, D] on cpu"),
    (lambda: pool(KEYS[:, :0], KEYS[:, :0]),
     "replay.pool.keys: page size 0 in [9, 0, 2, 8]; the page size must be positive"),
    (lambda: pool(KEYS, None), "replay.pool.values: None; GQA pages need values; MLA pages have none"),
    (lambda: pool(KEYS, KEYS[:, :, :1]),
     "replay.pool.values: got float32 [9, 8, 1, 8] on cpu; "
     "must be float32 or bfloat16 or float16 [9, 8, 2, Dv] on cpu"),
    (lambda: pool(KEYS.flatten(2), KEYS, format=PageFormat.MLA, latent_dim=12),
     "replay.pool.values: given; mla pages have none: the latents are the values"),
    (lambda: mla(pool=KVPool.mla(mla().pool.keys, 0)),
     "replay.pool.latent_dim: got 0; must be a positive integer"),
    (lambda: mla(pool=KVPool.mla(mla().pool.keys, 17)),
     "replay.pool.latent_dim: got 17; must be at most C + R = 16"),
    (lambda: mla(pool=KVPool.fp8_ds_mla(torch.zeros(6, 8, 655, dtype=torch.uint8))),
     "replay.pool.keys: got uint8 [6, 8, 655] on cpu; must be uint8 [P, page, 656] on cpu"),
    (lambda: good(block_table=torch.zeros(2, 3)),
     "replay.block_table: got float32 [2, 3] on cpu; must be int32 or int64 [2, M] on cpu"),
    (lambda: good(kv_seq_lens=torch.tensor([20])),
     "replay.kv_seq_lens: got int64 [1] on cpu; must be int32 or int64 [2] on cpu"),
    (lambda: good(cache_position=torch.tensor([[18, 19]])),
     "replay.cache_position: got int64 [1, 2] on cpu; must be int32 or int64 [2, 2] on cpu"),
    (lambda: good(query_position_ids=torch.zeros(2, 2)),
     "replay.query_position_ids: got float32 [2, 2] on cpu; must be int32 or int64 [2, 2] on cpu"),
    (lambda: good(global_token_positions=torch.zeros(9, 7, dtype=torch.long)),
     "replay.global_token_positions: got int64 [9, 7] on cpu; must be int32 or int64 [9, 8] on cpu"),
    (lambda: good(key_position_ids=torch.zeros(8, 8, dtype=torch.long)),
     "replay.key_position_ids: got int64 [8, 8] on cpu; must be int32 or int64 [9, 8] on cpu"),
    (lambda: good(selection=torch.zeros(2, 4, dtype=torch.long)),
     "replay.selection: got int64 [2, 4] on cpu; must be int32 or int64 [2, 2, K] on cpu"),
    (lambda: good(out_dtype=torch.float64),
     "replay.out_dtype: got torch.float64; must be torch.float32, torch.bfloat16 or torch.float16"),
    *((lambda value=value: good(scale=value),
       f"replay.scale: got {value!r}; must be a positive finite number")
      for value in (True, 0.0, -1.0, math.inf, NAN, "1")),
    *((lambda value=value: rope(theta=value),
       f"replay.rope.theta: got {value!r}; must be a positive finite number")
      for value in (True, 0, math.inf)),
    (lambda: rope(rotary_dim=4),
     "replay.rope.rotary_dim: got 4; must be the head size, 8: partial rotary is not replayed"),
    (lambda: mla(rope=replace(mla().rope, rotary_dim=2)),
     "replay.rope.rotary_dim: got 2; must be the rope part R, 4: partial rotary is not replayed"),
    (lambda: mla(pool=KVPool.mla(mla().pool.keys, 11), rope=replace(mla().rope, rotary_dim=5)),
     "replay.rope.rotary_dim: got 5; must be even"),
    (lambda: mla(rope=replace(mla().rope, rotary_first=True)),
     "replay.rope.rotary_first: got True; must be False: MLA's rope part comes last"),
    (lambda: rope(cast_before_rotation=True),
     "replay.rope.cast_before_rotation: got True; must be False: a cast before the rotation is not replayed"),
    (lambda: rope(q_dtype=torch.int32),
     "replay.rope.q_dtype: got torch.int32; must be torch.float32, torch.bfloat16 or torch.float16"),
    (lambda: rope(k_dtype=torch.float64),
     "replay.rope.k_dtype: got torch.float64; must be torch.float32, torch.bfloat16 or torch.float16"),
    (lambda: owners(world=0), "replay.context_parallel.world_size: got 0; must be a positive integer"),
    (lambda: owners(world=True), "replay.context_parallel.world_size: got True; must be a positive integer"),
    (lambda: good(context_parallel=ContextParallel(torch.zeros(2, 2, dtype=torch.long), 2)),
     "replay.cp_block_owners: got int64 [2, 2] on cpu; must be int32 or int64 [2, 3] on cpu"),
    (lambda: good(prefixes=(None,)), "replay.prefixes: got 1; must be one per request, 2, or none"),
    (lambda: good(prefixes=(None, PrefixIdentity("k", None, None))),
     "replay.prefixes: row 1: length and fingerprint missing; key, length and fingerprint, or no prefix"),
    (lambda: good(prefixes=(PrefixIdentity("k", 0, "f"), None)),
     "replay.prefixes, row 0, length: got 0; must be a positive integer"),
    (lambda: good(prefixes=(None, PrefixIdentity("k", 20, "f"))),
     "replay.prefixes: row 1: length 20; must be at most the row's 19 tokens"),
    (lambda: head(weight=torch.zeros(5, 31)),
     "replay.head.weight: got float32 [5, 31] on cpu; must be float32 or bfloat16 or float16 [V, 32] on cpu"),
    (lambda: head(targets=torch.zeros(2, 1, dtype=torch.long)),
     "replay.head.targets: got int64 [2, 1] on cpu; must be int64 [2, 2] on cpu"),
    (lambda: head(mask=torch.ones(2, 2)), "replay.head.mask: got float32 [2, 2] on cpu; must be bool [2, 2] on cpu"),
]  # fmt: skip

VALUES: list[tuple[Callable[[], ReplayInputs], str]] = [
    (lambda: edited("kv_seq_lens", (1,), 0), "replay.kv_seq_lens: row 1: 0; must be in [1, 24]"),
    (lambda: edited("kv_seq_lens", (0,), 25), "replay.kv_seq_lens: row 0: 25; must be in [1, 24]"),
    (lambda: edited("block_table", (1, 2), 9), "replay.block_table: row 1, slot 2: 9; must be in [0, 9)"),
    (lambda: edited("block_table", (0, 1), -1), "replay.block_table: row 0, slot 1: -1; must be in [0, 9)"),
    (shorter, "replay.block_table: row 1, slot 1: 4; must be -1 past the request's pages"),
    (lambda: owners((0, 2), 2), "replay.cp_block_owners: row 0, slot 2: 2; must be in [0, 2)"),
    (lambda: owners((1, 0), -1), "replay.cp_block_owners: row 1, slot 0: -1; must be in [0, 2)"),
    (lambda: replace(shorter(), block_table=torch.tensor([[0, 1, 2], [3, -1, -1]]),
                     context_parallel=ContextParallel(torch.tensor([[0, 1, 0], [1, 0, -1]]), 2)),
     "replay.cp_block_owners: row 1, slot 1: 0; must be -1 past the request's blocks"),
    (lambda: edited("q", (1, 3, 0, 5), NAN), "replay.q: row 1, head 3, query 0, element 5: nan; must be finite"),
    (lambda: selected([0, 20, -1, -1]),
     "replay.selection: row 0, query 0, slot 1: 20; must be a token below the request's length, or -1"),
    (lambda: selected([0, -2, -1, -1]),
     "replay.selection: row 0, query 0, slot 1: -2; must be a token below the request's length, or -1"),
    (lambda: selected([0, -1, 3, -1]),
     "replay.selection: row 0, query 0, slot 2: 3; must not follow -1: unused slots come last"),
    (lambda: selected([4, 5, 4, -1]),
     "replay.selection: row 0, query 0, slot 2: 4; must not repeat in a query's selection"),
    (lambda: selected([0, 19, -1, -1]),
     "replay.selection: row 0, query 0, slot 1: 19; must not lie after the query's position"),
    (lambda: head(targets=torch.tensor([[0, 0], [5, 0]])), "replay.head.targets: row 1, query 0: 5; must be in [0, 5)"),
]  # fmt: skip

IDENTITY: list[tuple[Callable[[], ReplayInputs], str]] = [
    (lambda: edited("block_table", (0, 2), 0),
     "replay.block_table: row 0, slot 2: 0; must not repeat among a request's pages"),
    (lambda: edited("global_token_positions", (0, 3), -1),
     "replay.global_token_positions: row 0, token 3: -1; must not be -1 in use"),
    (lambda: edited("global_token_positions", (1, 2), 9),
     "replay.global_token_positions: row 0, token 10: 9; must be larger than the token's before it"),
    (lambda: edited("key_position_ids", (4, 1), 10),
     "replay.key_position_ids: row 1, token 9: 10; must equal global_token_positions"),
    (lambda: edited("cache_position", (1, 1), 17),
     "replay.cache_position: row 1, query 1: 17; must equal query_position_ids"),
    (lambda: replace(edited("cache_position", (0, 1), 18), query_position_ids=torch.tensor([[18, 18], [17, 18]])),
     "replay.cache_position: row 0, query 1: 18; must be larger than the query's before it"),
    (lambda: replace(edited("cache_position", (1, 1), 30), query_position_ids=torch.tensor([[18, 19], [17, 30]])),
     "replay.cache_position: row 1, query 1: 30; must be the position of a cached token"),
]  # fmt: skip


def test_the_good_inputs_are_good() -> None:
    validate(good())
    validate(mla())
    validate(owners())
    validate(selected([0, 18, 3, -1]))
    validate(head())


@pytest.mark.parametrize(
    ("make", "message"), [*SHAPES, *VALUES], ids=lambda each: each if isinstance(each, str) else ""
)
def test_refuses(make: Callable[[], ReplayInputs], message: str) -> None:
    with pytest.raises(ArgumentError) as error:
        validate(make())
    assert str(error.value) == message
    assert not isinstance(error.value, IdentityError)


@pytest.mark.parametrize(("make", "message"), IDENTITY, ids=lambda each: each if isinstance(each, str) else "")
def test_refuses_contradicting_identity(make: Callable[[], ReplayInputs], message: str) -> None:
    with pytest.raises(IdentityError) as error:
        validate(make())
    assert str(error.value) == message


def test_fp8_pages_hold_rotated_keys() -> None:
    inputs = mla(pool=KVPool.fp8_ds_mla(torch.zeros(6, 8, 656, dtype=torch.uint8)), q=torch.zeros(1, 4, 1, 576))
    bad = replace(inputs, rope=replace(inputs.rope, rotary_dim=64, k_state=RopeState.PRE))
    with pytest.raises(ArgumentError, match=r"replay.rope.k_state: got pre_rope; must be post_rope: fp8_ds_mla"):
        validate(bad)


@pytest.mark.parametrize("field", ["keys", "values"])
def test_cached_content_must_be_finite(field: str) -> None:
    inputs = good()
    broken = getattr(inputs.pool, field).clone()
    broken[5, 1, 1, 3] = math.inf
    with pytest.raises(ArgumentError) as error:
        compare(replace(inputs, pool=replace(inputs.pool, **{field: broken})))
    assert str(error.value) == f"replay.pool.{field}, row 1: token 17, head 1, element 3: inf; must be finite"


@pytest.mark.parametrize("field", ["keys", "values"])
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("query", [0.0, 1.0])
def test_content_that_no_query_attends_to_must_be_finite(field: str, value: float, query: float) -> None:
    inputs = selected([0, 18, 3, -1])
    broken = getattr(inputs.pool, field).clone()
    token = int(inputs.block_table[0, 1]), 2
    broken[token] = value
    inputs = replace(inputs, q=inputs.q * query, pool=replace(inputs.pool, **{field: broken}))
    with pytest.raises(ArgumentError) as error:
        compare(inputs)
    assert str(error.value) == f"replay.pool.{field}, row 0: token 10, head 0, element 0: {value}; must be finite"


def test_products_that_overflow_are_no_bad_content() -> None:
    inputs = good()
    large = replace(inputs, pool=KVPool.gqa(inputs.pool.keys * 3e38, inputs.pool.values))  # type: ignore[arg-type]
    large = replace(large, pool=replace(large.pool, keys=large.pool.keys.clamp(-3e38, 3e38)))
    assert not compare(large).report.within


def test_unused_slots_may_hold_anything() -> None:
    inputs = good()
    keys, values = inputs.pool.keys.clone(), inputs.pool.values.clone()  # type: ignore[union-attr]
    for tensor in (keys, values):
        tensor[2, 4:] = NAN
        tensor[5, 3:] = NAN
        tensor[6:] = NAN
    expected, found = decode_replay(inputs), decode_replay(replace(inputs, pool=KVPool.gqa(keys, values)))
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


OBSERVED = [
    ({"out": torch.zeros(2, 4, 1, 8)}, r"observed.out: got float32 \[2, 4, 1, 8\] on cpu; must be .* \[2, 4, 2, 8\]"),
    ({"lse": torch.zeros(2, 4, 2, dtype=torch.bfloat16), "lse_base": LseBase.E},
     r"observed.lse: got bfloat16 \[2, 4, 2\] on cpu; must be float32 \[2, 4, 2\] on cpu"),
    ({"lse": torch.zeros(2, 4, 2)}, "observed.lse_base: None; states from outside need 'e' or '2'"),
    ({"rank_lse": torch.zeros(2, 2, 4, 2)}, "observed.lse_base: None; states from outside need 'e' or '2'"),
    ({"rank_lse": torch.zeros(3, 2, 4, 2), "lse_base": LseBase.E},
     "observed.rank_lse: states of 3 ranks; the inputs have 2 ranks"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), OBSERVED)
def test_refuses_observed(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        validate(good(), Observed(**fields))


def test_refuses_rank_states_without_owners() -> None:
    observed = Observed(rank_out=torch.zeros(2, 2, 4, 2, 8))
    with pytest.raises(ArgumentError, match="states of 2 ranks; the inputs have no context-parallel owners"):
        validate(good(context_parallel=None), observed)


@pytest.mark.parametrize("split", [0, 12, True, 8.0])
def test_refuses_split_sizes(split: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"replay.split_size: got .*; must be a positive integer and a multiple of 8"
    ):
        validate(good(), None, CompareSettings(split_size=split))


def test_a_flat_cache_is_whole_pages() -> None:
    assert paged(torch.zeros(24, 2, 8), 8).shape == (3, 8, 2, 8)
    with pytest.raises(ArgumentError, match=r"replay.capacity: 25 slots; must be a multiple of the page size, 8"):
        paged(torch.zeros(25, 2, 8), 8)
    for size in (0, -8, True, 8.0):
        with pytest.raises(ArgumentError, match=r"replay.page_size: got .*; must be a positive integer"):
            paged(torch.zeros(24, 2, 8), size)  # type: ignore[arg-type]
