"""Shapes as in production, a few of them: the property search stays on small ones."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import pytest
import torch
from assertions import assert_output_contract, assert_rows_equal
from policy_cases import Case, Layout, Outcome, every_implementation, lift, run
from strategies import NAN_LOGITS_INDEX

from kvplugin.config import Eviction, Mode, PolicyConfig, Witness
from kvplugin.topology import Counter, lower, reference

WIDE = {"sink_tokens": 64, "local_tokens": 64, "witness_blocks": 6}
COVERAGE = {"witness": Witness.COVERAGE, "coverage_segments": 64}
SHAPES = [
    (1, 2176, 2177, WIDE),
    (3, 2048, 2047, {}),
    (3, 2176, 2176, {}),
    (3, 2176, 3 * 2176, COVERAGE),
    (3, 2048, 100_000, WIDE | {"coordinate_mismatch": "drop"}),
    (3, 2048, 100_000, {"eviction": Eviction.NONE}),
    (3, 2176, 100_000, {"mode": Mode.ONLY}),
    (65, 64, 100_000, {"block_size": 16, "sink_blocks": 1, "local_tokens": 0}),
    (65, 2048, 2049, {"eviction": Eviction.OLDEST}),
    (128, 2048, 8192, {}),
]


@lru_cache(maxsize=1)
def case_of(rows: int, width: int, length: int, **config: object) -> Case:
    """Learned rows as a top-k kernel leaves them, in random slots; some short, one with a bad index, one dead."""
    generator = torch.Generator().manual_seed(rows + width + length)
    scores = torch.randn(rows, length + 7, generator=generator)
    topk = torch.full((rows, width), -1)
    best = scores[:, 7:].topk(min(width, length)).indices
    topk[:, : best.shape[1]] = best + 100
    topk[1::3, width // 2 :] = -1
    topk = topk[:, torch.randperm(width, generator=generator)]
    topk[rows // 2, 3] = NAN_LOGITS_INDEX
    return Case(
        topk=topk.int(),
        row_lengths=torch.full((rows,), length),
        row_live=torch.arange(rows) != rows - 1 if rows > 1 else None,
        offsets=torch.full((rows,), 100),
        scores=scores,
        score_start=torch.full((rows,), 7),
        params=lower(PolicyConfig(**({"mode": Mode.SPARSE_MERGE} | config)), width),
        layout=Layout.ROW_STRIDED,
    )


@lru_cache(maxsize=len(SHAPES))
def expected(rows: int, width: int, length: int, **config: object) -> Outcome:
    return run(reference, case_of(rows, width, length, **config))


@every_implementation
@pytest.mark.parametrize(("rows", "width", "length", "config"), SHAPES)
def test_large_shape(implementation: ModuleType, rows: int, width: int, length: int, config: dict[str, object]) -> None:
    case = case_of(rows, width, length, **config)
    outcome = run(implementation, case)
    assert_output_contract(case, outcome)
    assert_rows_equal(outcome, expected(rows, width, length, **config))
    assert outcome.total(Counter.INVALID) == 1


@every_implementation
def test_large_lift(implementation: ModuleType) -> None:
    case = case_of(3, 2048, 100_000, **WIDE)
    assert torch.equal(lift(implementation, case), lift(reference, case))
