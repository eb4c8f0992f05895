"""WRAP of what every HTTP entry point makes a request's parameters with: a bad key is refused before a stream starts.

An engine is called when the first event of a stream is asked for, and then it is too late for a status of 400.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.sampling_params import SamplingParams

from kvplugin.vllm.rollout.front_end import only_front_end

_ORIGINALS: list[Callable[..., SamplingParams]] = []
"""Owner: :func:`install`."""


def install() -> None:
    """Check the plugin's keys where a request's parameters are made. Idempotent."""
    if _ORIGINALS:
        return
    original = SamplingParams.from_optional
    _ORIGINALS.append(original)

    @functools.wraps(original)
    def from_optional(*args: Any, **kwargs: Any) -> SamplingParams:
        params = original(*args, **kwargs)
        front_end = only_front_end()
        if front_end is not None:
            front_end.check(params.extra_args)
        return params

    SamplingParams.from_optional = staticmethod(from_optional)


def uninstall() -> None:
    """Put vLLM's own function back."""
    while _ORIGINALS:
        SamplingParams.from_optional = staticmethod(_ORIGINALS.pop())
