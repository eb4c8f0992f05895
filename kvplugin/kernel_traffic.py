"""Bytes that a kernel asks of memory for one row, counted while Triton's interpreter runs it.

Run it as ``TRITON_INTERPRET=1 python -m kvplugin.kernel_traffic``; :func:`kvplugin.kernel_static.kernel_traffic` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder

from kvplugin.kernel_static import KernelTraffic
from kvplugin.remap import Member, triton_ops
from kvplugin.remap.call import NO_CONTEXT_PARALLEL, RemapCall

WIDTH, CONTEXT, BLOCK_SIZE = 2048, 131072, 64
"""Slots of a row, as in DeepSeek-V3.2 and GLM-5.2; tokens to choose from, and tokens per block of the pool."""


class _Log:
    """Addresses of every element that was loaded or stored, and their size."""

    def __init__(self) -> None:
        self.addresses: list[np.ndarray[Any, Any]] = []
        self.sizes: list[int] = []

    def add(self, pointers: Any, mask: Any) -> None:
        self.addresses.append(pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)])
        self.sizes.append(pointers.get_element_ty().primitive_bitwidth // 8)

    @property
    def moved(self) -> int:
        """Bytes asked for."""
        return sum(len(addresses) * size for addresses, size in zip(self.addresses, self.sizes, strict=True))

    @property
    def distinct(self) -> int:
        """The same, each element once."""
        sizes: dict[int, int] = {}
        for addresses, size in zip(self.addresses, self.sizes, strict=True):
            sizes.update(dict.fromkeys(addresses.tolist(), size))
        return sum(sizes.values())


@contextmanager
def _logged() -> Iterator[tuple[_Log, _Log]]:
    """Log the loads and the stores of kernels that the interpreter runs."""
    loads, stores = _Log(), _Log()
    originals = {name: getattr(InterpreterBuilder, name) for name in ("create_masked_load", "create_masked_store")}

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        loads.add(pointers, mask)
        return originals["create_masked_load"](self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, values: Any, mask: Any, *rest: Any) -> Any:
        stores.add(pointers, mask)
        return originals["create_masked_store"](self, pointers, values, mask, *rest)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
    try:
        yield loads, stores
    finally:
        for name, original in originals.items():
            setattr(InterpreterBuilder, name, original)


def traffic_of(name: str, run: Callable[[], None]) -> KernelTraffic:
    """Count what the kernels that ``run`` launches load and store, atomics left out: healthy rows need none."""
    with _logged() as (loads, stores):
        run()
    return KernelTraffic(name, loads.moved, stores.moved, loads.distinct + stores.distinct)


def remap_row(members: int) -> RemapCall:
    """One full decode row with its count, for so many layers with pools of their own, packed block by block."""
    generator = torch.Generator().manual_seed(0)
    blocks = CONTEXT // BLOCK_SIZE
    places = [Member(BLOCK_SIZE * members, BLOCK_SIZE * member) for member in range(members)]
    return RemapCall(
        topk=torch.randperm(CONTEXT, generator=generator)[None, :WIDTH].to(torch.int32),
        request_of_row=torch.zeros(1, dtype=torch.int32),
        block_table=torch.randperm(blocks, generator=generator)[None].to(torch.int32),
        members=torch.tensor(places, dtype=torch.int64),
        block_size=BLOCK_SIZE,
        num_blocks=blocks,
        compact=True,
        context_parallel=NO_CONTEXT_PARALLEL,
        workspace=None,
        physical=torch.empty(members, 1, WIDTH, dtype=torch.int32),
        valid=torch.empty(1, dtype=torch.int32),
        counters=None,
    )


def all_traffic() -> list[KernelTraffic]:
    """The remap for one layer, which also serves a group whose layers share their physical rows, and for four."""
    rows = {"remap, 1 member": remap_row(1), "remap, 4 members": remap_row(4)}
    return [traffic_of(name, partial(triton_ops.remap_into, row)) for name, row in rows.items()]


if __name__ == "__main__":
    print(json.dumps([asdict(entry) for entry in all_traffic()]))
