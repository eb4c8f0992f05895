"""The names under which ``--attention-backend`` finds the plugin."""

from __future__ import annotations

from typing import Any

from kvplugin.vllm.log import warn_once

BACKEND_NAME = "KVPLUGIN"
ALIAS_NAME = "CUSTOM"
CPU_BACKEND_PATH = "kvplugin.vllm.cpu.attention.CpuSparseMLABackend"


def register_names() -> None:
    """Register ``KVPLUGIN``, and ``CUSTOM`` as an alias unless another plugin holds it. Idempotent."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(BACKEND_NAME, CPU_BACKEND_PATH)
        # A member made at run time pickles by value, and a spawned process unpickles the configuration before it loads
        # plugins. Pickling through a function of this package makes that process register the name first.
        AttentionBackendEnum[BACKEND_NAME].__reduce_ex__ = lambda protocol: (backend_member, ())
    alias = AttentionBackendEnum[ALIAS_NAME]
    if not alias.is_overridden():
        register_backend(alias, CPU_BACKEND_PATH)
    elif alias.get_path() != CPU_BACKEND_PATH:
        warn_once(
            f"kvplugin: the backend name {ALIAS_NAME} belongs to {alias.get_path()}; "
            f"use --attention-backend {BACKEND_NAME} for kvplugin"
        )


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
        return bool(member.is_overridden()) and bool(member.get_path() == CPU_BACKEND_PATH)
    return bool(member.name == BACKEND_NAME)
