"""Triton's interpreter, without the half of its time that it spends on patching its own modules again and again."""

from __future__ import annotations

import os
from functools import cache
from typing import Any


def use_interpreter() -> None:
    """Run kernels that are defined from now on in the interpreter.

    A launch patches ``triton.language`` for its duration, and each call of a device function inside it patches what
    that function sees, for good: once is enough.
    """
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton.runtime import interpreter

    @cache
    def patch_library(module: str, function: interpreter.InterpretedFunction) -> None:
        interpreter._patch_lang(function.fn)

    def call_device_function(self: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith("triton."):
            patch_library(self.fn.__module__, self)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call_device_function
