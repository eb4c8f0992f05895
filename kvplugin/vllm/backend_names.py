"""The names under which ``--attention-backend`` finds the plugin."""

from __future__ import annotations

from typing import Any

from kvplugin.vllm.log import warn_once

BACKEND_NAME = "KVPLUGIN"
ALIAS_NAME = "CUSTOM"
CPU_BACKEND_PATH = "kvplugin.vllm.cpu.attention.CpuSparseMLABackend"
GPU_BACKEND_PATH = "kvplugin.vllm.gpu.flashmla.KvpluginFlashMLASparseBackend"
"""Stands for all GPU backends: the plugin's platform puts the one in its place that the layer needs."""
OUR_PATHS = (CPU_BACKEND_PATH, GPU_BACKEND_PATH)


def register_names() -> None:
    """Register ``CUSTOM``, unless another plugin holds it, and ``KVPLUGIN`` where vLLM takes new names. Idempotent."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = _path_here()
    if takes_new_names() and BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(BACKEND_NAME, path)
        # A member made at run time pickles by value, and a spawned process unpickles the configuration before it loads
        # plugins. Pickling through a function of this package makes that process register the name first.
        AttentionBackendEnum[BACKEND_NAME].__reduce_ex__ = lambda protocol: (backend_member, ())
    alias = AttentionBackendEnum[ALIAS_NAME]
    if not alias.is_overridden():
        register_backend(alias, path)
    elif alias.get_path() not in OUR_PATHS:
        cure = (
            f"use --attention-backend {BACKEND_NAME} for kvplugin" if takes_new_names() else "uninstall one of the two"
        )
        warn_once(f"kvplugin: the backend name {ALIAS_NAME} belongs to {alias.get_path()}; {cure}")


def takes_new_names() -> bool:
    """True where vLLM's registry takes names of its users' own; 0.30 and 0.31 know ``CUSTOM`` only."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return hasattr(AttentionBackendEnum, "register")


def name_to_choose() -> str:
    """What to give to ``--attention-backend`` here."""
    return BACKEND_NAME if takes_new_names() else ALIAS_NAME


def backend_member() -> Any:
    """The ``KVPLUGIN`` member of vLLM's backend enum, registered if need be."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register_names()
    return AttentionBackendEnum[BACKEND_NAME]


def is_ours(member: Any) -> bool:
    """True where a backend chosen on the command line leads to this plugin."""
    if member is None:
        return False
    if member.name == ALIAS_NAME:
        return bool(member.is_overridden()) and bool(member.get_path() in OUR_PATHS)
    return bool(member.name == BACKEND_NAME)


def _path_here() -> str:
    from vllm.platforms import current_platform

    return GPU_BACKEND_PATH if current_platform.is_cuda() else CPU_BACKEND_PATH
