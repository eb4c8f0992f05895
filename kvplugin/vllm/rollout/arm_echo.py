"""The arm of a request back to the HTTP client that sent it: a response header.

vLLM's ``--middleware kvplugin.vllm.rollout.arm_echo.ArmHeader`` installs it; the endpoint plugin does so by itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

HEADER = "x-kvplugin-arm"

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_ARMS: ContextVar[list[str] | None] = ContextVar("kvplugin_arms", default=None)
"""Arms given while one HTTP request is being answered; a list, because tasks copy the context and share what is in it.
Owner: :class:`ArmHeader`."""


def note_arm(arm: str) -> None:
    """A request was given an arm, on behalf of whoever is being answered."""
    arms = _ARMS.get()
    if arms is not None and arm not in arms:
        arms.append(arm)


class ArmHeader:
    """ASGI middleware that names the arm in ``x-kvplugin-arm``.

    A stream's headers leave with its first event instead of before it: the arm is given when the engine is called,
    which a stream does when its first event is asked for. Responses that call no engine are not held.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arms: list[str] = []
        token = _ARMS.set(arms)
        try:
            await self._app(scope, receive, _HeldStart(send, arms))
        finally:
            _ARMS.reset(token)


class _HeldStart:
    """Holds the start of a response back until its first part."""

    def __init__(self, send: Send, arms: list[str]) -> None:
        self._send, self._arms = send, arms
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._start is not None:
            start, self._start = self._start, None
            if self._arms:
                value = ", ".join(self._arms).encode("latin-1")
                start = {**start, "headers": [*start.get("headers", ()), (HEADER.encode(), value)]}
            await self._send(start)
        await self._send(message)
