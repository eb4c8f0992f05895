"""Send requests to an OpenAI-compatible server, all at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from integration.demo.prompts import DemoRequest, Endpoint
from integration.recipes import SERVED_NAME

ANSWER_TOKENS = 48
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Answer:
    """What came back for one request: a text, or the reason why there is none."""

    text: str | None
    error: str | None = None


@dataclass(frozen=True)
class Batch:
    """Answers in the order of their requests, and the seconds from the first request to the last answer."""

    answers: tuple[Answer, ...]
    seconds: float


def send_all(url: str, requests: Sequence[DemoRequest]) -> Batch:
    """Send the requests concurrently, greedy and with fixed seeds; failures become answers with an ``error``."""
    return asyncio.run(_send_all(url, requests))


async def _send_all(url: str, requests: Sequence[DemoRequest]) -> Batch:
    # No limit on connections, or the later requests would wait here instead of in the engine's batch.
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False, limits=limits) as client:
        started = time.monotonic()
        answers = await asyncio.gather(*(_send(client, request) for request in requests))
        return Batch(tuple(answers), time.monotonic() - started)


async def _send(client: httpx.AsyncClient, request: DemoRequest) -> Answer:
    try:
        response = await client.post(request.endpoint, json=_body(request))
        response.raise_for_status()
        return Answer(_answer_text(request.endpoint, response.json()))
    except httpx.HTTPStatusError as error:
        return Answer(None, f"HTTP {error.response.status_code}: {error.response.text[:200]}")
    except httpx.TransportError as error:
        return Answer(None, f"{type(error).__name__}: {error}")


def _body(request: DemoRequest) -> dict[str, Any]:
    sampling = {"model": SERVED_NAME, "max_tokens": ANSWER_TOKENS, "temperature": 0, "seed": 0}
    if request.endpoint is Endpoint.CHAT:
        return sampling | {"messages": [{"role": "user", "content": request.text}]}
    return sampling | {"prompt": request.text}


def _answer_text(endpoint: Endpoint, body: dict[str, Any]) -> str:
    (choice,) = body["choices"]
    return str(choice["message"]["content"] if endpoint is Endpoint.CHAT else choice["text"])
