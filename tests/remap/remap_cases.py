"""One remap call as plain data, what an implementation makes of it, and how the result is compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from devices import device_of, each_of, numba_form
from policy_cases import GUARD, Layout, lay_out
from torch import Tensor

from kvplugin import remap
from kvplugin.remap import ContextParallel, Member, PrefillWorkspace, RemapCounter, reference, torch_ops, triton_ops
from kvplugin.remap.call import NO_CONTEXT_PARALLEL, RemapCall

FAST = {"torch_ops": torch_ops, "numba_ops": numba_form(remap.__name__), "triton_ops": triton_ops}
IMPLEMENTATIONS = {"reference": reference, **FAST}
every_implementation, every_fast_implementation = each_of(IMPLEMENTATIONS), each_of(FAST)

POISON = 2143289344
"""Fills outputs before a call: the bits of a NaN, which an unwritten slot of a real buffer may hold."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Input of one call; tensors are contiguous and on the CPU here, and take ``layout`` and a device for each run."""

    topk: Tensor
    request_of_row: Tensor
    block_table: Tensor
    members: tuple[Member, ...]
    block_size: int = 64
    num_blocks: int = 40
    compact: bool = False
    counting: bool = True
    context_parallel: ContextParallel = NO_CONTEXT_PARALLEL
    workspace: PrefillWorkspace | None = None
    stripes: int | None = 1
    layout: Layout = Layout.PLAIN

    def only_member(self, g: int) -> Case:
        return replace(self, members=(self.members[g],))


@dataclass(frozen=True)
class Outcome:
    """What a run left behind, on the CPU: int32 ``[G, T, K]``, int32 ``[T]``, int64 ``[S, len(RemapCounter)]``."""

    physical: Tensor
    valid: Tensor | None
    counters: Tensor | None

    def counted(self) -> dict[RemapCounter, int]:
        """The counters that are not 0, over all stripes."""
        assert self.counters is not None
        return {
            reason: count for reason, count in zip(RemapCounter, self.counters.sum(0).tolist(), strict=True) if count
        }


def run(implementation: ModuleType, case: Case) -> Outcome:
    """Run an implementation on copies in guarded memory; fails where it touched anything but its outputs."""
    device = device_of(implementation)
    memories: list[tuple[Tensor, Tensor]] = []

    def place(tensor: Tensor) -> Tensor:
        flat = tensor.dim() == 1
        view, memory = lay_out((tensor.unsqueeze(1) if flat else tensor).to(device), case.layout)
        memories.append((memory, memory.clone()))
        return view.squeeze(1) if flat else view

    rows, width = case.topk.shape
    physical, around = _guarded((len(case.members), rows, width), case.layout, device)
    valid, around_valid = _guarded((rows,), case.layout, device)
    wants_count = case.counting or case.compact
    workspace = case.workspace and PrefillWorkspace(
        place(case.workspace.request_of_row), place(case.workspace.starts), case.workspace.rank_stride
    )
    counters = None
    if case.stripes is not None:
        counters = torch.zeros(case.stripes, len(RemapCounter), dtype=torch.int64, device=device)
    implementation.remap_into(
        RemapCall(
            topk=place(case.topk),
            request_of_row=place(case.request_of_row),
            block_table=place(case.block_table),
            members=torch.tensor(case.members, dtype=torch.int64, device=device),
            block_size=case.block_size,
            num_blocks=case.num_blocks,
            compact=case.compact,
            context_parallel=case.context_parallel,
            workspace=workspace,
            physical=physical,
            valid=valid if wants_count else None,
            counters=counters,
        )
    )
    for memory, before in memories:
        assert torch.equal(memory, before), "an input, or memory around it, was written to"
    outcome = Outcome(
        physical.cpu().clone(),
        valid.cpu().clone() if wants_count else None,
        None if counters is None else counters.cpu(),
    )
    for view, memory in ((physical, around), (valid, around_valid)):
        view.fill_(GUARD)
        assert bool((memory == GUARD).all()), "memory around an output was written to"
    return outcome


def _guarded(shape: tuple[int, ...], layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """A poisoned output inside guarded memory, in the wanted layout, and that memory."""
    step = 2 if layout is Layout.ROW_STRIDED else 1
    around = [step * size + 3 for size in shape]
    order = list(range(len(shape)))
    if layout is Layout.TRANSPOSED:
        order.reverse()
    memory = torch.full([around[d] for d in order], GUARD, dtype=torch.int32, device=device)
    view = memory.permute(*order)
    for dim, size in enumerate(shape):
        view = view.narrow(dim, 1, step * size)[(slice(None),) * dim + (slice(None, None, step),)]
    return view.fill_(POISON), memory


def assert_same(actual: Outcome, expected: Outcome) -> None:
    """Fail unless rows, counts and counters are equal; names the first place where they differ, and both values."""
    problems = [
        f"{name}{list(place)}: {found}, expected {wanted}"
        for name in ("physical", "valid", "counters")
        for place, found, wanted in _differences(getattr(actual, name), getattr(expected, name))
    ]
    if problems:
        raise AssertionError("\n".join(problems))


def _differences(actual: Tensor | None, expected: Tensor | None) -> Iterator[tuple[list[int], object, object]]:
    if actual is None or expected is None or actual.shape != expected.shape:
        if actual is not expected:
            yield [], actual, expected
        return
    places = (actual != expected).nonzero().tolist()
    yield from ((place, actual[tuple(place)].item(), expected[tuple(place)].item()) for place in places[:1])
