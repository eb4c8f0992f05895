"""What the GPU kernels cost before any GPU runs them: registers, local and shared memory, instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvplugin.errors import KvpluginError

ARCHITECTURES = (80, 90, 100)
"""A100, H100 and H200, B200: the GPUs on which vLLM has sparse MLA, and the oldest that the kernels support."""

_INTERPRETER = "TRITON_INTERPRET"
_CACHE = "TRITON_CACHE_DIR"


class KernelToolsError(KvpluginError):
    """Kernels cannot be compiled, or looked at, here.

    Attributes:
        what: what is needed.
        found: what is there instead.
        cure: what the caller can do.
    """

    def __init__(self, what: str, found: str, cure: str) -> None:
        self.what, self.found, self.cure = what, found, cure
        super().__init__(f"{what}: {found}; {cure}")

    def __reduce__(self) -> tuple[type[KernelToolsError], tuple[str, str, str]]:
        return KernelToolsError, (self.what, self.found, self.cure)


@dataclass(frozen=True)
class KernelFacts:
    """One variant's machine code for one architecture.

    Attributes:
        variant: its name.
        arch: compute capability, such as 90 for sm_90.
        warps: warps per program.
        registers: of each thread.
        local_bytes: local memory of each thread.
        local_accesses: instructions that load from or store to local memory.
        shared_bytes: shared memory of each program.
        instructions: without padding.
    """

    variant: str
    arch: int
    warps: int
    registers: int
    local_bytes: int
    local_accesses: int
    shared_bytes: int
    instructions: int

    @property
    def uses_local_memory(self) -> bool:
        """True where values do not fit the registers."""
        return self.local_bytes > 0 or self.local_accesses > 0


@dataclass(frozen=True)
class KernelTraffic:
    """Memory that a kernel asks for, in bytes per row.

    Attributes:
        name: which kernel, and how it is used.
        loaded, stored: bytes asked for, each element as often as it is loaded or stored; an atomic counts as both.
        floor: the same with each element once in and once out, which no kernel can go below.
        in_sectors: the floor in whole sectors, the units of 32 bytes that memory moves. Above the floor where elements
            are gathered; loads beyond it find their sector in a cache.
    """

    name: str
    loaded: int
    stored: int
    floor: int
    in_sectors: int

    @property
    def ratio(self) -> float:
        """Bytes asked for over the floor."""
        return (self.loaded + self.stored) / self.floor


def require_triton() -> None:
    """Raise KernelToolsError where triton is not installed; costs no import of it."""
    if find_spec("triton") is None:
        raise KernelToolsError("triton", "not installed", "pip install 'kvplugin[dev]'; GPU builds of torch bring it")


def kernel_modules() -> tuple[str, ...]:
    """Names of the modules with GPU kernels: those named after Triton that export ``variants()``."""
    package = Path(__file__).parents[1]
    paths = [path for path in package.rglob("triton_*.py") if "\ndef variants(" in path.read_text(encoding="utf-8")]
    return tuple(sorted(".".join(path.relative_to(package.parent).with_suffix("").parts) for path in paths))


def kernel_facts(
    modules: Sequence[str],
    archs: Sequence[int] = ARCHITECTURES,
    *,
    sampled_archs: Sequence[int] = (),
    processes: int | None = None,
) -> tuple[KernelFacts, ...]:
    """Compile every variant of the modules for every architecture; needs no GPU, and works under TRITON_INTERPRET.

    Takes a second or two for each, from scratch. What is compiled is thrown away, unless ``TRITON_CACHE_DIR``
    names a place to keep it.

    Args:
        modules: names of modules that export ``variants()``.
        archs: compute capabilities, such as 90 for sm_90.
        sampled_archs: more of them, for which only the first variant of each kernel is compiled.
        processes: how many to compile in; default one a core.

    Returns:
        The facts, in the order of the variants, and of ``archs`` for each; then those of ``sampled_archs``.

    Raises:
        KernelToolsError: triton is missing, or a variant does not compile.
    """
    require_triton()
    shares = processes or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="kvplugin-kernels-") as folder, ThreadPoolExecutor(shares) as pool:
        environment = {_CACHE: folder, **os.environ}
        environment.pop(_INTERPRETER, None)
        asked = {"modules": modules, "archs": archs, "sampled_archs": sampled_archs, "shares": shares}
        work = ({**asked, "share": share} for share in range(shares))
        found = list(pool.map(lambda share: _run("kvplugin.kernels.compile", environment, share), work))
    numbered = {
        share + position * shares: entry
        for share, entries in enumerate(found)
        for position, entry in enumerate(entries)
    }
    return tuple(KernelFacts(**numbered[number]) for number in sorted(numbered))


def kernel_traffic() -> tuple[KernelTraffic, ...]:
    """Bytes that the kernels move for one row; runs them in Triton's interpreter, in a process of its own.

    Raises:
        KernelToolsError: triton is missing, or a kernel fails.
    """
    require_triton()
    # Without a GPU even where there is one: other processes may be using it.
    environment = {**os.environ, _INTERPRETER: "1", "CUDA_VISIBLE_DEVICES": ""}
    return tuple(KernelTraffic(**entry) for entry in _run("kvplugin.kernels.traffic", environment))


def _run(module: str, environment: dict[str, str], work: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Run a module in a process of its own: JSON goes in and comes out."""
    command = (sys.executable, "-m", module)
    result = subprocess.run(
        command, input=json.dumps(work), capture_output=True, text=True, env=environment, check=False
    )
    if result.returncode:
        raise KernelToolsError(module, result.stderr.strip() or f"exit status {result.returncode}", "report this")
    entries: list[dict[str, Any]] = json.loads(result.stdout)
    return entries
