"""What is special to the compiled form: threads, whole-call limits, and the row numbers of the error record."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_cases import assert_same, fused_call
from policy_cases import Case

from kvplugin.config import MismatchAction, Mode, PolicyConfig
from kvplugin.fused import reference
from kvplugin.fused.call import FusedCall
from kvplugin.topology import lower
from kvplugin.topology.counters import Counter

numba_ops = pytest.importorskip("kvplugin.fused.numba_ops", reason="numba is not installed", exc_type=ImportError)

ROWS, WIDTH, LENGTH = 90, 64, 700


def call_of(**policy: Any) -> FusedCall:
    """Rows for several threads, each with its own pages; a token out of range in three of them."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(ROWS, LENGTH, generator=generator)
    topk = scores.topk(WIDTH).indices.int()
    topk[[17, 40, 77], 5] = 10_000
    params = lower(PolicyConfig(mode=Mode.SPARSE_MERGE, local_tokens=8, **policy), WIDTH)
    table = torch.randint(40, (ROWS, 44), generator=generator, dtype=torch.int32)
    pool = torch.arange(ROWS, dtype=torch.int32), table, torch.tensor([(16, 0), (48, 16)])
    case = Case(topk=topk, row_lengths=torch.full((ROWS,), LENGTH), params=params, scores=scores)
    return fused_call(case, pool, torch.device("cpu"))


def use_threads(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(numba_ops, "thread_count", lambda rows, width: count)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_one_result(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch, threads)
    expected, actual = (call_of(coordinate_mismatch=MismatchAction.RAISE) for _ in range(2))
    reference.fused_into(expected)
    numba_ops.fused_into(actual)
    assert_same(actual, expected)
    assert actual.policy.error.tolist() == [18, 10_000, 0, LENGTH]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_rows": ROWS}, None),
        ({"max_rows": ROWS - 1}, Counter.BYPASS_MAX_ROWS),
        ({"max_elements": ROWS * WIDTH}, None),
        ({"max_elements": ROWS * WIDTH - 1}, Counter.BYPASS_MAX_ELEMENTS),
    ],
)
def test_limits_count_the_rows_of_the_whole_call(
    limits: dict[str, int], reason: Counter | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch, 5)
    expected, actual = (call_of(limits=limits) for _ in range(2))
    reference.fused_into(expected)
    numba_ops.fused_into(actual)
    assert_same(actual, expected)
    bypassed = {
        counter: int(actual.policy.counters[0, 0, 1, counter]) for counter in Counter if "BYPASS" in counter.name
    }
    assert {counter: rows for counter, rows in bypassed.items() if rows} == ({reason: ROWS} if reason else {})


def test_one_policy_takes_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_ops.separate, "fused_into", lambda call: pytest.fail("ran as its two parts"))
    numba_ops.fused_into(call_of())
