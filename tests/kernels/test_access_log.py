"""What is counted of a kernel that loads twice, gathers, and adds in place, masks included."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kvplugin.kernels.access_log import SECTOR_BYTES, logged

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests compile kernels")


@triton.jit
def add_every(values_ptr, sum_ptr, out_ptr, STEP: tl.constexpr, COUNT: tl.constexpr):  # noqa: N803
    slot = tl.arange(0, 16)
    values = tl.load(values_ptr + slot * STEP, mask=slot < COUNT, other=0)
    again = tl.load(values_ptr + slot * STEP, mask=slot < COUNT, other=0)
    tl.store(out_ptr + slot, values + again, mask=slot < COUNT)
    tl.atomic_add(sum_ptr + slot, values.to(tl.int64), mask=slot == 3)


def test_counts_elements_and_sectors() -> None:
    step, count = 10, 12
    values, out = torch.arange(160, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    total = torch.zeros(16, dtype=torch.int64)
    with logged() as (loads, stores):
        add_every[(1,)](values, total, out, STEP=step, COUNT=count)
    assert out[:count].tolist() == [2 * step * slot for slot in range(count)]
    assert total.tolist() == [0, 0, 0, 3 * step] + [0] * 12
    assert (loads.moved, loads.distinct) == (2 * count * 4 + 8, count * 4 + 8)
    assert (stores.moved, stores.distinct) == (count * 4 + 8, count * 4 + 8)
    # Values lie 40 bytes apart, so each has a sector of its own; tensors begin at multiples of 64 bytes.
    assert loads.in_sectors == (count + 1) * SECTOR_BYTES
    assert stores.in_sectors == (2 + 1) * SECTOR_BYTES


def test_logs_nothing_afterwards() -> None:
    with logged() as (loads, stores):
        pass
    add_every[(1,)](*(torch.zeros(160, dtype=torch.int64) for _ in range(3)), STEP=1, COUNT=1)
    assert (loads.moved, stores.moved, loads.in_sectors) == (0, 0, 0)
