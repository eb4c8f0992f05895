"""What is special to the torch form: long batches are cut into chunks of rows."""

from __future__ import annotations

import pytest
import torch
from remap_cases import Case, assert_same, run

from kvplugin.remap import Member, PrefillWorkspace, reference, torch_ops


@pytest.mark.parametrize("rows_at_once", [1, 2, 4, 100])
def test_chunks_of_rows_give_one_result(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    topk = torch.randint(-1, 640, (11, 6), generator=random, dtype=torch.int32)
    topk[:, 0] = torch.arange(11) % 2 - 2  # a fault in every second row
    case = Case(
        topk=topk,
        request_of_row=torch.randint(2, (11,), generator=random, dtype=torch.int32),
        block_table=torch.randint(40, (2, 10), generator=random, dtype=torch.int32),
        members=(Member(64), Member(128, 64)),
        workspace=PrefillWorkspace(torch.arange(11, dtype=torch.int32) % 3 - 1, torch.tensor([0, 700]).int()),
        compact=True,
        stripes=4,
    )
    for limit in ("CHUNK_IN_CACHE", "CHUNK_ON_GPU"):
        monkeypatch.setattr(torch_ops, limit, rows_at_once * len(case.members) * topk.shape[1])
    assert_same(run(torch_ops, case), run(reference, case))
