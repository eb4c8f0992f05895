"""Properties of the remap, for every implementation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from remap_cases import IMPLEMENTATIONS, Case, assert_same, every_fast_implementation, every_implementation, run
from remap_strategies import cases

from kvplugin import remap
from kvplugin.remap import ContextParallel, Member, reference


def test_every_implementation_is_listed() -> None:
    folder = Path(remap.__file__).parent
    found = {path.stem for path in folder.glob("*_ops.py")} | {"reference"}
    assert found == set(IMPLEMENTATIONS)


@every_fast_implementation
@settings(max_examples=150)
@given(case=cases())
def test_matches_reference(implementation: ModuleType, case: Case) -> None:
    assert_same(run(implementation, case), run(reference, case))


@every_implementation
@settings(max_examples=20)  # one rule at a time; the property above covers their combinations
@given(case=cases(widths=(7,)))
def test_a_group_agrees_on_its_slots(implementation: ModuleType, case: Case) -> None:
    outcome = run(implementation, replace(case, counting=True))
    used = outcome.physical >= 0
    assert bool((outcome.physical >= -1).all())
    assert torch.equal(used, used[:1].expand_as(used))
    assert torch.equal(used[0].sum(1), outcome.valid)
    if case.compact:
        assert torch.equal(used[0], used[0].sort(1, descending=True).values), "a slot is used behind an unused one"


@every_implementation
@settings(max_examples=20)  # one rule at a time; the property above covers their combinations
@given(case=cases(widths=(7,)))
def test_compaction_keeps_the_order(implementation: ModuleType, case: Case) -> None:
    loose, dense = (run(implementation, replace(case, compact=compact, counting=True)) for compact in (False, True))
    for before, after in zip(loose.physical.flatten(0, 1), dense.physical.flatten(0, 1), strict=True):
        kept = before[before >= 0]
        assert after.tolist() == [*kept.tolist(), *[-1] * (len(after) - len(kept))]
    assert torch.equal(loose.valid, dense.valid)


@every_implementation
@settings(max_examples=20)  # one rule at a time; the property above covers their combinations
@given(case=cases(clean=True))
def test_a_group_is_its_members_stacked(implementation: ModuleType, case: Case) -> None:
    grouped = run(implementation, case)
    for g in range(len(case.members)):
        alone = run(implementation, case.only_member(g))
        assert_same(
            replace(alone, counters=None), replace(grouped, physical=grouped.physical[g : g + 1], counters=None)
        )


@every_implementation
@settings(max_examples=20)  # one rule at a time; the property above covers their combinations
@given(case=cases(workspaces=False), layers=st.integers(1, 4))
def test_a_constant_offset_is_the_layer_form(implementation: ModuleType, case: Case, layers: int) -> None:
    """Layer l of a packed pool owns every ``layers``-th block from the l-th on, so a table of those says the same."""
    members = tuple(Member(layers * case.block_size, layer * case.block_size) for layer in range(layers))
    packed = run(implementation, replace(case, members=members))
    in_pool = (case.block_table >= 0) & (case.block_table < case.num_blocks)
    for layer in range(layers):
        table = torch.where(in_pool, case.block_table * layers + layer, -1)
        own = replace(case, block_table=table, num_blocks=case.num_blocks * layers, members=(Member(case.block_size),))
        assert_same(run(implementation, own), replace(packed, physical=packed.physical[layer : layer + 1]))


@every_implementation
@settings(max_examples=20)  # one rule at a time; the property above covers their combinations
@given(case=cases(clean=True, workspaces=False), size=st.integers(1, 4), interleave=st.sampled_from((1, 16)))
def test_ranks_share_a_row_among_them(implementation: ModuleType, case: Case, size: int, interleave: int) -> None:
    """Every token belongs to one rank, and its neighbours of that rank lie beside it in the rank's own pool."""
    block_size = 16 * case.block_size
    tokens = case.topk.clamp(max=case.block_table.shape[1] * block_size * size - 1)
    ranks = [
        run(
            implementation,
            replace(
                case,
                topk=tokens,
                block_size=block_size,
                members=(Member(block_size),),
                compact=False,
                context_parallel=ContextParallel(size, rank, interleave),
            ),
        ).physical[0]
        for rank in range(size)
    ]
    used = torch.stack([physical >= 0 for physical in ranks])
    assert torch.equal(used.sum(0) == 1, tokens >= 0)
    for rank, physical in enumerate(ranks):
        for row, slot in (physical >= 0).nonzero().tolist():
            group, within = divmod(int(tokens[row, slot]), interleave)
            local = group // size * interleave + within
            page = int(case.block_table[int(case.request_of_row[row]), local // block_size])
            assert group % size == rank
            assert int(physical[row, slot]) == page * block_size + local % block_size
