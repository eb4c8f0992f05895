"""What one request's tokens say of its arm: time to first token, between tokens and to the end, and how many."""

from __future__ import annotations

import time

from kvplugin.metrics.definitions import (
    REQUEST_E2E,
    REQUEST_FINISHED,
    REQUEST_GENERATION_TOKENS,
    REQUEST_INTER_TOKEN,
    REQUEST_PROMPT_TOKENS,
    REQUEST_TTFT,
)
from kvplugin.metrics.host import HostMetrics


class RequestTrace:
    """The trace of one request, by the front end's wall clock, which is also what its arrival was taken from.

    Args:
        arm: its arm.
        arrived: seconds since the epoch.
        prompt_tokens: length of its prompt.
        metrics: of its front end.
    """

    def __init__(self, arm: str, arrived: float, prompt_tokens: int, metrics: HostMetrics) -> None:
        self.arm = arm
        self._arrived = arrived
        self._last: float | None = None
        self._metrics = metrics
        self._metrics.inc(REQUEST_PROMPT_TOKENS, (arm,), prompt_tokens)

    def put_out(self, tokens: int, finished: str | None) -> None:
        """The engine put out so many new tokens, and with them the reason why it ended, if it did."""
        now = time.time()
        if tokens:
            self._metrics.inc(REQUEST_GENERATION_TOKENS, (self.arm,), tokens)
            if self._last is None:
                self._metrics.observe(REQUEST_TTFT, (self.arm,), max(0.0, now - self._arrived))
            else:
                # Several tokens at once, from speculation, share the time since the last ones.
                share = max(0.0, now - self._last) / tokens
                self._metrics.observe(REQUEST_INTER_TOKEN, (self.arm,), share, tokens)
            self._last = now
        if finished is not None:
            self._metrics.observe(REQUEST_E2E, (self.arm,), max(0.0, now - self._arrived))
            self._metrics.inc(REQUEST_FINISHED, (self.arm, finished))
