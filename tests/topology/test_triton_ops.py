"""What only the kernels do: rows wider than one program's registers, and per-row values that are not side by side."""

from __future__ import annotations

import pytest
import torch
from assertions import assert_output_contract, assert_rows_equal
from devices import device_of
from policy_cases import Case, run

from kvplugin.config import Eviction, MismatchAction, Mode, PolicyConfig, Witness
from kvplugin.topology import lower, reference, triton_ops

WINDOWS = {"sink_tokens": 3, "local_tokens": 5, "max_structural_fraction": 1.0, "block_size": 4}
WIDE = {
    "lowest_score": PolicyConfig(mode=Mode.SPARSE_MERGE, witness_blocks=3, **WINDOWS),
    "oldest": PolicyConfig(mode=Mode.SPARSE_MERGE, eviction=Eviction.OLDEST, **WINDOWS),
    "input_order": PolicyConfig(mode=Mode.SPARSE_MERGE, eviction=Eviction.INPUT_ORDER, **WINDOWS),
    "none": PolicyConfig(mode=Mode.SPARSE_MERGE, eviction=Eviction.NONE, **WINDOWS),
    "coverage": PolicyConfig(mode=Mode.SPARSE_MERGE, witness=Witness.COVERAGE, coverage_segments=9, **WINDOWS),
    "only": PolicyConfig(mode=Mode.ONLY, witness_blocks=3, **WINDOWS),
    "drop": PolicyConfig(mode=Mode.SPARSE_MERGE, coordinate_mismatch=MismatchAction.DROP, **WINDOWS),
    "duplicates": PolicyConfig(mode=Mode.SPARSE_MERGE, check_duplicates=True, **WINDOWS),
}


def wide_case(policy: PolicyConfig, width: int, *, bad: bool = False, repeated: bool = False) -> Case:
    """Four rows: learned in full, with free slots, shorter than the width, and without a learned token."""
    generator = torch.Generator().manual_seed(1)
    length = 3 * width
    topk = torch.stack([torch.randperm(length, generator=generator)[:width] for _ in range(4)]).int()
    topk[1, 5::3] = -1
    topk[3] = -1
    if bad:
        topk[:2, 7] = 2143289344
    if repeated:
        topk[0, -1] = topk[0, 0]
    return Case(
        topk=topk,
        row_lengths=torch.tensor([length, length, width - 1, length]),
        scores=torch.randint(0, 50, (4, length), generator=generator).float(),
        params=lower(policy, width),
    )


BAD = ("lowest_score", "drop", "duplicates")


@pytest.mark.parametrize(("name", "bad"), [*((name, False) for name in WIDE), *((name, True) for name in BAD)])
def test_a_row_of_several_tiles(name: str, bad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "WIDEST_TILE", 16)
    case = wide_case(WIDE[name], 40, bad=bad, repeated=name == "duplicates")
    outcome = run(triton_ops, case)
    assert_rows_equal(outcome, run(reference, case))
    assert_output_contract(case, outcome)


@pytest.mark.parametrize("width", [2048, 2176, 4097])
def test_widths_of_real_buffers(width: int) -> None:
    case = wide_case(PolicyConfig(mode=Mode.SPARSE_MERGE), width).only_row(0)
    assert_rows_equal(run(triton_ops, case), run(reference, case))


def test_slots_further_apart_than_an_int32_can_say() -> None:
    stride = 2**30 + 3
    try:
        memory = torch.empty(2 * stride + 1, dtype=torch.int32, device=device_of(triton_ops))  # a few pages get touched
    except (RuntimeError, MemoryError) as error:
        pytest.skip(f"no room for 8 GiB of addresses: {error}")
    case = wide_case(PolicyConfig(mode=Mode.ONLY, sink_tokens=1, local_tokens=1), 3).only_row(0)
    topk = memory.as_strided((1, 3), (1, stride))
    topk.copy_(case.topk)
    triton_ops.apply_into(case.call(topk.device)._replace(topk=topk))
    assert sorted(topk[0].tolist()) == run(reference, case).selections()[0]


def test_per_row_values_of_any_stride() -> None:
    case = wide_case(WIDE["drop"], 16)
    spread = Case(**{**vars(case), "row_lengths": case.row_lengths.repeat_interleave(3)[::3]})
    assert spread.row_lengths.stride() == (3,)
    assert_rows_equal(run(triton_ops, spread), run(reference, case))
