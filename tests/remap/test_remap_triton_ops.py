"""What is special to the Triton form: launch shapes, and the variants that are compiled ahead of time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from remap_cases import Case, assert_same, run

from kvplugin.remap import Member, reference, triton_ops
from kvplugin.remap.triton_ops import SPLIT_ROWS, WIDEST_TILE, launch_for, variants


@pytest.mark.parametrize("rows", [1, SPLIT_ROWS, SPLIT_ROWS + 1, 16384])
@pytest.mark.parametrize("width", [1, 7, 128, 257, 2048, 2176, 8192])
@pytest.mark.parametrize("whole_rows", [False, True])
def test_a_launch_covers_the_row(rows: int, width: int, whole_rows: bool) -> None:
    launch = launch_for(rows, width, whole_rows=whole_rows)
    covered = launch.programs_per_row * launch.tiles * launch.tile
    assert width <= covered < width + launch.tile
    assert launch.programs_per_row == 1 or not whole_rows
    assert launch.tiles == 1 or launch.programs_per_row == 1
    assert launch.tile & (launch.tile - 1) == 0
    assert launch.tile <= WIDEST_TILE


def test_one_decode_row_keeps_several_multiprocessors_busy() -> None:
    assert launch_for(1, 2048, whole_rows=False).programs_per_row == 8
    assert launch_for(16384, 2048, whole_rows=False).programs_per_row == 1


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_a_row_of_several_tiles(compact: bool, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 slots, so that a narrow row needs several, as a row of 8192 slots does."""
    for name, value in (("WIDEST_TILE", 16), ("SPLIT_TILE", 16), ("SPLIT_ROWS", SPLIT_ROWS if split else 0)):
        monkeypatch.setattr(triton_ops, name, value)
    random = torch.Generator().manual_seed(0)
    case = Case(
        topk=torch.randint(-1, 700, (3, 83), generator=random, dtype=torch.int32),
        request_of_row=torch.tensor([1, 0, 1]),
        block_table=torch.randint(-1, 40, (2, 10), generator=random, dtype=torch.int32),
        members=(Member(64), Member(128, 64)),
        compact=compact,
        counting=not split,
    )
    launch = launch_for(3, 83, whole_rows=compact or not split)
    assert max(launch.programs_per_row, launch.tiles) == 6
    assert_same(run(triton_ops, case), run(reference, case))


@pytest.mark.parametrize("compact", [False, True])
def test_the_widest_row(compact: bool) -> None:
    random = torch.Generator().manual_seed(0)
    case = Case(
        topk=torch.randint(-1, 700, (2, 8192), generator=random, dtype=torch.int32),
        request_of_row=torch.tensor([0, 1]),
        block_table=torch.randint(40, (2, 10), generator=random, dtype=torch.int32),
        members=(Member(64),),
        compact=compact,
    )
    for counting in (True, False):
        counted = replace(case, counting=counting)
        assert_same(run(triton_ops, counted), run(reference, counted))


def test_variants_name_every_argument_once() -> None:
    found = variants()
    assert len({variant.name for variant in found}) == len(found)
    for variant in found:
        assert variant.signature.keys() | variant.constexprs.keys() == set(variant.kernel.arg_names), variant.name
        assert not variant.signature.keys() & variant.constexprs.keys(), variant.name


def test_variants_cover_every_option() -> None:
    def seen(argument: str) -> set[object]:
        return {variant.constexprs.get(argument, "given") for variant in variants()}

    assert seen("MEMBERS") == {1, 4}
    assert seen("COMPACT") == {False, True}
    assert len(seen("CP_SIZE")) > 1
    for pointer in ("valid_ptr", "counters_ptr", "prefill_ptr"):
        assert seen(pointer) == {None, "given"}
    assert {variant.name.split("_")[-3] for variant in variants()} == {"split", "row"}
