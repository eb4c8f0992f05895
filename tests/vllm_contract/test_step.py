"""The whole step: vLLM builds, its indexer selects, the policy acts, an event says so, and a group converts once."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from batches import Batch, Request
from expected import assert_counted, assert_selected, counted, expected
from requests_known import tell_prompts
from rig import POLICY, Rig
from standins import LOG

from kvplugin.remap.paths import RemapPath

pytestmark = pytest.mark.usefixtures("gpu")

DECODE = (Request(1, 300, prompt=200), Request(2, 90, prompt=10), Request(3, 700, prompt=690))
DRAFTED = tuple(Request(key, length, 3, prompt=50) for key, length in ((1, 300), (2, 131), (3, 700)))
CHUNK = Request(4, 520, 40, prompt=600)
"""A later chunk of a long prompt."""
SHORT = Request(5, 20, 20, prompt=20)


@dataclass(frozen=True)
class Case:
    """A batch, and the engine that it runs in.

    Attributes:
        options: of the rig.
        native: DeepGEMM takes so many queries of a request at once; None = vLLM's own answer.
        ragged: vLLM's builder lets requests with different numbers of queries decode together.
        chunk: scores of a prefill chunk, at most.
    """

    name: str
    batch: Batch
    options: dict[str, Any]
    native: bool | None = None
    ragged: bool = False
    chunk: int | None = None


CASES = (
    Case("decode", Batch(DECODE), {}),
    Case("two-groups", Batch(DECODE), {"groups": (2, 3)}),
    Case("wide-buffer", Batch(DECODE), {"wide": 256}),
    Case("mixed", Batch((*DECODE, CHUNK, SHORT)), {}),
    Case("chunked-prefill", Batch((CHUNK, SHORT)), {}, chunk=4000),
    Case("first-chunk", Batch((SHORT, Request(6, 135, 135, prompt=400))), {}),
    Case("next_n=2", Batch(tuple(Request(r.key, r.length, 2, r.prompt) for r in DRAFTED)), {"drafts": 1}),
    Case("next_n=3-flattened", Batch(DRAFTED), {"drafts": 2}),
    Case("next_n=3-native", Batch(DRAFTED), {"drafts": 2}, native=True),
    Case(
        "next_n=3-padded",
        Batch((Request(1, 300, 3, 50), Request(2, 131, 1, 50), Request(3, 700, 2, 50)), slots=3, decodes=3),
        {"drafts": 2},
        native=True,
        ragged=True,
    ),
    Case("next_n=4", Batch(tuple(Request(r.key, r.length, 4, r.prompt) for r in DRAFTED)), {"drafts": 3}),
    Case("next_n=5", Batch(tuple(Request(r.key, r.length, 5, r.prompt) for r in DRAFTED)), {"drafts": 4}),
    Case("graph-padding", Batch(DECODE, slots=1, decodes=3, graph_requests=8, graph_rows=8), {}),
    Case(
        "graph-padding-next_n=2",
        Batch(
            tuple(Request(r.key, r.length, 2, r.prompt) for r in DRAFTED),
            slots=2,
            decodes=3,
            graph_requests=4,
            graph_rows=8,
        ),
        {"drafts": 1},
    ),
    Case("graph-padding-next_n=3", Batch(DRAFTED, graph_requests=5, graph_rows=15), {"drafts": 2}),
)

OVERLAP = Case(
    "next_n=3-padded-mixed",
    Batch((Request(1, 300, 1, 50), Request(2, 131, 3, 50), Request(3, 700, 1, 50), CHUNK), slots=3, decodes=3),
    {"drafts": 2},
    native=True,
    ragged=True,
)


@pytest.fixture
def rig(case: Case, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return prepared(case, monkeypatch)


def prepared(case: Case, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Rig:
    from vllm import envs
    from vllm.v1.attention.backends.mla import indexer

    if case.native is not None:
        monkeypatch.setattr(indexer, "native_next_n_supported", lambda queries: case.native)
    if case.ragged:
        split = indexer.split_decodes_and_prefills
        monkeypatch.setattr(
            indexer,
            "split_decodes_and_prefills",
            lambda *args, **kwargs: split(*args, **kwargs | {"require_uniform": False}),
        )
    if case.chunk is not None:
        monkeypatch.setattr(envs, "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", Fraction(case.chunk * 4, 2**20), raising=False)
    rig = Rig(**case.options | more)
    tell_prompts(rig, case.batch)
    return rig


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_step(case: Case, rig: Rig) -> None:
    batch = case.batch
    found = rig.step(batch)
    wanted = expected(batch.rows, POLICY, rig.width)
    assert_selected(found, wanted.selections)
    groups = len(rig.leaders)
    assert_counted(counted(rig.hook.counters), wanted.counters * groups)
    assert_order(LOG, groups)
    chunks = sum(what.endswith("prefill rows") for what in LOG)
    assert chunks > 2 or case.chunk is None, LOG
    assert_attended(rig, batch, wanted.selections)
    paths = rig.engine.conversions._paths.tolist()
    members = len(rig.layers) - groups
    assert paths == [groups if p is RemapPath.GROUPED else members if p is RemapPath.MEMO else 0 for p in RemapPath]


def assert_order(log: list[str], groups: int) -> None:
    """For each group: all its top-k calls with the policy, the event, one conversion, then its layers."""
    assert log.count("conversion") == groups, log
    starts = [number for number, what in enumerate(log) if what.startswith("top-k") and not _in_selection(log, number)]
    assert len(starts) == groups, log
    for start, stop in zip(starts, [*starts[1:], len(log)], strict=True):
        part = log[start:stop]
        event, conversion = part.index("compute records selection ready"), part.index("conversion")
        selecting = part[:event]
        assert len(selecting) % 2 == 0, part
        assert all(what.startswith("top-k") for what in selecting[::2]), part
        assert all(what == "policy" for what in selecting[1::2]), part
        assert event < conversion, part
        attends = [number for number, what in enumerate(part) if what.endswith("attends")]
        assert attends, part
        assert conversion < attends[0], part
        if any("waits" in what for what in part):
            side = [number for number, what in enumerate(part) if what.endswith("waits for selection ready")]
            assert side, part
            assert event < side[0] < conversion, part


def _in_selection(log: list[str], number: int) -> bool:
    """A group's later top-k calls follow the policy of the one before."""
    return number > 0 and log[number - 1] == "policy"


def assert_attended(rig: Rig, batch: Batch, selections: list[set[int]]) -> None:
    """Each layer attends to the physical rows of what its group has selected, and knows how many they are."""
    assert len(rig.attended) == len(rig.layers)
    for layer, (indices, counts) in enumerate(rig.attended):
        for number, (row, tokens) in enumerate(zip(batch.rows, selections, strict=True)):
            have = {index for index in indices[number].tolist() if index >= 0}
            want = {row.request.physical(token) for token in tokens}
            assert have == want, f"layer {layer}, row {number}: {len(have ^ want)} physical rows differ"
            assert int(counts[number]) == len(want), f"layer {layer}, row {number}: count {int(counts[number])}"


def test_padding_of_a_view_leaves_prefill_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM pads decode rows, its view reaches over prefill rows that were selected just before."""
    rig = prepared(OVERLAP, monkeypatch)
    seen: list[torch.Tensor] = []
    on_topk = rig.hook.on_topk

    def watched(scores: Any, start: Any, lengths: Any, selection: torch.Tensor, rows: Any, **kwargs: Any) -> None:
        before = selection.clone()
        on_topk(scores, start, lengths, selection, rows, **kwargs)
        dead = ~rows.live
        seen.append(dead)
        changed = (selection != before).any(1) & dead
        assert not changed.any(), f"rows {changed.nonzero().flatten().tolist()} are not live and changed"

    monkeypatch.setattr(rig.hook, "on_topk", watched)
    rows = OVERLAP.batch.rows
    found = rig.step(OVERLAP.batch)
    # vLLM's own top-k has written over the first prefill rows by then; the rows that decode are right.
    assert_selected(found[:5], expected(rows[:5], POLICY, rig.width).selections)
    assert_counted(counted(rig.hook.counters), expected(rows, POLICY, rig.width).counters)
    assert seen[-1].tolist() == [False, True, True, False, False, False, False, True, True]


@pytest.mark.parametrize("placement", ["after_topk", "before_topk"])
def test_piecewise_graphs_wait_for_the_stream(placement: str) -> None:
    rig = Rig(placement=placement)
    batch = Batch(DECODE)
    tell_prompts(rig, batch)
    found = rig.step(batch, "PIECEWISE")
    assert_selected(found, expected(batch.rows, POLICY, rig.width).selections)
    waits = next(number for number, what in enumerate(LOG) if what.endswith("waits for all of compute"))
    assert LOG.index("policy") < waits < LOG.index("conversion"), LOG
    assert not [what for what in LOG if what.endswith("records selection ready")], LOG
