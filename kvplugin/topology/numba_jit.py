"""How the numba kernels are compiled: without the GIL, and cached on disk where that is possible."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import njit, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(function: _Function) -> _Function:
    """Compile a function that only other kernels call; its machine code travels with theirs."""
    compiled: _Function = njit(nogil=True, error_model="numpy")(function)
    return compiled


def inlined(function: _Function) -> _Function:
    """Expand a function where other kernels call it.

    For what runs once per token or has one caller: a call counts a reference to each array that it passes.
    """
    compiled: _Function = njit(nogil=True, error_model="numpy", inline="always")(function)
    return compiled


def entry(function: _Function) -> _Function:
    """Compile a kernel that Python calls, and keep the machine code on disk.

    numba looks for a writable place beside the source, then in the user's cache directory (or only in
    ``NUMBA_CACHE_DIR``). Without any, the kernel is compiled anew in each process.
    """
    try:
        compiled: _Function = njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # numba found no place to write to
        compiled = njit(nogil=True, error_model="numpy")(function)
    return compiled


def source_stamp() -> int:
    """A checksum of everything that is compiled into a kernel.

    numba's cache notices a change in the file of the entry kernel alone. An entry that holds this number in its closure
    is also recompiled when a kernel it calls, or an enum it reads, has changed in another file.
    """
    package = Path(__file__).parent
    stamp = 0
    for path in sorted([*package.glob("numba_*.py"), package / "counters.py", package.parent / "config.py"]):
        stamp = zlib.crc32(path.read_bytes(), stamp)
    return stamp


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add(typing_context: Any, counter: Any, amount: Any) -> Any:
    """Add ``amount`` to the int64 ``counter[0]`` in one step that other threads cannot split; return the old value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", array.data, arguments[1], "monotonic")

    return types.int64(counter, types.int64), generate
