"""What is special to the torch implementation: no look at values from the host, and work in chunks."""

from __future__ import annotations

import pytest
from assertions import assert_rows_equal
from hypothesis import given
from policy_cases import Case, run
from strategies import MERGE_MODES, cases
from torch import Tensor

from kvplugin.config import Eviction, MismatchAction, Witness
from kvplugin.topology import reference, torch_ops
from kvplugin.topology.call import LiftCall, PolicyCall


def on_meta(value: object) -> object:
    return value.to("meta") if isinstance(value, Tensor) else value


@given(case=cases())
def test_needs_no_values_on_the_host(case: Case) -> None:
    """Meta tensors have shapes and no values: reading one, or a shape that depends on one, raises."""
    torch_ops.apply_into(PolicyCall(*(on_meta(value) for value in case.call())))


@given(case=cases(MERGE_MODES, eviction=Eviction.LOWEST_SCORE, witness=Witness.UNIFORM))
def test_lift_needs_no_values_on_the_host(case: Case) -> None:
    call = LiftCall(case.scores, case.row_lengths, case.row_live, case.row_phase, case.score_start, case.params)
    torch_ops.lift_into(LiftCall(*(on_meta(value) for value in call)))


@given(case=cases(coordinate_mismatch=MismatchAction.RAISE))
def test_chunks_make_no_difference(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ops, "CHUNK_SLOTS", case.params.width)
        assert_rows_equal(run(torch_ops, case), run(reference, case))
