"""``kvplugin bench remap``: one grouped call against a call per layer, beside a plain copy of what they write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from kvplugin.cli.bench_report import BenchReport, Fact
from kvplugin.errors import ArgumentError, KvpluginError
from kvplugin.remap import Member, reference
from kvplugin.remap.call import INT32_MAX, NO_CONTEXT_PARALLEL, RemapCall

FORMS = {"numba": "numba_ops", "torch": "torch_ops"}
"""Module of each form; imported by the run alone, as the rest of the command must work without numba.

In the order of their turns: torch's threads, which spin on for a while, come after numba's.
"""
COPY = "copy"
COMPARED = (
    *((f"per_layer_{form}", f"grouped_{form}") for form in FORMS),
    ("grouped_torch", "grouped_numba"),
    *((f"grouped_{form}", COPY) for form in FORMS),
)

LEAST_REPEATS = 7
MOST_REQUESTS = 64

Contestants = dict[str, Callable[[], object]]


class RemapsDiffer(KvpluginError):
    """A form's result is not the reference's, so its time means nothing."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"kvplugin bench remap: {name} and reference differ; nothing was timed; report this")

    def __reduce__(self) -> tuple[type[RemapsDiffer], tuple[str]]:
        return RemapsDiffer, (self.name,)


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
        if self.num_blocks * self.block_size * self.layers > INT32_MAX:
            raise ArgumentError(
                _option("length"), f"{self.num_blocks} blocks of {self.layers} layers", "their rows must fit int32"
            )

    @property
    def requests(self) -> int:
        """Requests among the rows."""
        return min(self.rows, MOST_REQUESTS)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, all of them in use."""
        return self.requests * -(-self.length // self.block_size)

    @property
    def members(self) -> tuple[Member, ...]:
        """The layers, side by side in one pool."""
        stride_rows = self.layers * self.block_size
        return tuple(Member(stride_rows, layer * self.block_size) for layer in range(self.layers))


def _option(name: str) -> str:
    return f"kvplugin bench remap --{name.replace('_', '-')}"


def run_bench_remap(request: BenchRemapRequest) -> BenchReport:
    """Check that all forms agree with the reference, then time them by turns.

    Raises:
        RemapsDiffer: a result is not the reference's.
    """
    call = learned_rows(request)
    contestants = _remap_contestants(call)
    _check_results(call, contestants)
    copy = torch.empty_like(call.physical)
    contestants[COPY] = lambda: copy.copy_(call.physical)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(request.repeats):
        for name, contestant in contestants.items():
            _read(call.topk)
            start = time.perf_counter()
            contestant()
            seconds[name].append(time.perf_counter() - start)
    return BenchReport.of("remap, one index group", seconds, COMPARED, _shape(request))


def learned_rows(request: BenchRemapRequest) -> RemapCall:
    """A healthy batch as an indexer's top-k leaves it, its pages in no order, and a call of the whole group."""
    generator = torch.Generator().manual_seed(0)
    learned = min(request.width, request.length)
    topk = torch.full((request.rows, request.width), -1, dtype=torch.int32)
    for row in topk:
        row[:learned] = torch.randperm(request.length, generator=generator)[:learned]
    pages = torch.randperm(request.num_blocks, generator=generator).int()
    return RemapCall(
        topk=topk,
        request_of_row=torch.arange(request.rows, dtype=torch.int32) % request.requests,
        block_table=pages.reshape(request.requests, -1),
        members=torch.tensor(request.members),
        block_size=request.block_size,
        num_blocks=request.num_blocks,
        compact=False,
        context_parallel=NO_CONTEXT_PARALLEL,
        workspace=None,
        physical=torch.empty(request.layers, *topk.shape, dtype=torch.int32),
        valid=None,
        counters=None,
    )


def _remap_contestants(call: RemapCall) -> Contestants:
    """The group in one call and in a call per layer, in each form. All write to ``call.physical``."""
    alone = [
        call._replace(members=call.members[layer : layer + 1], physical=call.physical[layer : layer + 1])
        for layer in range(len(call.members))
    ]
    contestants: Contestants = {}
    for form, module in FORMS.items():
        implementation = import_module(f"kvplugin.remap.{module}")
        contestants[f"per_layer_{form}"] = partial(_run_all, implementation, alone)
        contestants[f"grouped_{form}"] = partial(_run_all, implementation, [call])
    return contestants


def _run_all(implementation: ModuleType, calls: Sequence[RemapCall]) -> None:
    for call in calls:
        implementation.remap_into(call)


def _read(topk: Tensor) -> None:
    """Read the rows: an indexer's top-k leaves them in the caches.

    On this thread alone, through numpy: OpenMP threads go on spinning for milliseconds after a torch operator, and
    would take a core from the contestant.
    """
    topk.numpy().max()


def _check_results(call: RemapCall, contestants: Contestants) -> None:
    expected = call._replace(physical=torch.empty_like(call.physical))
    reference.remap_into(expected)
    for name, contestant in contestants.items():
        call.physical.fill_(-2)
        contestant()
        if not torch.equal(call.physical, expected.physical):
            raise RemapsDiffer(name)


def _shape(request: BenchRemapRequest) -> dict[str, Fact]:
    written = 4 * request.layers * request.rows * request.width
    return {**vars(request), "requests": request.requests, "written_mib": round(written / 2**20, 3)}
