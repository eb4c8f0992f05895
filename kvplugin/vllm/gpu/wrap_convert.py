"""Wraps vLLM's index conversions as its sparse MLA backends look them up: layers of a group read their leader's."""

from __future__ import annotations

from functools import partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any

from vllm.v1.attention.backends.mla import sparse_utils

from kvplugin.vllm.gpu.conversions import converted

MODULES = (
    "vllm.model_executor.layers.attention.sparse_mla_attention",
    "vllm.v1.attention.backends.mla.flashattn_mla_sparse",
    "vllm.v1.attention.backends.mla.flashinfer_mla_sparse",
    "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90",
    "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm120",
    "vllm.v1.attention.backends.mla.flashmla_sparse",
    "vllm.v1.attention.backends.mla.index_group",
)
"""Modules that may hold the functions as globals; which of them do differs between vLLM's versions."""
ORIGINALS = {
    name: getattr(sparse_utils, name)
    for name in ("triton_convert_req_index_to_global_index", "triton_filter_and_convert_dcp_index")
}
WRAPS = {name: wraps(original)(partial(converted, original)) for name, original in ORIGINALS.items()}


def holders() -> list[tuple[ModuleType, str]]:
    """Each module that is loaded or can be, and the function it holds under its own name."""
    return [
        (module, name)
        for module in map(_loaded, MODULES)
        if module is not None
        for name in ORIGINALS
        if hasattr(module, name)
    ]


def install() -> None:
    """Put the wraps in place. Idempotent."""
    _put(WRAPS)


def uninstall() -> None:
    """Put vLLM's own functions back."""
    _put(ORIGINALS)


def _put(functions: dict[str, Any]) -> None:
    for module, name in holders():
        setattr(module, name, functions[name])


def _loaded(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except (ImportError, OSError):  # kernels that this machine does not have; its backend cannot be chosen then
        return None
