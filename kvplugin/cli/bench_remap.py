"""``kvplugin bench remap``: a grouped call against a call per layer, the fused form against its two parts, and a copy.

The copy is a plain one of what the remap writes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from kvplugin.cli.bench_policy import POLICIES, BenchPolicyRequest, Structure, shuffled_rows
from kvplugin.cli.bench_remap_calls import FORMS, Batch, Contestant, Pool, contestants_of, healthy_batch
from kvplugin.cli.bench_report import BenchReport, Fact
from kvplugin.errors import ArgumentError, KvpluginError
from kvplugin.fused import reference as fused_reference
from kvplugin.fused.call import FusedCall
from kvplugin.remap import Member, reference
from kvplugin.remap.call import INT32_MAX
from kvplugin.topology import lower

COPY = "copy"
COMPARED = (
    *((f"per_layer_{form}", f"grouped_{form}") for form in FORMS),
    ("separate_numba", "fused_numba"),
    *((f"{call}_torch", f"{call}_numba") for call in ("grouped", "separate")),
    *((f"grouped_{form}", COPY) for form in FORMS),
)

LEAST_REPEATS = 7
MOST_REQUESTS = 64
MOST_CHECKED_ROWS = 64
"""Rows that are compared with the reference, which takes tens of milliseconds for each."""


class RemapsDiffer(KvpluginError):
    """Two forms' results are not the same, so their times mean nothing."""

    def __init__(self, name: str, other: str) -> None:
        self.name, self.other = name, other
        super().__init__(f"kvplugin bench remap: {name} and {other} differ; nothing was timed; report this")

    def __reduce__(self) -> tuple[type[RemapsDiffer], tuple[str, str]]:
        return RemapsDiffer, (self.name, self.other)


@dataclass(frozen=True)
class BenchRemapRequest:
    """What to measure: ``rows`` rows of ``width`` slots over ``length`` tokens each, for ``layers`` of one group.

    Raises:
        ArgumentError: a number is too small, or the pool too large for int32 rows.
    """

    rows: int = 512
    width: int = 2048
    length: int = 8192
    layers: int = 4
    block_size: int = 64
    repeats: int = 9

    def __post_init__(self) -> None:
        for option in ("rows", "width", "length", "layers", "block_size", "repeats"):
            value, least = getattr(self, option), LEAST_REPEATS if option == "repeats" else 1
            if value < least:
                raise ArgumentError(_option(option), f"got {value}", f"must be at least {least}")
        num_blocks = self.pool.num_blocks
        if num_blocks * self.block_size * self.layers > INT32_MAX:
            raise ArgumentError(
                _option("length"), f"{num_blocks} blocks of {self.layers} layers", "their rows must fit int32"
            )

    @property
    def pool(self) -> Pool:
        """The pool of the requests among the rows; the layers lie side by side in it."""
        requests, stride_rows = min(self.rows, MOST_REQUESTS), self.layers * self.block_size
        members = tuple(Member(stride_rows, layer * self.block_size) for layer in range(self.layers))
        return Pool(requests, requests * -(-self.length // self.block_size), self.block_size, members)


def _option(name: str) -> str:
    return f"kvplugin bench remap --{name.replace('_', '-')}"


def run_bench_remap(request: BenchRemapRequest) -> BenchReport:
    """Check that all forms agree with the reference, then time them by turns.

    Raises:
        ArgumentError: the policy's structure does not fit the width.
        RemapsDiffer: a result is not the reference's.
    """
    batch = learned_batch(request)
    contestants = dict(contestants_of(batch.call))
    _check_results(batch, contestants)
    physical = batch.call.remap.physical
    copy = torch.empty_like(physical)
    contestants[COPY] = Contestant(lambda: copy.copy_(physical))
    seconds = _seconds(batch, contestants, request.repeats)
    return BenchReport.of("remap, one index group", seconds, COMPARED, _shape(request))


def _seconds(batch: Batch, contestants: Mapping[str, Contestant], repeats: int) -> dict[str, list[float]]:
    """Time numba's forms by turns, then the others: torch's leave spinning threads and cold caches behind."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    of_numba = [name for name in contestants if name.endswith("_numba")]
    for names in (of_numba, [name for name in contestants if name not in of_numba]):
        for _, name in product(range(repeats), names):
            batch.prepare(contestants[name])
            start = time.perf_counter()
            contestants[name].run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def learned_batch(request: BenchRemapRequest) -> Batch:
    """A healthy batch under the policy that an operator gets who sets nothing but the mode."""
    params = lower(POLICIES[Structure.DEFAULT], request.width)
    learned, scores = shuffled_rows(BenchPolicyRequest(request.rows, request.width, request.length))
    return healthy_batch(learned, scores, params, request.pool)


def _check_results(batch: Batch, contestants: Mapping[str, Contestant]) -> None:
    """Compare some rows with the reference, and all rows of all forms that do the same with each other."""
    first: dict[bool, tuple[str, Tensor]] = {}
    expected = {has_policy: _reference_rows(batch, has_policy) for has_policy in (False, True)}
    physical = batch.call.remap.physical
    for name, contestant in contestants.items():
        batch.prepare(contestant)
        physical.fill_(-2)
        contestant.run()
        # Rows that a policy rewrote are sets.
        found = physical.sort().values if contestant.has_policy else physical.clone()
        if not torch.equal(found[:, _checked(batch)], expected[contestant.has_policy]):
            raise RemapsDiffer(name, "reference")
        other, all_rows = first.setdefault(contestant.has_policy, (name, found))
        if not torch.equal(found, all_rows):
            raise RemapsDiffer(name, other)


def _checked(batch: Batch) -> slice:
    """Rows to compare with the reference, evenly spread over the call."""
    return slice(None, None, -(-len(batch.learned) // MOST_CHECKED_ROWS))


def _reference_rows(batch: Batch, has_policy: bool) -> Tensor:
    """Physical rows int32 ``[G, C, K]`` of the checked rows; in ascending order where the policy rewrote them."""
    rows = _checked(batch)
    policy, remap = batch.call
    topk = batch.learned[rows].clone()
    physical = remap.physical[:, rows].clone()
    remap = remap._replace(topk=topk, request_of_row=remap.request_of_row[rows], physical=physical)
    if not has_policy:
        reference.remap_into(remap)
        return physical
    policy = policy._replace(
        topk=topk,
        row_lengths=policy.row_lengths[rows],
        scores=batch.scores[rows],
        counters=torch.zeros_like(policy.counters),
    )
    fused_reference.fused_into(FusedCall(policy, remap))
    return physical.sort().values


def _shape(request: BenchRemapRequest) -> dict[str, Fact]:
    written = 4 * request.layers * request.rows * request.width
    return {**vars(request), "requests": request.pool.requests, "written_mib": round(written / 2**20, 3)}
