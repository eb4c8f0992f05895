"""Every point of vLLM that the plugin relies on is there, unchanged, and written down."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from kvplugin.vllm.ledger import CHECKED_VERSIONS, POINTS, Build, Kind, Point, page, problem, release, resolve

ROOT = Path(__file__).parents[2]
MISSING = Point("vllm.platforms.cpu:CpuPlatform.gone", Kind.READ, "", "", (), "kvplugin.vllm.plugin", "")
HERE = [point for point in POINTS if point.is_taken_in(Build.CPU, CHECKED_VERSIONS[Build.CPU][0])]
"""Those of the build that is installed; the contract tests check the others."""
CHANGED = Point("vllm.platforms.cpu:get_max_threads", Kind.READ, "", "", ("tid",), "kvplugin", "")


@pytest.mark.parametrize("point", HERE, ids=lambda point: point.target)
def test_point_stands(point: Point) -> None:
    assert problem(point) is None


def test_a_moved_point_is_noticed() -> None:
    assert str(problem(MISSING)).startswith("missing: ")
    assert problem(CHANGED) == "signature changed: (pid)"


@pytest.mark.parametrize("point", HERE, ids=lambda point: point.target)
def test_named_module_uses_the_point(point: Point) -> None:
    module = import_module(point.module)
    source = Path(str(module.__file__)).read_text()
    names = point.target.partition(":")[2].split(".")
    assert any(name in source for name in (names[-1], names[0])), f"{point.module} does not mention {point.target}"


@pytest.mark.parametrize("point", [p for p in HERE if p.kind is Kind.SUBCLASS], ids=lambda point: point.target)
def test_subclassed_point_is_inherited(point: Point) -> None:
    owner = resolve(point.target.rpartition(".")[0])
    classes = [value for value in vars(import_module(point.module)).values() if isinstance(value, type)]
    assert any(issubclass(cls, owner) and cls is not owner for cls in classes), f"nothing derives from {owner}"


def test_points_are_of_a_build_and_from_a_version() -> None:
    late = Point("a:b", Kind.READ, "", "", (), "m", "", Build.GPU, "0.32")
    assert [late.is_taken_in(Build.GPU, version) for version in ("0.31.9", "0.32.0", "0.33.0+cu130")] == [
        False,
        True,
        True,
    ]
    assert not late.is_taken_in(Build.CPU, "0.32.0")
    assert MISSING.is_taken_in(Build.CPU, "0.1")
    assert MISSING.is_taken_in(Build.GPU, "0.1")
    assert release("0.32.0+cpu") == (0, 32, 0)


def test_the_page_is_the_table() -> None:
    assert (ROOT / "docs" / "vllm-points.md").read_text() == page()
