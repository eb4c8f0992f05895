"""The GPU kernels compile for every architecture and stay within the registers; no GPU is needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvplugin.kernel_static import (
    ARCHITECTURES,
    KernelFacts,
    KernelToolsError,
    kernel_facts,
    kernel_modules,
    kernel_traffic,
)

HERE = Path(__file__).parent
INT = 4


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let worker processes import the kernels beside this file, as a caller does who runs the interpreter."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_no_kernel_needs_local_memory() -> None:
    modules = kernel_modules()
    assert "kvplugin.remap.triton_ops" in modules
    facts = kernel_facts(modules)
    assert {entry.arch for entry in facts} == set(ARCHITECTURES)
    names = [(entry.variant, entry.arch) for entry in facts]
    assert len(set(names)) == len(names), "two variants have one name"
    assert [entry for entry in facts if entry.uses_local_memory] == []


@pytest.mark.usefixtures("own_kernels")
def test_a_kernel_that_spills_is_found() -> None:
    (spills,) = kernel_facts(["spilling_kernels"], [90])
    assert (spills.variant, spills.arch, spills.warps, spills.registers) == ("width 8192", 90, 1, 255)
    assert spills.uses_local_memory
    assert min(spills.local_bytes, spills.local_accesses) > 0


@pytest.mark.usefixtures("own_kernels")
def test_facts_do_not_depend_on_how_the_work_is_shared() -> None:
    alone = kernel_facts(["small_kernels"], [80, 90], processes=1)
    order = [(arch, f"width {width}") for arch in (80, 90) for width in (32, 64, 128)]
    assert [(entry.arch, entry.variant) for entry in alone] == order
    assert not any(entry.uses_local_memory for entry in alone)
    assert all(entry.registers and entry.instructions > 10 for entry in alone)
    assert kernel_facts(["small_kernels"], [80, 90], processes=2) == alone


@pytest.mark.usefixtures("own_kernels")
def test_a_kernel_that_does_not_compile_is_named() -> None:
    with pytest.raises(KernelToolsError, match="RuntimeError: broken does not compile for sm_90"):
        kernel_facts(["broken_kernels"], [90])


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (KernelFacts("a", 90, 4, 40, 0, 0, 0, 100), False),
        (KernelFacts("a", 90, 4, 40, 8, 0, 0, 100), True),
        (KernelFacts("a", 90, 4, 40, 0, 1, 0, 100), True),
    ],
)
def test_what_counts_as_local_memory(facts: KernelFacts, expected: bool) -> None:
    assert facts.uses_local_memory is expected


def test_a_row_of_the_remap_moves_little_more_than_it_must() -> None:
    """In: the learned row and a table entry a slot. Out: the physical rows and a count. Next to nothing else."""
    traffic = {entry.name: entry for entry in kernel_traffic()}
    assert len(traffic) == 2
    for members, entry in zip((1, 4), traffic.values(), strict=True):
        slots = 2048 * INT
        assert entry.stored == members * slots + INT
        assert 0 <= entry.loaded - 2 * slots < slots / 50
        assert (1 + members) * slots < entry.floor < (2 + members) * slots + slots / 50, "each page once"
        assert entry.ratio < 1.2
