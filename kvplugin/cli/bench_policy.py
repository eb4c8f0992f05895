"""``kvplugin bench policy``: one call of the policy in each implementation, beside a plain copy of the buffer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from kvplugin.cli.bench_report import BenchReport
from kvplugin.config import Eviction, Mode, PolicyConfig
from kvplugin.errors import ArgumentError, KvpluginError
from kvplugin.topology import PolicyParams, lower, new_counters, reference
from kvplugin.topology.call import PolicyCall

IMPLEMENTATIONS = {"reference": "reference", "numba": "numba_ops", "torch": "torch_ops"}
"""Module of each implementation; imported by the run alone, as the rest of the command must work without numba.

In the order of their turns: torch's threads, which spin on for a while, come after numba's.
"""
CLONE = "clone"
COMPARED = (("reference", "numba"), ("reference", "torch"), ("torch", "numba"), ("numba", CLONE), ("torch", CLONE))

LEAST_REPEATS = 7


class Structure(StrEnum):
    """How much structure a row must make room for."""

    DEFAULT = "default"
    WIDE = "wide"


POLICIES: Mapping[Structure, PolicyConfig] = {
    Structure.DEFAULT: PolicyConfig(mode=Mode.SPARSE_MERGE),
    Structure.WIDE: PolicyConfig(
        mode=Mode.SPARSE_MERGE,
        sink_tokens=64,
        local_tokens=64,
        witness_blocks=8,
        block_size=64,
        max_structural_fraction=0.5,
    ),
}
"""``default`` is what an operator gets who sets nothing but the mode."""


class ImplementationsDiffer(KvpluginError):
    """An implementation's result is not the reference's, so its time means nothing."""

    def __init__(self, name: str, what: str) -> None:
        self.name, self.what = name, what
        super().__init__(
            f"kvplugin bench policy: {name} and reference differ in {what}; nothing was timed; report this"
        )

    def __reduce__(self) -> tuple[type[ImplementationsDiffer], tuple[str, str]]:
        return ImplementationsDiffer, (self.name, self.what)


@dataclass(frozen=True)
class BenchPolicyRequest:
    """What to measure: ``rows`` rows of ``width`` slots over ``length`` visible tokens each.

    Raises:
        ArgumentError: a number is too small.
    """

    rows: int = 128
    width: int = 2048
    length: int = 8192
    eviction: Eviction = Eviction.LOWEST_SCORE
    structure: Structure = Structure.DEFAULT
    repeats: int = 9

    def __post_init__(self) -> None:
        for option, least in (("rows", 1), ("width", 1), ("length", 1), ("repeats", LEAST_REPEATS)):
            value = getattr(self, option)
            if value < least:
                raise ArgumentError(f"kvplugin bench policy --{option}", f"got {value}", f"must be at least {least}")


def _implementations() -> dict[str, ModuleType]:
    return {name: import_module(f"kvplugin.topology.{module}") for name, module in IMPLEMENTATIONS.items()}


def run_bench_policy(request: BenchPolicyRequest) -> BenchReport:
    """Check that all implementations agree on the rows, then time them by turns.

    Raises:
        ArgumentError: the structure does not fit the width.
        ImplementationsDiffer: a result is not the reference's.
    """
    policy = POLICIES[request.structure].model_copy(update={"eviction": request.eviction})
    params = lower(policy, request.width)
    rows, scores = shuffled_rows(request)
    _check_results(rows, scores, params)
    buffer, copy = rows.clone(), torch.empty_like(rows)
    call = _call(buffer, scores, params)
    contestants: dict[str, Callable[[], object]] = {
        name: partial(implementation.apply_into, call) for name, implementation in _implementations().items()
    }
    contestants[CLONE] = lambda: copy.copy_(buffer)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(request.repeats):
        for name, contestant in contestants.items():
            _prepare(buffer, rows, scores)
            start = time.perf_counter()
            contestant()
            seconds[name].append(time.perf_counter() - start)
    return BenchReport.of("policy, one call", seconds, COMPARED, _shape(request, params))


def _prepare(buffer: Tensor, rows: Tensor, scores: Tensor) -> None:
    """Restore the rows and read the scores: an indexer's top-k leaves both in the caches for the policy.

    On this thread alone, through numpy: OpenMP threads go on spinning for milliseconds after a torch operator, and
    would take a core from the contestant.
    """
    buffer.numpy()[...] = rows.numpy()
    scores.numpy().max()


def shuffled_rows(request: BenchPolicyRequest) -> tuple[Tensor, Tensor]:
    """Learned rows int32 ``[T, K]`` as an indexer's top-k gives them, and the scores ``[T, L]`` they come from.

    Slots are shuffled: a top-k kernel promises no order, and rows sorted by score would flatter a sort.
    """
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(request.rows, request.length, generator=generator)
    learned = min(request.width, request.length)
    best = scores.topk(learned).indices
    order = torch.rand(request.rows, learned, generator=generator).argsort()
    rows = torch.full((request.rows, request.width), -1, dtype=torch.int32)
    rows[:, :learned] = best.gather(1, order)
    return rows, scores


def _call(topk: Tensor, scores: Tensor, params: PolicyParams) -> PolicyCall:
    return PolicyCall(
        topk=topk,
        row_lengths=torch.full((len(topk),), scores.shape[1], dtype=torch.int32),
        row_live=None,
        row_phase=None,
        offsets=None,
        scores=scores,
        score_start=None,
        witness_scores=None,
        params=params,
        counters=new_counters(),
        error=None,
    )


def _check_results(rows: Tensor, scores: Tensor, params: PolicyParams) -> None:
    expected = _call(rows.clone(), scores, params)
    reference.apply_into(expected)
    for name, implementation in _implementations().items():
        found = _call(rows.clone(), scores, params)
        implementation.apply_into(found)
        if not torch.equal(found.topk.sort().values, expected.topk.sort().values):
            raise ImplementationsDiffer(name, "the selected tokens")
        if not torch.equal(found.counters, expected.counters):
            raise ImplementationsDiffer(name, "the counters")


def _shape(request: BenchPolicyRequest, params: PolicyParams) -> dict[str, int | float | str]:
    return {
        "rows": request.rows,
        "width": request.width,
        "length": request.length,
        "eviction": str(request.eviction),
        "structure": str(request.structure),
        "structural_tokens": params.max_structural,
        "repeats": request.repeats,
    }
