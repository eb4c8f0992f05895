"""Requests of many sessions to a server, so many at once, and what came back for each."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from integration.recipes import SERVED_NAME

ARM_HEADER = "x-kvplugin-arm"
TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        prompt: place among the prompts.
        session: its session, or None.
        stream: as a stream.
        arm: the arm it asks for, or None.
        shares: in force when it was sent.
    """

    prompt: int
    session: str | None
    stream: bool
    arm: str | None
    shares: Mapping[str, float]


@dataclass(frozen=True)
class Answered:
    """What came back, and when it was sent and done, in seconds of this process's clock."""

    asked: Asked
    status: int
    request: str
    arm: str | None
    tokens: tuple[int, ...]
    prompt_tokens: int
    sent: float
    done: float
    error: str = ""


class Traffic:
    """Sends requests to one server.

    Args:
        url: of the server.
        prompts: texts that requests draw from.
        tokens: tokens of each answer.
        headers: of every request.
    """

    def __init__(self, url: str, prompts: list[str], tokens: int, headers: Mapping[str, str]) -> None:
        self.url, self._prompts, self._tokens = url, prompts, tokens
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(
            base_url=url, timeout=TIMEOUT_S, trust_env=False, limits=limits, headers=headers
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def ask(self, asked: Asked) -> Answered:
        """Send one request and wait for its answer; what goes wrong is part of the answer."""
        sent = time.monotonic()
        try:
            response = await self._client.post("/v1/completions", json=self._body(asked))
            text = response.text
            if response.status_code != 200:
                return Answered(asked, response.status_code, "", None, (), 0, sent, time.monotonic(), text[:300])
            parts = _events(text) if asked.stream else [json.loads(text)]
        except (httpx.HTTPError, ValueError) as error:
            return Answered(asked, 0, "", None, (), 0, sent, time.monotonic(), f"{type(error).__name__}: {error}")
        ids = [token for part in parts for choice in part["choices"] for token in choice["token_ids"] or ()]
        usage = next(part["usage"] for part in reversed(parts) if part.get("usage"))
        arm = response.headers.get(ARM_HEADER)
        return Answered(asked, 200, parts[0]["id"], arm, tuple(ids), usage["prompt_tokens"], sent, time.monotonic())

    async def abort(self, arm: str, draw: random.Random) -> None:
        """Begin a stream and leave after a moment."""
        asked = Asked(draw.randrange(len(self._prompts)), None, True, arm, {})
        body = self._body(asked) | {"max_tokens": 400}
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            leave = time.monotonic() + draw.uniform(0, 0.5)
            async for _ in response.aiter_lines():
                if time.monotonic() > leave:
                    return

    def _body(self, asked: Asked) -> dict[str, Any]:
        xargs = {"kvplugin_arm": asked.arm, "kvplugin_session": asked.session}
        stream = {"stream": True, "stream_options": {"include_usage": True}} if asked.stream else {}
        return {
            "model": SERVED_NAME,
            "prompt": self._prompts[asked.prompt],
            "max_tokens": self._tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "vllm_xargs": {name: value for name, value in xargs.items() if value is not None},
            **stream,
        }


def _events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def in_parallel(count: int, work: Any) -> None:
    """Run ``work()`` in so many tasks at once, until each of them ends; the first failure ends them all."""
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(work())
