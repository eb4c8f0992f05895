"""``remap_grouped`` with one member is vLLM's own conversion, bit for bit; run by ``make parity``."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from integration.parity import source_in_use
from integration.parity.cases import BLOCK_SIZE, BLOCKS, ParityCase, parity_cases
from integration.parity.vllm_remap import vllm_remap
from kvplugin.remap import Member, Remapped, op, remap_grouped

IMPLEMENTATIONS = ("reference", "torch_ops", "numba_ops", "triton_ops")
POISON = 2143289344
"""No physical row of these cases, so a slot that nobody wrote shows."""


@pytest.fixture(scope="module", autouse=True)
def fetched_vllm() -> None:
    source_in_use.require()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", parity_cases(), ids=str)
def test_one_member_is_vllms_own_conversion(
    case: ParityCase, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module(f"kvplugin.remap.{implementation}")
    monkeypatch.setattr(op, "implementation_for", lambda device_type: module)
    assert_same(case, run_remap_grouped(case))


def test_the_cases_reach_every_outcome() -> None:
    """Cases that leave everything out, or keep everything, would compare nothing."""
    for case in parity_cases():
        physical, _ = vllm_remap(case)
        kept = int((physical >= 0).sum())
        assert 0 < kept < int((case.topk >= 0).sum()), f"{case}: {kept} slots have a physical row"


def run_remap_grouped(case: ParityCase) -> Remapped:
    valid_out = torch.full((len(case.topk),), POISON, dtype=torch.int32) if case.count_valid else None
    return remap_grouped(
        case.topk,
        case.request_of_row,
        case.block_table,
        block_size=BLOCK_SIZE,
        num_blocks=BLOCKS,
        members=[Member(case.stride_rows)],
        count_valid=case.count_valid,
        compact=case.compact,
        context_parallel=case.context_parallel,
        workspace=case.workspace,
        out=torch.full((1, *case.topk.shape), POISON, dtype=torch.int32),
        valid_out=valid_out,
    )


def assert_same(case: ParityCase, found: Remapped) -> None:
    """Fail with the first slot or count that differs from vLLM's."""
    physical, valid = vllm_remap(case)
    different = (found.physical[0] != physical).nonzero().tolist()
    if different:
        row, slot = different[0]
        token = "" if case.compact else f" (token {int(case.topk[row, slot])})"
        raise AssertionError(
            f"row {row}, slot {slot}{token}: {int(found.physical[0, row, slot])}, vLLM has {int(physical[row, slot])}; "
            f"{len(different)} slots differ"
        )
    if valid is not None:
        assert found.valid is not None
        assert found.valid.tolist() == valid.tolist(), "valid counts"
