"""What is special to the compiled form: threads, and calls at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from remap_cases import Case, assert_same, run

from kvplugin.remap import Member, numba_ops, reference


def many_rows(seed: int = 0) -> Case:
    """Enough rows for several threads; a fault in every tenth."""
    random = torch.Generator().manual_seed(seed)
    topk = torch.randint(-1, 640, (90, 33), generator=random, dtype=torch.int32)
    topk[::10, 5] = 2143289344
    return Case(
        topk=topk,
        request_of_row=torch.randint(4, (90,), generator=random, dtype=torch.int32),
        block_table=torch.randint(40, (4, 10), generator=random, dtype=torch.int32),
        members=(Member(64), Member(128, 64)),
        stripes=3,
    )


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_one_result(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_ops, "thread_count", lambda rows, width: threads)
    for compact in (False, True):
        case = replace(many_rows(), compact=compact)
        assert_same(run(numba_ops, case), run(reference, case))


def test_calls_at_the_same_time_do_not_meet() -> None:
    cases = [many_rows(seed) for seed in range(8)]
    expected = [run(reference, case) for case in cases]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            for found, wanted in zip(pool.map(lambda case: run(numba_ops, case), cases), expected, strict=True):
                assert_same(found, wanted)
