"""The GPU kernels compile for every architecture and stay within the registers; no GPU is needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvplugin.kernels.static import (
    ARCHITECTURES,
    KernelFacts,
    KernelToolsError,
    KernelTraffic,
    kernel_facts,
    kernel_modules,
    kernel_traffic,
)

HERE = Path(__file__).parent
INT = 4
STRUCTURAL_TOKENS = 68
"""Of the default policy: 4 sinks and 64 local tokens."""


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let worker processes import the kernels beside this file, as a caller does who runs the interpreter."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_no_kernel_needs_local_memory() -> None:
    """Every variant for Hopper, every kernel for the others; ``kvplugin bench kernels --static`` has all of them."""
    modules = kernel_modules()
    assert "kvplugin.remap.triton_ops" in modules
    facts = kernel_facts(modules, [90], sampled_archs=[arch for arch in ARCHITECTURES if arch != 90])
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
    order = [(arch, f"width {width}") for width in (32, 64, 128) for arch in (80, 90)]
    assert [(entry.arch, entry.variant) for entry in alone] == order
    assert not any(entry.uses_local_memory for entry in alone)
    assert all(entry.registers and entry.instructions > 10 for entry in alone)
    assert kernel_facts(["small_kernels"], [80, 90], processes=2) == alone
    sampled = kernel_facts(["small_kernels"], [90], sampled_archs=[80], processes=2)
    assert [(entry.arch, entry.variant) for entry in sampled] == [*order[1::2], (80, "width 32")]


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


@pytest.fixture(scope="module")
def traffic() -> dict[str, KernelTraffic]:
    return {entry.name: entry for entry in kernel_traffic()}


SLOTS = 2048 * INT
METADATA = 512
"""More than a row's length, request, live flag, phase and arm, its policy, a table of members and the counters need."""


@pytest.mark.parametrize("members", [1, 4])
def test_a_row_of_the_remap_moves_little_more_than_it_must(traffic: dict[str, KernelTraffic], members: int) -> None:
    """In: the learned row and a table entry a slot. Out: the physical rows and a count. Next to nothing else."""
    entry = traffic[f"remap, {members} member{'s' * (members > 1)}"]
    assert entry.stored == members * SLOTS + INT
    assert 0 <= entry.loaded - 2 * SLOTS < METADATA
    assert (1 + members) * SLOTS < entry.floor < (2 + members) * SLOTS + METADATA, "each page once"
    assert entry.ratio < 1.2


def test_a_row_of_the_policy_moves_little_more_than_it_must(traffic: dict[str, KernelTraffic]) -> None:
    """In: the learned row and a score a slot. Out: the slots that change, at most one for each structural token."""
    entry = traffic["policy"]
    assert 0 <= entry.loaded - 2 * SLOTS < METADATA
    assert 0 < entry.stored < STRUCTURAL_TOKENS * INT + METADATA
    assert 2 * SLOTS < entry.floor <= entry.loaded + entry.stored
    assert entry.ratio < 1.02


def test_a_gathered_score_costs_a_sector(traffic: dict[str, KernelTraffic]) -> None:
    """They lie apart in the score row, so that nearly each of them moves 32 bytes."""
    gathered = traffic["policy"].in_sectors - SLOTS
    assert 0.8 * 2048 * 32 < gathered < 2048 * 32 + 8 * METADATA
    assert traffic["remap, 4 members"].in_sectors < 6.1 * SLOTS


def test_a_lift_stores_the_structure(traffic: dict[str, KernelTraffic]) -> None:
    assert traffic["lift"].stored == STRUCTURAL_TOKENS * INT
    assert traffic["lift"].loaded < METADATA


def test_the_fused_form_asks_for_the_same_and_saves_memory_one_row(traffic: dict[str, KernelTraffic]) -> None:
    policy, remap = traffic["policy"], traffic["remap, 4 members"]
    fused = traffic["policy and remap fused, 4 members"]
    assert (fused.loaded, fused.stored) == (policy.loaded + remap.loaded, policy.stored + remap.stored)
    assert abs(policy.floor + remap.floor - fused.floor - SLOTS) < METADATA
    assert abs(policy.in_sectors + remap.in_sectors - fused.in_sectors - SLOTS) < METADATA
