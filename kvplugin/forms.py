"""The form of an operation that suits a device."""

from __future__ import annotations

import logging
from collections.abc import Collection
from importlib import import_module
from types import ModuleType

logger = logging.getLogger(__name__)

FASTEST = {"cpu": "numba", "cuda": "triton"}
"""Compiler of the fastest form on a device."""


def form_for(
    device_type: str, package: str, fallback: str, consequence: str, *, compilers: Collection[str] = ("numba", "triton")
) -> ModuleType:
    """The module of a package that serves a device: its fastest form, or the fallback where that is missing.

    Imported on first use: a process that only validates a configuration loads no compiler.

    Args:
        device_type: of the tensors.
        package: dotted name of the operation's package; a compiled form is called after its compiler, as ``numba_ops``.
        fallback: module of the package that runs anywhere.
        consequence: what the log says of a compiler that cannot be used.
        compilers: those that the package has a form for.
    """
    fastest = FASTEST.get(device_type)
    if fastest in compilers:
        try:
            return import_module(f"{package}.{fastest}_ops")
        except ImportError as error:
            logger.warning("kvplugin: %s cannot be used (%s); %s", fastest, error, consequence)
    return import_module(f"{package}.{fallback}")
