"""Which addresses a kernel loads and stores, noted while Triton's interpreter runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder

SECTOR_BYTES = 32
"""The least that an NVIDIA GPU reads from its memory or writes to it."""


class AccessLog:
    """Addresses of every element that was loaded, or of every one that was stored, and their size."""

    def __init__(self) -> None:
        self.addresses: list[np.ndarray[Any, Any]] = []
        self.sizes: list[int] = []

    def add(self, pointers: Any, mask: Any) -> None:
        """Note an access; both are handles of the interpreter."""
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

    @property
    def in_sectors(self) -> int:
        """Bytes of the sectors that hold them, each once; no element lies in two."""
        sectors = {sector for addresses in self.addresses for sector in (addresses // SECTOR_BYTES).ravel().tolist()}
        return SECTOR_BYTES * len(sectors)


@contextmanager
def logged() -> Iterator[tuple[AccessLog, AccessLog]]:
    """Log the loads and the stores of kernels that the interpreter runs; a masked atomic is one of each."""
    loads, stores = AccessLog(), AccessLog()
    methods = ("create_masked_load", "create_masked_store", "create_atomic_rmw")
    originals = {name: getattr(InterpreterBuilder, name) for name in methods}

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        loads.add(pointers, mask)
        return originals["create_masked_load"](self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, values: Any, mask: Any, *rest: Any) -> Any:
        stores.add(pointers, mask)
        return originals["create_masked_store"](self, pointers, values, mask, *rest)

    def atomic(self: Any, operation: Any, pointers: Any, values: Any, mask: Any, *rest: Any) -> Any:
        loads.add(pointers, mask)
        stores.add(pointers, mask)
        return originals["create_atomic_rmw"](self, operation, pointers, values, mask, *rest)

    for name, replacement in zip(methods, (load, store, atomic), strict=True):
        setattr(InterpreterBuilder, name, replacement)
    try:
        yield loads, stores
    finally:
        for name, original in originals.items():
            setattr(InterpreterBuilder, name, original)
