"""Compile kernel variants without a GPU and read what they need of one: ``python -m kvplugin.kernels.compile``.

:mod:`kvplugin.kernels.static` runs it as a process of its own, because kernels that were imported under
``TRITON_INTERPRET=1`` cannot be compiled in that process any more.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvplugin.kernels.elf import code_sections
from kvplugin.kernels.static import KernelFacts
from kvplugin.kernels.variant import KernelVariant

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
"""Triton's own, which know every architecture it compiles for; those of a CUDA installation may be older."""

_WARP_SIZE = 32
_POINTER_ALIGNMENT = [["tt.divisibility", 16]]
"""What Triton finds at run time in the pointers of whole torch tensors."""

_RESOURCES = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) .*?LOCAL:(?P<local>\d+)")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", re.MULTILINE)
_PADDING = "NOP"
_LOCAL_MEMORY = ("LDL", "STL")


class CompiledKernel(NamedTuple):
    """A variant's machine code for one architecture, and the shared memory that a launch of it asks for."""

    variant: KernelVariant
    arch: int
    cubin: bytes
    shared_bytes: int


def compile_variant(variant: KernelVariant, arch: int) -> CompiledKernel:
    """Compile for one architecture, such as 90 for sm_90.

    Raises:
        RuntimeError: with the variant's name, from the compiler's own error.
    """
    names = variant.kernel.arg_names
    pointers = [name for name, kind in variant.signature.items() if kind.startswith("*")]
    source = ASTSource(
        fn=variant.kernel,
        signature={**variant.signature, **dict.fromkeys(variant.constexprs, "constexpr")},
        constexprs=variant.constexprs,
        attrs={(names.index(name),): _POINTER_ALIGNMENT for name in pointers},
    )
    target = GPUTarget("cuda", arch, _WARP_SIZE)
    try:
        compiled = triton.compile(
            source, target=target, options={"num_warps": variant.num_warps, "maxnreg": variant.maxnreg}
        )
    except Exception as error:
        raise RuntimeError(f"{variant.name} does not compile for sm_{arch}") from error
    return CompiledKernel(variant, arch, compiled.asm["cubin"], compiled.metadata.shared)


def facts_of(kernels: Sequence[CompiledKernel]) -> list[KernelFacts]:
    """Look at machine code."""
    found: dict[int, KernelFacts] = {}
    for arch in {kernel.arch for kernel in kernels}:
        same = {number: kernel for number, kernel in enumerate(kernels) if kernel.arch == arch}
        opcodes = _opcodes([kernel.cubin for kernel in same.values()], arch)
        found |= {number: _facts(kernel, used) for (number, kernel), used in zip(same.items(), opcodes, strict=True)}
    return [found[number] for number in range(len(kernels))]


def _facts(kernel: CompiledKernel, opcodes: Counter[str]) -> KernelFacts:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.cubin)
        file.flush()
        resources = _RESOURCES.search(_tool("cuobjdump", "--dump-resource-usage", file.name))
    if resources is None or not opcodes:
        raise RuntimeError(f"{kernel.variant.name}: cuobjdump and nvdisasm say nothing that is understood here")
    local_accesses = sum(opcodes[opcode] for opcode in _LOCAL_MEMORY)
    # Spilled values lie on the stack; compilers also reserve a few bytes of it that nothing uses.
    used_stack = int(resources["stack"]) if local_accesses else 0
    return KernelFacts(
        variant=kernel.variant.name,
        arch=kernel.arch,
        warps=kernel.variant.num_warps,
        registers=int(resources["registers"]),
        local_bytes=int(resources["local"]) + used_stack,
        local_accesses=local_accesses,
        shared_bytes=kernel.shared_bytes,
        instructions=opcodes.total() - opcodes[_PADDING],
    )


def _opcodes(cubins: Sequence[bytes], arch: int) -> list[Counter[str]]:
    """How often each instruction occurs in each kernel; all in one run, as nvdisasm takes long to start."""
    codes = [b"".join(code_sections(cubin)) for cubin in cubins]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        # From Hopper on, Triton compiles for the architecture's own instructions.
        listing = _tool("nvdisasm", "--binary", f"SM{arch}a" if arch >= 90 else f"SM{arch}", file.name)
    found = [(int(address, 16), opcode) for address, opcode in _INSTRUCTION.findall(listing)]
    bounds = pairwise(accumulate(map(len, codes), initial=0))
    return [Counter(opcode for address, opcode in found if start <= address < end) for start, end in bounds]


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def compile_share(
    modules: Sequence[str], archs: Sequence[int], sampled_archs: Sequence[int], share: int, shares: int
) -> list[KernelFacts]:
    """Every ``shares``-th of all variants on all architectures, beginning with number ``share``.

    A variant costs about the same on each architecture, so that neighbours go to different shares.
    """
    variants = [variant for module in modules for variant in import_module(module).variants()]
    first = {variant.kernel: variant for variant in reversed(variants)}
    pairs = [*product(variants, archs), *product(reversed(first.values()), sampled_archs)]
    return facts_of([compile_variant(*pair) for pair in pairs[share::shares]])


if __name__ == "__main__":
    print(json.dumps([asdict(facts) for facts in compile_share(**json.load(sys.stdin))]))
