"""How vLLM finds the plugin, and what happens where it cannot use it."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import vllm.plugins
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from kvplugin.vllm import backend_names, plugin
from kvplugin.vllm.cpu.platform import KvpluginCpuPlatform


@pytest.fixture
def foreign_custom() -> Iterator[str]:
    """Another plugin holds the name CUSTOM."""
    register_backend(AttentionBackendEnum.CUSTOM, "other.plugin.Backend")
    yield "other.plugin.Backend"
    AttentionBackendEnum.CUSTOM.clear_override()
    backend_names.register_names()


def test_both_names_lead_to_the_backend() -> None:
    plugin.register()
    for name in ("KVPLUGIN", "CUSTOM"):
        member = AttentionBackendEnum[name]
        assert backend_names.is_ours(member)
        assert member.get_class().__module__ == "kvplugin.vllm.cpu.attention"


def test_registering_twice_is_harmless() -> None:
    plugin.register()
    first = AttentionBackendEnum["KVPLUGIN"]
    plugin.register()
    assert AttentionBackendEnum["KVPLUGIN"] is first


def test_the_member_reaches_a_process_that_has_not_loaded_plugins() -> None:
    """A spawned engine core unpickles its configuration before it loads plugins."""
    plugin.register()
    data = pickle.dumps(AttentionBackendEnum["KVPLUGIN"])
    code = f"import pickle; print(pickle.loads({data!r}).name)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip().splitlines()[-1] == "KVPLUGIN"


def test_a_clash_over_custom_is_reported(foreign_custom: str, plugin_log: list[str]) -> None:
    plugin.register()
    assert any(foreign_custom in line for line in plugin_log), plugin_log
    assert AttentionBackendEnum.CUSTOM.get_path() == foreign_custom
    assert not backend_names.is_ours(AttentionBackendEnum.CUSTOM)
    assert backend_names.is_ours(AttentionBackendEnum["KVPLUGIN"])


def test_the_platform_is_ours_and_still_a_cpu() -> None:
    assert isinstance(current_platform, KvpluginCpuPlatform)
    assert current_platform.is_cpu()


@pytest.mark.parametrize("variable", ["KVPLUGIN_DISABLE", "VLLM_KVPLUGIN_DISABLE"])
def test_disabled_by_the_environment(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    assert plugin.platform() is None
    plugin.register()
    assert "KVPLUGIN" in AttentionBackendEnum.__members__


def test_another_platform_plugin_comes_first(plugin_log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    probes = {"kvplugin": plugin.platform, "other": lambda: "other.Platform"}
    monkeypatch.setattr(plugin, "entry_points", lambda group: list(probes))
    monkeypatch.setattr(vllm.plugins, "load_plugins_by_group", lambda group: probes)
    assert plugin.platform() is None
    assert any("the platform plugin 'other' is in charge" in line for line in plugin_log), plugin_log


def test_a_moved_vllm_module_leaves_the_stock_platform(plugin_log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(plugin, "import_module", moved)
    assert plugin.platform() is None
    assert any("inactive: unsupported_vllm" in line for line in plugin_log), plugin_log


def test_a_moved_registry_does_not_stop_vllm(plugin_log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvplugin.vllm.backend_names", None)
    plugin.register()
    assert any("inactive: unsupported_vllm" in line for line in plugin_log), plugin_log
    monkeypatch.undo()
    importlib.import_module("kvplugin.vllm.backend_names")
