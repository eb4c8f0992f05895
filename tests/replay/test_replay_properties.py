"""What must not matter does not matter: page order, owners, RoPE state, how tokens came in, batch, offset, splits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvplugin.replay import (
    CompareSettings,
    ContextParallel,
    KVPool,
    ReplayInputs,
    RopeLayout,
    RopeState,
    append,
    compare,
    content_fingerprint,
    decode_replay,
    full_prefill,
    logical_slots,
    reconstruct,
    rotate,
)
from kvplugin.replay.compute import compute
from kvplugin.replay.selftest.synthetic import Shape, make_inputs


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Small shapes of every kind: several queries, uneven last pages, GQA, MLA, ranks, half precision."""
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    latent = draw(st.sampled_from([0, 0, 8, 24]))
    return Shape(
        length=draw(st.integers(4, 70)),
        page=draw(st.sampled_from([1, 3, 8, 16])),
        queries=draw(st.integers(1, 4)),
        heads=kv_heads * draw(st.sampled_from([1, 3])),
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([4, 16])),
        latent=latent,
        rope=draw(st.sampled_from([4, 16])),
        world=draw(st.integers(1, 4)),
        offset=draw(st.sampled_from([0, 4096])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        layout=draw(st.sampled_from(list(RopeLayout))),
        k_state=draw(st.sampled_from(list(RopeState))),
    )


SEEDS = st.integers(0, 2**16)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    different = (found != expected).nonzero()
    assert not len(different), f"{len(different)} differ, first {different[0].tolist()}"


def move_pages(inputs: ReplayInputs, order: Tensor) -> ReplayInputs:
    """The same content with page ``order[i]`` at place ``i``."""
    pool, back = inputs.pool, order.argsort()
    return replace(
        inputs,
        pool=replace(pool, keys=pool.keys[order], values=None if pool.values is None else pool.values[order]),
        block_table=torch.where(inputs.block_table >= 0, back[inputs.block_table.clamp_min(0)], -1),
        global_token_positions=inputs.global_token_positions[order],
        key_position_ids=inputs.key_position_ids[order],
    )


@given(shapes(), SEEDS)
def test_replay_is_within_tolerance_of_the_full_prefill(shape: Shape, seed: int) -> None:
    report = compare(make_inputs(shape, seed, batch=2)).report
    assert report.within, [drift for drift in report.drifts if not drift.within]


@given(shapes(), SEEDS)
def test_page_order_changes_no_bit(shape: Shape, seed: int) -> None:
    inputs = make_inputs(shape, seed)
    order = torch.randperm(len(inputs.pool.keys), generator=torch.Generator().manual_seed(seed))
    moved = move_pages(inputs, order)
    expected, found = decode_replay(inputs), decode_replay(moved)
    assert_same_bits(found.out, expected.out)
    assert_same_bits(found.lse, expected.lse)
    assert content_fingerprint(moved, 0) == content_fingerprint(inputs, 0)


def test_pages_2_0_1() -> None:
    inputs = make_inputs(Shape(length=24, page=8))
    plain = replace(inputs, block_table=inputs.block_table)
    order = torch.cat(
        [inputs.block_table[0], torch.tensor(sorted(set(range(6)) - set(inputs.block_table[0].tolist())))]
    )
    sorted_pages = move_pages(plain, order)
    assert sorted_pages.block_table.tolist() == [[0, 1, 2]]
    shuffled = move_pages(sorted_pages, torch.tensor([1, 2, 0, 3, 4, 5]))
    assert shuffled.block_table.tolist() == [[2, 0, 1]]
    assert_same_bits(decode_replay(shuffled).out, decode_replay(inputs).out)


@given(shapes(), SEEDS)
def test_owners_change_no_bit_of_the_flat_merge(shape: Shape, seed: int) -> None:
    inputs = make_inputs(shape, seed)
    assert inputs.context_parallel is not None
    owners = inputs.context_parallel.block_owners
    others = torch.where(owners >= 0, (owners * 7 + 3) % 5, -1)
    moved = replace(inputs, context_parallel=ContextParallel(others, 5))
    expected, found = compute(inputs), compute(moved)
    assert_same_bits(found.flat.out, expected.flat.out)
    assert_same_bits(found.flat.lse, expected.flat.lse)
    a, b = compare(inputs).report, compare(moved).report
    assert a.fingerprints[0].content == b.fingerprints[0].content
    if owners.tolist() != others.tolist():
        assert a.fingerprints[0].execution != b.fingerprints[0].execution
    assert b.within, b.drifts


@given(shapes(), SEEDS)
def test_keys_rotated_before_or_after_caching(shape: Shape, seed: int) -> None:
    """In float32, where the cache rounds nothing away."""
    inputs = make_inputs(replace(shape, dtype=torch.float32, k_state=RopeState.PRE), seed)
    positions = inputs.global_token_positions.clamp_min(0)
    keys = inputs.pool.keys
    rotated = rotate(keys, positions if shape.latent else positions.unsqueeze(-1), inputs.rope)
    after = replace(
        inputs,
        pool=replace(inputs.pool, keys=rotated),
        rope=replace(inputs.rope, k_state=RopeState.POST),
    )
    expected, found = decode_replay(after), decode_replay(inputs)
    assert_same_bits(found.out, expected.out)
    assert_same_bits(found.lse, expected.lse)
    assert content_fingerprint(after, 0) != content_fingerprint(inputs, 0)


def test_queries_rotated_before_or_after() -> None:
    inputs = make_inputs(Shape(queries=3, offset=100))
    pre = replace(inputs, rope=replace(inputs.rope, q_state=RopeState.PRE))
    query = rotate(inputs.q, inputs.query_position_ids.unsqueeze(1), inputs.rope)
    assert_same_bits(decode_replay(pre).out, decode_replay(replace(inputs, q=query)).out)


def test_key_and_query_dtypes_are_separate() -> None:
    """A float32 query over bfloat16 keys: the keys round to bfloat16 after the rotation, and only they."""
    inputs = make_inputs(Shape(dtype=torch.bfloat16, k_state=RopeState.PRE))
    assert (inputs.rope.q_dtype, inputs.rope.k_dtype) == (torch.float32, torch.bfloat16)
    keys, _ = reconstruct(inputs, 0)
    assert torch.equal(keys, keys.bfloat16().float())
    through_q, _ = reconstruct(replace(inputs, rope=replace(inputs.rope, k_dtype=inputs.q.dtype)), 0)
    assert not torch.equal(through_q, keys)


@given(shapes(), SEEDS)
def test_appended_tokens_are_as_if_cached_before(shape: Shape, seed: int) -> None:
    inputs = make_inputs(shape, seed)
    pool, count = inputs.pool, shape.queries
    before = int(inputs.kv_seq_lens[0]) - count
    if not before:
        return
    new = logical_slots(inputs.block_table[0], before + count, shape.page)[before:]

    def tokens(elements: Tensor | None) -> Tensor | None:
        return None if elements is None else elements.flatten(0, 1)[new].unsqueeze(0)

    def without(elements: Tensor | None, value: float) -> Tensor | None:
        if elements is None:
            return None
        return elements.flatten(0, 1).index_fill(0, new, value).view(elements.shape)

    empty = replace(
        inputs,
        pool=KVPool(pool.format, without(pool.keys, 9.0), without(pool.values, 9.0), pool.latent_dim),  # type: ignore[arg-type]
        kv_seq_lens=inputs.kv_seq_lens - count,
        global_token_positions=without(inputs.global_token_positions, -1),  # type: ignore[arg-type]
        key_position_ids=without(inputs.key_position_ids, -1),  # type: ignore[arg-type]
    )
    keys, values = tokens(pool.keys), tokens(pool.values)
    assert keys is not None
    appended = append(empty, keys, values, inputs.query_position_ids)
    assert_same_bits(decode_replay(appended).out, decode_replay(inputs).out)
    assert content_fingerprint(appended, 0) == content_fingerprint(inputs, 0)
    assert (empty.pool.keys.flatten(0, 1)[new] == 9).all(), "the pool given was written to"


def test_append_without_room_is_refused() -> None:
    inputs = make_inputs(Shape(length=16, page=8))
    full = append(inputs, inputs.pool.keys[:1, :1], inputs.pool.values[:1, :1], torch.tensor([[16]]))  # type: ignore[index]
    with pytest.raises(ValueError, match=r"kv_seq_lens: row 0: 17; must be in \[1, 16\]"):
        decode_replay(full)


@given(shapes(), SEEDS)
def test_a_row_alone_and_in_a_batch(shape: Shape, seed: int) -> None:
    inputs = make_inputs(shape, seed, batch=3)
    together = decode_replay(inputs)
    for row in range(3):
        one = slice(row, row + 1)
        assert inputs.context_parallel is not None
        alone = decode_replay(
            replace(
                inputs,
                q=inputs.q[one],
                block_table=inputs.block_table[one],
                kv_seq_lens=inputs.kv_seq_lens[one],
                cache_position=inputs.cache_position[one],
                query_position_ids=inputs.query_position_ids[one],
                context_parallel=None,
            )
        )
        assert_same_bits(alone.out[0], together.out[row])
        assert_same_bits(alone.lse[0], together.lse[row])


@given(shapes(), SEEDS)
def test_an_offset_of_all_positions_changes_no_bit(shape: Shape, seed: int) -> None:
    """Post-RoPE content knows no positions but their order."""
    near = make_inputs(replace(shape, offset=0, k_state=RopeState.POST), seed)
    far = make_inputs(replace(shape, offset=4096, k_state=RopeState.POST), seed)
    assert_same_bits(decode_replay(far).out, decode_replay(near).out)
    assert content_fingerprint(far, 0) != content_fingerprint(near, 0)


@given(shapes(), SEEDS, st.integers(1, 4))
def test_split_sizes(shape: Shape, seed: int, pages: int) -> None:
    inputs = make_inputs(shape, seed)
    report = compare(inputs, settings=CompareSettings(split_size=pages * shape.page)).report
    assert report.within, report.drifts
    whole = len(inputs.block_table[0]) * shape.page
    off = decode_replay(inputs)
    assert_same_bits(decode_replay(inputs, CompareSettings(split_size=whole)).out, off.out)
    # One block a split: the same fold.
    assert_same_bits(decode_replay(inputs, CompareSettings(split_size=shape.page)).out, off.out)


@pytest.mark.parametrize("queries", [1, 4])
def test_grouped_query_32_8_128_in_bfloat16(queries: int) -> None:
    shape = Shape(300, 64, queries, 32, 8, 128, world=2, dtype=torch.bfloat16, q_dtype=torch.bfloat16)
    inputs = make_inputs(shape)
    found, exact = decode_replay(inputs), full_prefill(inputs, torch.float64)
    assert found.out.dtype is torch.bfloat16
    assert found.lse.dtype is torch.float32
    assert_same_bits(found.out, compute(inputs).flat.out.bfloat16())
    off = (found.out.double() - exact.out).abs().amax(-1) / exact.out.abs().amax(-1)
    assert off.max() <= 2 * torch.finfo(torch.bfloat16).eps
    assert compare(inputs).report.within


def test_the_output_is_cast_once() -> None:
    """Casting partial states as well would differ: the final cast is the only one."""
    inputs = make_inputs(Shape(length=400, page=8, q_dtype=torch.bfloat16))
    states = compute(inputs).states[0]
    assert states.blocks.out.dtype is torch.float32
    wide = decode_replay(replace(inputs, out_dtype=torch.float32))
    assert_same_bits(decode_replay(inputs).out, wide.out.bfloat16())


@given(shapes(), SEEDS)
def test_mla_is_multi_query_attention_over_its_latents(shape: Shape, seed: int) -> None:
    inputs = make_inputs(replace(shape, latent=12), seed)
    latent = inputs.pool.keys.unsqueeze(2)
    dense = replace(
        inputs,
        pool=KVPool.gqa(latent, latent[..., :12]),
        rope=replace(inputs.rope, k_state=RopeState.POST, rotary_dim=latent.shape[-1]),
    )
    post = replace(inputs, rope=replace(inputs.rope, k_state=RopeState.POST))
    assert_same_bits(decode_replay(post).out, decode_replay(dense).out)


@given(shapes(), SEEDS)
def test_a_selection_of_everything_is_dense(shape: Shape, seed: int) -> None:
    inputs = make_inputs(shape, seed)
    query = inputs.query_position_ids[0] - shape.offset
    tokens = torch.arange(shape.length).expand(1, shape.queries, -1)
    selection = torch.where(tokens <= query.unsqueeze(-1), tokens, -1)
    sparse = decode_replay(replace(inputs, selection=selection))
    assert_same_bits(sparse.out, decode_replay(inputs).out)


@given(shapes(), SEEDS, st.integers(1, 6))
def test_a_selection_is_attention_over_the_gathered_tokens(shape: Shape, seed: int, width: int) -> None:
    inputs = make_inputs(replace(shape, queries=1), seed)
    order = torch.randperm(shape.length, generator=torch.Generator().manual_seed(seed))[:width].sort().values
    found = decode_replay(replace(inputs, selection=order.view(1, 1, -1)))
    keys, values = (tensor[order].double() for tensor in reconstruct(inputs, 0))
    group = inputs.q.shape[1] // keys.shape[1]
    query = inputs.q[0, :, 0].double()
    logits = torch.einsum("hd,thd->ht", query, keys.repeat_interleave(group, 1)) * inputs.scale
    out = torch.einsum("ht,thd->hd", logits.softmax(-1), values.repeat_interleave(group, 1))
    torch.testing.assert_close(found.out[0, :, 0].double(), out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.lse[0, :, 0].double(), logits.logsumexp(-1), rtol=1e-6, atol=1e-6)


def test_a_query_that_selects_nothing_gives_zero() -> None:
    inputs = make_inputs(Shape(queries=2, world=2))
    selection = torch.tensor([[[-1, -1], [3, 80]]])
    found = compare(replace(inputs, selection=selection))
    flat = found.replayed.flat
    assert not flat.out[0, :, 0].any()
    assert torch.isneginf(flat.lse[0, :, 0]).all()
    assert found.report.within
    assert found.report.drift("lse, replay vs prefill").max < 1e-5
    assert found.report.provenance.logical_merge_orders == [[[], [0, 5]]]


@given(shapes(), SEEDS, st.sampled_from([0.01, 0.3, 2.0]))
def test_the_scale_is_honoured_everywhere(shape: Shape, seed: int, scale: float) -> None:
    inputs = replace(make_inputs(shape, seed), scale=scale)
    query = replace(inputs, q=inputs.q.float() * scale, scale=1.0, out_dtype=inputs.q.dtype)
    a, b = full_prefill(inputs, torch.float64), full_prefill(query, torch.float64)
    torch.testing.assert_close(a.out, b.out, rtol=1e-4, atol=1e-5)
    assert compare(inputs).report.within
