"""WRAP of vLLM's output processor: latencies and tokens per arm, as the front end sees them.

vLLM's own finished-request statistics name requests as their clients do, and clients repeat themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from kvplugin.requests.keys import ASSIGNED_ARM_KEY
from kvplugin.vllm.rollout.front_end import metrics_of_requests
from kvplugin.vllm.rollout.request_trace import RequestTrace

TRACE = "kvplugin_trace"
"""Attribute of the state of a request that has an arm."""
ARM = "kvplugin_arm"
"""Attribute of the output of such a request, for callers of ``LLM`` and ``AsyncLLM``."""
_ORIGINALS: dict[tuple[type, str], Callable[..., Any]] = {}
"""Owner: :func:`install`."""


def install() -> None:
    """Make output processors trace requests that have an arm. Idempotent."""
    if _ORIGINALS:
        return
    for owner, name, wrap in (
        (OutputProcessor, "add_request", _tracing),
        (RequestState, "make_request_output", _traced),
    ):
        original = getattr(owner, name)
        _ORIGINALS[owner, name] = original
        setattr(owner, name, wrap(original))


def uninstall() -> None:
    """Put vLLM's own methods back."""
    for (owner, name), original in _ORIGINALS.items():
        setattr(owner, name, original)
    _ORIGINALS.clear()


def _tracing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def add_request(self: OutputProcessor, request: Any, *args: Any, **kwargs: Any) -> None:
        known = request.request_id in self.request_states
        original(self, request, *args, **kwargs)
        params = request.sampling_params
        arm = None if params is None or known else (params.extra_args or {}).get(ASSIGNED_ARM_KEY)
        if arm is not None:
            state = self.request_states[request.request_id]
            setattr(state, TRACE, RequestTrace(arm, request.arrival_time, state.prompt_len, metrics_of_requests()))

    return add_request


def _traced(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make_request_output(
        self: RequestState, new_token_ids: list[int], pooling_output: Any, finish_reason: Any, *args: Any, **kwargs: Any
    ) -> Any:
        output = original(self, new_token_ids, pooling_output, finish_reason, *args, **kwargs)
        trace: RequestTrace | None = getattr(self, TRACE, None)
        if trace is not None:
            trace.put_out(len(new_token_ids), None if finish_reason is None else str(finish_reason))
            if output is not None:
                setattr(output, ARM, trace.arm)
        return output

    return make_request_output
