"""Every point of vLLM that the plugin relies on is there, unchanged, and written down."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from kvplugin.vllm.ledger import POINTS, Kind, Point, page, problem, resolve

ROOT = Path(__file__).parents[2]
MISSING = Point("vllm.platforms.cpu:CpuPlatform.gone", Kind.READ, "", "", (), "kvplugin.vllm.plugin", "")
CHANGED = POINTS[0].__class__("vllm.platforms.cpu:get_max_threads", Kind.READ, "", "", ("tid",), "kvplugin", "")


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.target)
def test_point_stands(point: Point) -> None:
    assert problem(point) is None


def test_a_moved_point_is_noticed() -> None:
    assert str(problem(MISSING)).startswith("missing: ")
    assert problem(CHANGED) == "signature changed: (pid)"


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.target)
def test_named_module_uses_the_point(point: Point) -> None:
    module = import_module(point.module)
    source = Path(str(module.__file__)).read_text()
    names = point.target.partition(":")[2].split(".")
    assert any(name in source for name in (names[-1], names[0])), f"{point.module} does not mention {point.target}"


@pytest.mark.parametrize("point", [p for p in POINTS if p.kind is Kind.SUBCLASS], ids=lambda point: point.target)
def test_subclassed_point_is_inherited(point: Point) -> None:
    owner = resolve(point.target.rpartition(".")[0])
    classes = [value for value in vars(import_module(point.module)).values() if isinstance(value, type)]
    assert any(issubclass(cls, owner) and cls is not owner for cls in classes), f"nothing derives from {owner}"


def test_the_page_is_the_table() -> None:
    assert (ROOT / "docs" / "vllm-points.md").read_text() == page()
