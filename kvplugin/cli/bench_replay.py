"""``kvplugin bench replay``: reconstruction and a whole comparison at a long context, beside plain attention."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvplugin.cli.bench_report import BenchReport
from kvplugin.errors import ArgumentError, KvpluginError
from kvplugin.replay import ReplayInputs, compare, logical_slots, reconstruct
from kvplugin.replay.reconstruct import requests, windows
from kvplugin.replay.selftest.synthetic import SPARE_PAGES, Shape, make_inputs

LEAST_REPEATS = 7
LOOP_REPEATS = 3
"""The loop takes seconds."""
COMPARED = (("loop", "vectorised"), ("loop_copying", "vectorised_copying"), ("compare", "dense"))

BOUNDS = {
    "context": (1, 1 << 22),
    "kv_heads": (1, 1024),
    "group": (1, 1024),
    "dim": (2, 4096),
    "page": (1, 4096),
    "repeats": (LEAST_REPEATS, 1000),
}
MOST_BYTES = 32 << 30

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"


class ReconstructionsDiffer(KvpluginError):
    """The two reconstructions do not give the same tokens, so their times mean nothing."""

    def __init__(self) -> None:
        super().__init__("kvplugin bench replay: loop and vectorised differ; nothing was timed; report this")

    def __reduce__(self) -> tuple[type[ReconstructionsDiffer], tuple[()]]:
        return ReconstructionsDiffer, ()


@dataclass(frozen=True)
class BenchReplayRequest:
    """What to measure: one query of ``kv_heads * group`` heads of ``dim`` over ``context`` bfloat16 tokens.

    Raises:
        ArgumentError: a number is too small or too large, or they ask for too much memory together.
    """

    context: int = 32768
    kv_heads: int = 8
    group: int = 4
    dim: int = 128
    page: int = 64
    repeats: int = 9

    def __post_init__(self) -> None:
        for option, (least, most) in BOUNDS.items():
            value = getattr(self, option)
            if not least <= value <= most:
                raise self._refusal(option, f"got {value}", f"must be in [{least}, {most}]")
        if self.dim % 2:
            raise self._refusal("dim", f"got {self.dim}", "must be even: elements are rotated in pairs")
        needed = self._needed_bytes()
        if needed > MOST_BYTES:
            found = f"{self.kv_heads} heads of {self.dim} need {needed / 2**30:.1f} GiB"
            raise self._refusal("context", f"{self.context} tokens of {found}", f"at most {MOST_BYTES >> 30} GiB")

    def _needed_bytes(self) -> int:
        """Keys and values in pages as bfloat16, in logical order as float32 for the dense attention, and logits."""
        row = 2 * self.kv_heads * self.dim
        pages = -(-self.context // self.page) + SPARE_PAGES
        return 2 * pages * self.page * row + 4 * self.context * (row + 8 * self.kv_heads * self.group)

    @staticmethod
    def _refusal(option: str, found: str, allowed: str) -> ArgumentError:
        return ArgumentError(f"kvplugin bench replay --{option.replace('_', '-')}", found, allowed)


def run_bench_replay(request: BenchReplayRequest) -> BenchReport:
    """Time reconstruction token by token and vectorised, a whole comparison and one dense attention, by turns.

    Reconstruction (``loop/vectorised``) is finding every token's slot and position in logical order; the loop asks the
    tensors token by token. ``loop_copying/vectorised_copying`` also gather each key and value, the vectorised form in
    the windows that ``compare`` uses: the speed of memory bounds that one. ``dense`` gets float32 keys and values for
    nothing, in logical order. ``compare`` validates, reconstructs, digests, runs the full prefill and the block replay,
    merges and reports. ``peak/slice`` is what it needs beyond the cache, as a share of the request's part of it.

    Raises:
        ReconstructionsDiffer: the reconstructions disagree.
    """
    inputs = make_inputs(_shape(request))
    keys, values = reconstruct(inputs, 0)
    _check_reconstructions(inputs)
    query = inputs.q[0, :, 0].view(request.kv_heads, request.group, -1)
    by_turns: dict[str, Callable[[], object]] = {
        "vectorised": lambda: _order(inputs),
        "vectorised_copying": lambda: _gather(inputs),
        "dense": lambda: _dense(query, keys, values, inputs.scale),
        "compare": lambda: compare(inputs, oracles=()),
    }
    loops: dict[str, Callable[[], object]] = {
        "loop": lambda: _loop_order(inputs),
        "loop_copying": lambda: _loop_gather(inputs),
    }
    seconds = {name: [_timed(loop) for _ in range(LOOP_REPEATS)] for name, loop in loops.items()}
    seconds |= {name: [] for name in by_turns}
    for _ in range(request.repeats):
        for name, contestant in by_turns.items():
            seconds[name].append(_timed(contestant))
    report = BenchReport.of("decode replay, one query", seconds, COMPARED, vars(request))
    peak, cached = _peak_bytes(by_turns["compare"]), _slice_bytes(inputs)
    if peak is None:
        return report
    context = {**report.context, "slice_mib": cached / 2**20, "peak_mib": peak / 2**20}
    return BenchReport(report.title, report.medians_ms, {**report.ratios, "peak/slice": peak / cached}, context)


def _shape(request: BenchReplayRequest) -> Shape:
    return Shape(
        length=request.context,
        page=request.page,
        heads=request.kv_heads * request.group,
        kv_heads=request.kv_heads,
        dim=request.dim,
        dtype=torch.bfloat16,
    )


def _timed(contestant: Callable[[], object]) -> float:
    start = time.perf_counter()
    contestant()
    return time.perf_counter() - start


def _order(inputs: ReplayInputs) -> tuple[Tensor, Tensor]:
    """Slot and position of every token."""
    request = next(requests(inputs))
    return logical_slots(inputs.block_table[0], request.length, inputs.pool.page_size), request.positions


def _gather(inputs: ReplayInputs) -> None:
    """The same, and every window of keys, then of values."""
    assert inputs.pool.values is not None
    request = next(requests(inputs))
    for elements in (inputs.pool.keys, inputs.pool.values):
        for window in windows(elements, request):
            del window


def _loop_order(inputs: ReplayInputs) -> tuple[list[int], list[int]]:
    """The plain way: ask the block table for each token's page, and the page for its position."""
    page = inputs.pool.page_size
    slots, positions = [], []
    for token in range(int(inputs.kv_seq_lens[0])):
        block, offset = int(inputs.block_table[0, token // page]), token % page
        slots.append(block * page + offset)
        positions.append(int(inputs.global_token_positions[block, offset]))
    return slots, positions


def _loop_gather(inputs: ReplayInputs) -> tuple[Tensor, Tensor]:
    """The same, and copy its key and value."""
    assert inputs.pool.values is not None
    page = inputs.pool.page_size
    slots, _ = _loop_order(inputs)
    keys = inputs.pool.keys.new_empty(len(slots), *inputs.pool.keys.shape[2:])
    values = inputs.pool.values.new_empty(len(slots), *inputs.pool.values.shape[2:])
    for token, slot in enumerate(slots):
        keys[token] = inputs.pool.keys[slot // page, slot % page]
        values[token] = inputs.pool.values[slot // page, slot % page]
    return keys, values


def _check_reconstructions(inputs: ReplayInputs) -> None:
    slots, positions = _order(inputs)
    if (slots.tolist(), positions.tolist()) != _loop_order(inputs):
        raise ReconstructionsDiffer
    for found, expected in zip(_loop_gather(inputs), reconstruct(inputs, 0), strict=True):
        if not torch.equal(found.float(), expected):
            raise ReconstructionsDiffer


def _dense(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One softmax over all tokens: query ``[Hkv, G, D]``, keys and values float32 ``[L, Hkv, D]``."""
    weights = torch.softmax((query @ keys.permute(1, 2, 0)) * scale, dim=-1)
    return weights @ values.transpose(0, 1)


def _slice_bytes(inputs: ReplayInputs) -> int:
    """Bytes of the request's own keys and values in the cache."""
    tokens = int(inputs.kv_seq_lens[0])
    pools = (inputs.pool.keys, inputs.pool.values)
    return sum(tokens * pool[0, 0].numel() * pool.element_size() for pool in pools if pool is not None)


def _peak_bytes(contestant: Callable[[], object]) -> int | None:
    """Memory that a call needs beyond what is in use before it; None where the system does not tell (not Linux, glibc).

    What earlier calls freed goes back to the system first: a call that finds its memory in the allocator's pocket would
    seem to need none.
    """
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR_REFS.write_text(RESET_PEAK)
        before = _status_bytes("VmRSS")
        contestant()
        return max(_status_bytes("VmHWM") - before, 0)
    except (OSError, AttributeError):
        return None


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
