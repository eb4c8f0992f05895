"""What the plugin knows of each row: from the kernel that fills it, through graphs, micro-batches and preemption."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batches import COLUMNS, Batch, Request
from expected import assert_counted, assert_selected, counted, expected
from hypothesis import given, settings
from hypothesis import strategies as st
from requests_known import RunnerV1, RunnerV2, tell_prompts
from rig import CPU, POLICY, Rig
from torch import Tensor

pytestmark = pytest.mark.usefixtures("gpu")

CAPACITY = 150
"""More than one program's rows, and no multiple of them."""
DECODE = (Request(1, 300, prompt=200), Request(2, 90, prompt=95), Request(3, 700, prompt=690))


def plain_rows(
    requests: list[tuple[int, int, int, int, int]], slots: int, capacity: int
) -> list[tuple[bool, int, int, int, int, int]]:
    """Live, phase, arm, prefix, key and length of each row; requests are (queries, length, prompt, arm, prefix)."""
    rows = []
    for key, (queries, length, prompt, arm, prefix) in enumerate(requests, 7):
        for query in range(slots or queries):
            live = query < queries and length > 0
            position = length - queries + query
            visible = max(0, length - slots + query + 1) if slots else position + 1
            rows.append((live, int(position >= prompt), arm, prefix, key, visible if live else 0))
    return rows + [(False, 0, 0, 0, 0, 0)] * (capacity - len(rows))


@st.composite
def request_facts(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    queries = draw(st.integers(0, 5))
    length = draw(st.sampled_from([0, queries, queries + 1, 64, 700]))
    length = max(length, queries) if length else 0
    return queries, length, draw(st.integers(0, 702)), draw(st.integers(0, 15)), draw(st.integers(0, 9))


@settings(max_examples=20)
@given(requests=st.lists(request_facts(), min_size=1, max_size=12), padded=st.booleans(), one_each=st.booleans())
def test_filled_rows_match_plain_ones(
    requests: list[tuple[int, int, int, int, int]], padded: bool, one_each: bool
) -> None:
    from kvplugin.vllm.gpu.request_columns import RequestMemory
    from kvplugin.vllm.gpu.row_buffers import RowBuffers

    if one_each:
        requests = [(1, length, *rest) for _, length, *rest in requests]
    slots = max(1, *(queries for queries, *_ in requests)) if padded or one_each else 0
    memory = RequestMemory(CAPACITY, CPU)
    prompts, arms, prefixes = (np.array([request[number] for request in requests]) for number in (2, 3, 4))
    memory.renew(prompts, arms, prefixes, np.arange(7, 7 + len(requests)))
    buffers = RowBuffers(CAPACITY, CPU, prefixes=True)
    lengths = torch.tensor([request[1] for request in requests], dtype=torch.int32)
    if one_each:
        buffers.fill_one_each(lengths, memory.columns)
    else:
        starts = torch.tensor([0, *np.cumsum([request[0] for request in requests])], dtype=torch.int32)
        buffers.fill(starts, lengths, memory.columns, slots=slots)
    facts, visible = buffers.first(CAPACITY)
    found = zip(
        *(column.tolist() for column in (facts.live, facts.phase, facts.arm, facts.prefix, facts.request, visible)),
        strict=True,
    )
    for number, (have, want) in enumerate(zip(found, plain_rows(requests, slots, CAPACITY), strict=True)):
        if want[0]:
            assert have == want, f"row {number}: (live, phase, arm, prefix, key, length) {have}, expected {want}"
        else:
            assert (have[0], have[5]) == (False, 0), f"row {number}: live {have[0]}, length {have[5]}; it only pads"


@pytest.mark.parametrize("runner", [RunnerV1, RunnerV2])
def test_both_runners_tell_the_same(runner: type[Any]) -> None:
    batch = Batch(DECODE)
    rig = Rig()
    tell_prompts(rig, batch, runner)
    rig.step(batch)
    assert_counted(counted(rig.hook.counters), expected(batch.rows, POLICY, rig.width).counters)


def test_tokens_recomputed_after_a_preemption_decode_from_the_end_of_the_prompt() -> None:
    """A request is preempted, then resumed: prompt and answer are computed again, and its pages are others."""
    before = Batch((Request(1, 300, prompt=200), Request(2, 140, prompt=95)))
    without = Batch((Request(1, 301, prompt=200),))
    resumed = Batch((Request(1, 302, prompt=200), Request(2, 141, 120, prompt=95)))
    rig = Rig()
    total: Any = 0
    for batch in (before, without, resumed):
        tell_prompts(rig, batch)
        found = rig.step(batch)
        wanted = expected(batch.rows, POLICY, rig.width)
        assert_selected(found, wanted.selections)
        total = total + wanted.counters
        assert_counted(counted(rig.hook.counters), total)
    decoding = sum(position >= 95 for position in resumed.requests[1].positions)
    assert 0 < decoding < 120


def test_without_a_runner_phases_are_vllms_guess() -> None:
    batch = Batch(DECODE)
    rig = Rig()
    guess = torch.tensor([False, True, False])
    rig.step(batch, is_prefilling=guess)
    wanted = Batch(
        tuple(Request(r.key, r.length, prompt=r.length if g else 0) for r, g in zip(DECODE, guess, strict=True))
    )
    assert_counted(counted(rig.hook.counters), expected(wanted.rows, POLICY, rig.width).counters)


@pytest.mark.parametrize("drafts", [0, 1])
def test_a_captured_graph_reads_the_next_batch(drafts: int) -> None:
    """A graph replays what was captured: the same memory, which ``build`` fills anew for each batch."""
    queries = drafts + 1
    capturing = Batch(tuple(Request(key, 200 + key, queries, prompt=1) for key in range(1, 5)))
    replayed = Batch((Request(7, 333, queries, prompt=332), Request(8, 150, queries, prompt=140)), graph_requests=4)
    rig = Rig(drafts=drafts)
    persistent = capturing.common()
    tell_prompts(rig, capturing)
    with rig.current():
        captured = rig.build(persistent)
        step = captured[rig.indexers[0]].kvplugin_step
        addresses = _addresses(step)
        tell_prompts(rig, replayed)
        _renew(persistent, replayed.common())
        persistent.num_actual_tokens = len(capturing.rows)
        later = rig.build(persistent)
        assert _addresses(later[rig.indexers[0]].kvplugin_step) == addresses
        rig.buffer.fill_(-5)
        with rig.forward(captured, "FULL"):
            rig.select(replayed.rows, len(capturing.rows))
    wanted = expected(replayed.rows, POLICY, rig.width)
    assert_selected(rig.buffer[: len(replayed.rows)], wanted.selections)
    assert_counted(counted(rig.hook.counters), wanted.counters)


def _addresses(step: Any) -> list[int]:
    facts, lengths = step.batch
    return [tensor.data_ptr() for tensor in (*facts, lengths) if tensor is not None]


def _renew(persistent: Any, batch: Any) -> None:
    """As a model runner does, which has one set of tensors for all batches."""
    for name in ("query_start_loc", "query_start_loc_cpu", "seq_lens", "block_table_tensor", "is_prefilling"):
        getattr(persistent, name).copy_(getattr(batch, name))
    persistent.req_idx = batch.req_idx


def test_micro_batches_have_their_own_rows() -> None:
    """vLLM's own way of cutting a batch; each part has its builder, and its context."""
    from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

    batch = Batch((*DECODE, Request(4, 260, prompt=100)))
    rig = Rig()
    tell_prompts(rig, batch, RunnerV1)
    with rig.current():
        parts = split_attn_metadata(
            [UBatchSlice(slice(0, 1), slice(0, 1)), UBatchSlice(slice(1, 4), slice(1, 4))], batch.common()
        )
        metadata = [dict.fromkeys(rig.indexers.values(), rig._indexer_builder().build(0, part)) for part in parts]
        for part, first, stop in ((0, 0, 1), (1, 1, 4)):
            rows = batch.rows[first:stop]
            with rig.forward(metadata[part]):
                rig.select(rows, len(rows))
            wanted = expected(rows, POLICY, rig.width)
            assert_selected(rig.buffer[: len(rows)], wanted.selections)
    assert_counted(counted(rig.hook.counters), expected(batch.rows, POLICY, rig.width).counters)


def test_a_later_step_of_a_draft_has_one_row_for_each_request() -> None:
    """vLLM moves a draft on without building anew: lengths grow, and each request has one query."""
    from kvplugin.vllm.gpu import wrap_indexer_metadata

    rig = Rig(drafts=1)
    if wrap_indexer_metadata.original_update is None:
        pytest.skip("vLLM builds anew for each step of a draft before 0.32")
    # The last request's prompt ends between the two steps.
    drafted = (*DECODE[:2], Request(3, 700, prompt=701))
    first = Batch(tuple(Request(r.key, r.length + 1, prompt=r.prompt) for r in drafted))
    tell_prompts(rig, first)
    common = first.common()
    with rig.current():
        metadata = rig.build(common)
        later = Batch(tuple(Request(r.key, r.length + 2, prompt=r.prompt) for r in drafted))
        common.seq_lens.copy_(later.common().seq_lens)
        rig.indexer_builder.update_draft_decode_metadata(metadata[rig.indexers[0]])
        with rig.forward(metadata):
            rig.select(later.rows, len(later.rows))
    wanted = expected(later.rows, POLICY, rig.width)
    assert_selected(rig.buffer[: len(later.rows)], wanted.selections)
    assert_counted(counted(rig.hook.counters), wanted.counters)


def test_drafts_of_runner_v2_go_through_the_targets_requests() -> None:
    """vLLM names no slots when it builds for a draft."""
    batch = Batch(DECODE)
    rig = Rig()
    tell_prompts(rig, batch)
    rig.step(batch)
    rig.hook.counters.zero_()
    rig.step(batch, req_idx=None)
    assert_counted(counted(rig.hook.counters), expected(batch.rows, POLICY, rig.width).counters)


def test_a_foreign_buffer_is_left_alone() -> None:
    """Indexers of other models call the same kernels, and a profiling run has no metadata."""
    batch = Batch(DECODE)
    rig = Rig()
    tell_prompts(rig, batch)
    foreign = torch.full_like(rig.buffer, -1)
    with rig.current(), rig.forward(rig.build(batch.common())):
        rig.select(batch.rows, len(batch.rows), buffer=foreign)
    plain = expected(batch.rows, {"mode": "disabled"}, rig.width)
    assert_selected(foreign[: len(batch.rows)], plain.selections)
    assert int(rig.hook.counters.sum()) == 0
    with rig.current(), rig.forward({}):
        from kvplugin.vllm.gpu.step import step_of

        assert step_of(rig.buffer) is None
    assert step_of(rig.buffer) is None


def test_draft_buffers_given_later_are_known_once_a_builder_is_made() -> None:
    """vLLM points a draft's indexers at the target's buffer after its layers were made."""
    rig = Rig()
    other = torch.full_like(rig.buffer, -1)
    assert not rig.engine.owns(other[:2])
    rig.impls[0]._indexer.topk_indices_buffer = other
    with rig.current():
        rig._mla_builder()
    assert rig.engine.owns(other[:2])


def test_rows_of_dense_attention_are_not_scored() -> None:
    """A short prefill without top-k: nothing is rewritten, nothing counted."""
    from types import SimpleNamespace

    batch = Batch((Request(5, 20, 20, prompt=20),))
    rig = Rig()
    tell_prompts(rig, batch)
    rig.buffer.fill_(77)
    with rig.current():
        metadata = rig.build(batch.common())
        dense = SimpleNamespace(prefill=SimpleNamespace(use_dense_mha=True), num_decode_tokens=0)
        with rig.forward(metadata | dict.fromkeys(rig.layers, dense)):
            rig.select(batch.rows, 20)
    assert bool((rig.buffer == 77).all())
    assert int(rig.hook.counters.sum()) == 0


def result_of(batch: Batch, row: int, **options: Any) -> Tensor:
    rig = Rig(**options)
    tell_prompts(rig, batch)
    rig.select_only(batch)
    return rig.buffer[row].sort().values


def test_64_and_65_rows_select_alike() -> None:
    """vLLM takes another kernel for more than 64 rows; a row's selection depends on the row alone."""
    from standins import LOG

    watched = Request(1, 900, prompt=800)
    others = tuple(Request(key, 600 + key, prompt=100) for key in range(2, 66))
    kernels = []
    found = []
    for rows in (64, 65):
        batch = Batch((watched, *others[: rows - 1]))
        found.append(result_of(batch, 0, groups=(1,), width=512, rows=72))
        kernels.append(next(what for what in reversed(LOG) if what.startswith("top-k")))
    assert kernels == ["top-k of 64 decode rows (cooperative)", "top-k of 65 decode rows (persistent)"]
    assert torch.equal(found[0], found[1]), "row 0 differs"
    assert COLUMNS * 64 >= 900
