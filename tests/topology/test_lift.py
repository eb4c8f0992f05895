"""The ``before_topk`` placement: a top-k over lifted scores returns what the merge would have selected."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from devices import device_of
from hypothesis import given
from hypothesis import strategies as st
from policy_cases import Case, bits, every_fast_implementation, every_implementation, lift, run, to_device
from strategies import MERGE_MODES, cases
from torch import Tensor

from kvplugin.config import Eviction, PolicyConfig, Witness
from kvplugin.errors import ArgumentError
from kvplugin.topology import lift_structural_scores, reference
from kvplugin.topology.call import LiftCall

LIFTABLE = {"eviction": Eviction.LOWEST_SCORE, "witness": Witness.UNIFORM}


def top_k(case: Case, scores: Tensor) -> Tensor:
    """A stable top-k of each row's window, as absolute indices: ties go to the lower token, the tail is -1."""
    topk = torch.full_like(case.topk, -1)
    starts, offsets = case.per_row("score_start", 0), case.per_row("offsets", 0)
    for row, length in enumerate(case.row_lengths.tolist()):
        window = scores[row, starts[row] : starts[row] + max(length, 0)].float()
        best = window.sort(descending=True, stable=True).indices[: topk.shape[1]]
        topk[row, : len(best)] = offsets[row] + best
    return topk


@every_implementation
@given(case=cases(MERGE_MODES, clean=True, finite=True, long_rows=False, **LIFTABLE))
def test_lift_then_top_k_equals_top_k_then_merge(implementation: ModuleType, case: Case) -> None:
    merged = run(implementation, case.with_topk(top_k(case, case.scores)))
    lifted = top_k(case, lift(implementation, case))
    assert merged.selections() == [sorted(set(row) - {-1}) for row in lifted.tolist()]


@every_fast_implementation
@given(case=cases(**LIFTABLE))
def test_lift_matches_reference(implementation: ModuleType, case: Case) -> None:
    assert torch.equal(bits(lift(implementation, case)), bits(lift(reference, case)))


@every_implementation
@given(case=cases(MERGE_MODES, **LIFTABLE))
def test_lift_writes_inside_the_window_only(implementation: ModuleType, case: Case) -> None:
    lifted = lift(implementation, case)
    column = torch.arange(lifted.shape[1])
    starts = torch.tensor(case.per_row("score_start", 0)).unsqueeze(1)
    window = (column >= starts) & (column < starts + case.row_lengths.unsqueeze(1))
    changed = bits(lifted) != bits(case.scores)
    assert not (changed & ~window).any()
    assert (lifted[changed] == torch.inf).all()
    for row, live in enumerate(case.per_row("row_live", 1)):
        assert live or not changed[row].any()


@every_implementation
@given(
    case=cases(MERGE_MODES, clean=True, long_rows=False, **LIFTABLE),
    ranks=st.sampled_from((2, 3)),
    interleave=st.sampled_from((1, 4)),
)
def test_ranks_lift_what_they_hold(implementation: ModuleType, case: Case, ranks: int, interleave: int) -> None:
    """Together, ranks that have a part of each row's scores lift what one that has them all would."""
    whole = Case(**{**vars(case), "score_start": None})
    expected, device = bits(lift(reference, whole)), device_of(implementation)
    rows = [to_device(values, device) for values in (case.row_lengths, case.row_live, case.row_phase)]
    token = torch.arange(case.scores.shape[1])
    for rank in range(ranks):
        own = token[token // interleave % ranks == rank]
        part = case.scores[:, own].to(device)
        implementation.lift_into(LiftCall(part, *rows, None, case.params, ranks, rank, interleave))
        for row, length in enumerate(case.row_lengths.tolist()):
            visible = own < length  # what lies beyond is nobody's
            found, wanted = bits(part.cpu())[row][visible], expected[row, own][visible]
            assert torch.equal(found, wanted), f"rank {rank}, row {row}: tokens {own[visible][found != wanted]}"


@pytest.mark.parametrize(("ranks", "rank", "interleave"), [(2, 2, 1), (2, -1, 1), (0, 0, 1), (2, 0, 0)])
def test_refuses_a_rank_that_does_not_exist(ranks: int, rank: int, interleave: int) -> None:
    message = f"lift_structural_scores.ranks: rank {rank} of {ranks}, interleave {interleave}; use 0 <= rank < ranks"
    with pytest.raises(ArgumentError, match=message):
        lift_structural_scores(
            torch.zeros(1, 9),
            torch.tensor([9]),
            config=PolicyConfig(),
            width=4,
            ranks=ranks,
            rank=rank,
            interleave=interleave,
        )
