"""vLLM's entry points into the plugin. Nothing here may raise: vLLM calls both in every process, unguarded."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from kvplugin.metrics.directory import prepare_directory
from kvplugin.vllm.log import info_once, logger
from kvplugin.vllm.settings import disabled_by_environment

CPU_PLATFORM_PATH = "kvplugin.vllm.cpu.platform.KvpluginCpuPlatform"
STOCK_CPU_PLATFORM_PATH = "vllm.platforms.cpu.CpuPlatform"
CUDA_PLATFORM_PATH = "kvplugin.vllm.gpu.platform.KvpluginCudaPlatform"
STOCK_CUDA_PLATFORM_PATH = "vllm.platforms.cuda.CudaPlatform"


def register() -> None:
    """``vllm.general_plugins``: make the backend names known. Idempotent and cheap; resolves no configuration."""
    try:
        from vllm.platforms import current_platform

        from kvplugin.vllm.backend_names import register_names

        if disabled_by_environment():
            info_once("kvplugin: inactive: disabled_by_env; vLLM runs as without the plugin")
        if current_platform.is_cpu() or current_platform.is_cuda():
            register_names()
        else:
            logger.info(
                "kvplugin: inactive: unsupported_platform (%s); the plugin serves vLLM's CUDA and CPU engines",
                current_platform.device_type,
            )
    except Exception:
        logger.exception("kvplugin: inactive: unsupported_vllm; registration failed, vLLM goes on without the plugin")


def platform() -> str | None:
    """``vllm.platform_plugins``: replace the stock CUDA or CPU platform by a subclass that knows our backends."""
    try:
        if _other_platform_plugin():
            return None
        path = _platform_here()
        if path is None:
            return None
        # Imported here, where a failure is caught: vLLM imports the answer unguarded.
        import_module(path.rpartition(".")[0])
        if not disabled_by_environment():
            prepare_directory()
    except Exception:
        logger.exception("kvplugin: inactive: unsupported_vllm; vLLM keeps its own platform")
        return None
    return path


def _platform_here() -> str | None:
    """The platform of ours that takes the place of vLLM's own on this machine."""
    from vllm.platforms import cpu_platform_plugin, cuda_platform_plugin

    if cuda_platform_plugin() == STOCK_CUDA_PLATFORM_PATH:
        # Also where the plugin is switched off: its names go on working, and stand for what vLLM picks.
        return CUDA_PLATFORM_PATH
    if cpu_platform_plugin() == STOCK_CPU_PLATFORM_PATH and not disabled_by_environment():
        return CPU_PLATFORM_PATH
    return None


def _other_platform_plugin() -> str | None:
    """Name of another out-of-tree platform that wants this process; vLLM refuses to start when two do."""
    from vllm.plugins import PLATFORM_PLUGINS_GROUP, load_plugins_by_group

    # Loading them logs each one; with ours alone there is nothing to ask.
    if len(entry_points(group=PLATFORM_PLUGINS_GROUP)) < 2:
        return None
    for name, probe in load_plugins_by_group(PLATFORM_PLUGINS_GROUP).items():
        if probe is not platform and probe() is not None:
            logger.warning("kvplugin: inactive: unsupported_platform; the platform plugin %r is in charge", name)
            return str(name)
    return None
