"""Every point of vLLM that the plugin takes hold of on a GPU is there, unchanged, and held by the module it names."""

from __future__ import annotations

import sys
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import vllm

from kvplugin.vllm.ledger import CHECKED_VERSIONS, POINTS, Build, Kind, Point, problem, resolve

pytestmark = pytest.mark.usefixtures("gpu")

HERE = [point for point in POINTS if point.is_taken_in(Build.GPU, vllm.__version__)]
LATER = [point for point in POINTS if point.build is not Build.CPU and point not in HERE]


@pytest.mark.parametrize("point", HERE, ids=lambda point: point.target)
def test_point_stands(point: Point) -> None:
    assert problem(point) is None


@pytest.mark.parametrize("point", LATER, ids=lambda point: point.target)
def test_point_of_later_versions_is_not_there_yet(point: Point) -> None:
    """Nor is it on the class itself, which may inherit a form that refuses."""
    owner, _, name = point.target.rpartition(".")
    try:
        found = resolve(owner)
    except (ImportError, AttributeError):
        return
    assert name not in vars(found), f"{point.target} is in vLLM {vllm.__version__} already"


def test_the_version_is_one_that_is_checked() -> None:
    assert vllm.__version__ in CHECKED_VERSIONS[Build.GPU]


@pytest.mark.parametrize("point", [p for p in HERE if p.build is Build.GPU], ids=lambda point: point.target)
def test_named_module_uses_the_point(point: Point) -> None:
    source = Path(str(import_module(point.module).__file__)).read_text()
    names = point.target.partition(":")[2].split(".")
    assert names[0] in source or names[-1] in source, f"{point.module} does not mention {point.target}"


@pytest.mark.parametrize(
    "point", [p for p in HERE if p.build is Build.GPU and p.kind is Kind.SUBCLASS], ids=lambda point: point.target
)
def test_subclassed_point_is_overridden(point: Point) -> None:
    """Some class of ours derives from vLLM's, and what it overrides comes from the module that the row names."""
    from kvplugin.vllm.gpu.backends import BACKENDS

    for path in BACKENDS.values():
        try:
            import_module(path.rpartition(".")[0])
        except ImportError:  # a backend of later versions
            continue
    import_module("kvplugin.vllm.gpu.worker")
    owner, name = resolve(point.target.rpartition(".")[0]), point.target.rpartition(".")[2]
    ours = [
        value
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("kvplugin.vllm.gpu.")
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, owner) and value.__module__.startswith("kvplugin.")
    ]
    assert ours, f"nothing derives from {owner}"
    modules = {getattr(value, name).__module__ for value in ours}
    inherited = "kvplugin.vllm.rollout.worker" if name == "execute_model" else point.module
    assert inherited in modules, f"{name} comes from {modules}"


@pytest.mark.parametrize(
    "point", [p for p in HERE if p.kind is Kind.WRAP and p.build is Build.GPU], ids=lambda p: p.target
)
def test_wrapped_point_is_what_vllm_finds(point: Point) -> None:
    from kvplugin.vllm.gpu import parts

    parts.install()
    found = resolve(point.target)
    if "sparse_utils" in point.target:  # as each backend's module holds it
        from vllm.v1.attention.backends.mla import flashmla_sparse

        found = getattr(flashmla_sparse, point.target.rpartition(":")[2])
        assert found.func.__module__ == "kvplugin.vllm.gpu.conversions"
    else:
        assert found.__wrapped__ is not None
        assert found.__globals__["__name__"] == point.module


def test_builders_are_made_with_what_ours_hands_on() -> None:
    from kvplugin.vllm.gpu.backends import BACKENDS

    checked = 0
    for path in BACKENDS:
        module, _, name = path.rpartition(".")
        backend = getattr(import_module(module), name, None)
        if backend is None:
            continue
        names = list(signature(backend.get_builder_cls().__init__).parameters)
        assert names == ["self", "kv_cache_spec", "layer_names", "vllm_config", "device"], f"{name}: {names}"
        names = list(signature(backend.get_impl_cls().forward_mqa).parameters)
        assert names == ["self", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"], f"{name}: {names}"
        checked += 1
    assert checked >= 5
