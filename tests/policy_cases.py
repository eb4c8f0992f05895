"""One policy call as plain data, and what an implementation makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from types import ModuleType
from typing import Any

import torch
from devices import device_of, each_of, numba_form
from torch import Tensor

from kvplugin import topology
from kvplugin.config import Mode, PolicyConfig
from kvplugin.topology import PolicyParams, lower, new_counters, reference, torch_ops, triton_ops
from kvplugin.topology.call import LiftCall, PolicyCall
from kvplugin.topology.counters import Counter

CPU_FORMS = {"torch_ops": torch_ops, "numba_ops": numba_form(topology.__name__)}
FAST = {**CPU_FORMS, "triton_ops": triton_ops}
IMPLEMENTATIONS = {"reference": reference, **FAST}
every_implementation, every_fast_implementation = each_of(IMPLEMENTATIONS), each_of(FAST)
every_cpu_form = each_of(CPU_FORMS)

GUARD = 77
"""Fills the memory around a view: an index that some rows could hold and a score, so a stray access shows."""


def to_device(value: Any, device: torch.device | str) -> Any:
    """Tensors on the device, all else as it is."""
    return value.to(device) if isinstance(value, Tensor) else value


class Layout(Enum):
    """How a matrix lies in memory."""

    PLAIN = auto()
    COLUMN_SLICE = auto()
    ROW_STRIDED = auto()
    TRANSPOSED = auto()


def lay_out(matrix: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """A copy of the ``[T, M]`` matrix as a view of guarded memory, and that memory."""
    rows, columns = matrix.shape
    if layout is Layout.TRANSPOSED:
        memory = matrix.new_full((columns + 2, rows), GUARD)
        view = memory[1 : columns + 1].t()
    elif layout is Layout.ROW_STRIDED:
        memory = matrix.new_full((2 * rows + 1, columns), GUARD)
        view = memory[1::2]
    elif layout is Layout.COLUMN_SLICE:
        memory = matrix.new_full((rows, columns + 5), GUARD)
        view = memory[:, 2 : columns + 2]
    else:
        memory = view = torch.empty_like(matrix)
    view.copy_(matrix)
    return view, memory


@dataclass(frozen=True, kw_only=True)
class Case:
    """Input of one call; matrices are contiguous here and take ``layout`` for each run."""

    topk: Tensor
    row_lengths: Tensor
    params: PolicyParams
    row_live: Tensor | None = None
    row_phase: Tensor | None = None
    offsets: Tensor | None = None
    scores: Tensor | None = None
    score_start: Tensor | None = None
    witness_scores: Tensor | None = None
    layout: Layout = Layout.PLAIN

    def call(self, device: torch.device | str = "cpu") -> PolicyCall:
        """The call on this case's own tensors (copies on another device), with zeroed counters and error record."""
        given = {name: to_device(value, device) for name, value in vars(self).items() if name != "layout"}
        error = torch.zeros(4, dtype=torch.int64, device=device)
        return PolicyCall(**given, counters=new_counters(device), error=error)

    def with_topk(self, topk: Tensor) -> Case:
        return replace(self, topk=topk)

    def with_params(self, **changes: object) -> Case:
        return replace(self, params=self.params._replace(**changes))

    def only_row(self, row: int) -> Case:
        """The same call for one of its rows."""
        tensors = {name: value[row : row + 1] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    def acts(self, row: int) -> bool:
        """True where the policy may look at a row: live, not bypassed, not disabled."""
        p, rows, width = self.params, *self.topk.shape
        length, offset = int(self.row_lengths[row]), self.per_row("offsets", 0)[row]
        start = self.per_row("score_start", 0)[row]
        scored = self.scores is not None and start >= 0 and start + length <= self.scores.shape[1]
        return (
            p.mode is not Mode.DISABLED
            and (width <= p.max_width and rows <= p.max_rows and rows * width <= p.max_elements)
            and bool(self.per_row("row_live", 1)[row])
            and (p.acts_in_prefill if self.per_row("row_phase", 1)[row] == 0 else p.acts_in_decode)
            and 0 <= length <= p.max_row_length
            and (offset >= 0 and offset + length - 1 <= torch.iinfo(self.topk.dtype).max)
            and (scored or length == 0 or not p.needs_scores)
        )

    def learned(self, row: int) -> set[int]:
        """The valid learned indices of a row."""
        low = self.per_row("offsets", 0)[row]
        return {index for index in self.topk[row].tolist() if low <= index < low + int(self.row_lengths[row])}

    def per_row(self, name: str, default: int) -> list[int]:
        """The values of a per-row argument, or the default where it is not given."""
        values = getattr(self, name)
        return [default] * len(self.row_lengths) if values is None else values.tolist()


@dataclass(frozen=True)
class Outcome:
    """What a run left behind: ``topk`` ``[T, K]``, the counter buffer and the error record."""

    topk: Tensor
    counters: Tensor
    error: Tensor

    def total(self, *counters: Counter) -> int:
        """Sum of some counters over both phases."""
        return int(self.counters[:, list(counters)].sum())

    def selections(self) -> list[list[int]]:
        """Each row's indices in ascending order, the -1 tail left out."""
        return [sorted(index for index in row if index != -1) for row in self.topk.tolist()]


def run(implementation: ModuleType, case: Case, error: Sequence[int] = (0, 0, 0, 0)) -> Outcome:
    """Run a case on copies of its tensors, and see to it that nothing else was written."""
    device = device_of(implementation)
    topk, memory = lay_out(case.topk.to(device), case.layout)
    scores = None if case.scores is None else lay_out(case.scores.to(device), case.layout)[0]
    call = case.call(device)._replace(topk=topk, scores=scores, error=torch.tensor(error, device=device))
    implementation.apply_into(call)
    outcome = Outcome(topk.cpu().clone(memory_format=torch.contiguous_format), call.counters.cpu(), call.error.cpu())
    assert scores is None or torch.equal(bits(scores.cpu()), bits(case.scores))
    topk.fill_(GUARD)
    assert (memory == GUARD).all() or case.layout is Layout.PLAIN, "memory around topk was written"
    return outcome


def lift(implementation: ModuleType, case: Case) -> Tensor:
    """The case's scores after a lift, ``[T, N]``."""
    device = device_of(implementation)
    scores, memory = lay_out(case.scores.to(device), case.layout)
    rows = (case.row_lengths, case.row_live, case.row_phase, case.score_start)
    implementation.lift_into(LiftCall(scores, *(to_device(values, device) for values in rows), case.params))
    lifted = scores.cpu().clone(memory_format=torch.contiguous_format)
    scores.fill_(GUARD)
    assert (memory == GUARD).all(), "memory around the scores was written"
    return lifted


def bits(scores: Tensor) -> Tensor:
    """Scores as integers, so that NaN equals itself and -0.0 differs from 0.0."""
    return scores.contiguous().view(torch.int32 if scores.element_size() == 4 else torch.int16)


def one_row(
    learned: Sequence[int],
    length: int,
    *,
    scores: Sequence[float] | None = None,
    offset: int = 0,
    dtype: torch.dtype = torch.int32,
    **config: object,
) -> Case:
    """A case of one row; without ``scores``, later tokens score higher."""
    values = [float(token) for token in range(max(length, 1))] if scores is None else scores
    return Case(
        topk=torch.tensor([list(learned)], dtype=dtype),
        row_lengths=torch.tensor([length], dtype=torch.int32),
        offsets=torch.tensor([offset], dtype=torch.int32) if offset else None,
        scores=torch.tensor([list(values)], dtype=torch.float32),
        params=lower(PolicyConfig(**config), len(learned)),
    )
