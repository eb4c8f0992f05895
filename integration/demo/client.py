"""Ask an OpenAI-compatible server questions, all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from integration.demo.questions import Question
from integration.recipes import SERVED_NAME

_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Answer:
    """What came back for one question: a text, or the reason why there is none."""

    text: str | None
    error: str | None = None


def ask_all(url: str, arm: str, questions: Sequence[Question]) -> tuple[Answer, ...]:
    """Ask an arm concurrently and greedily; failures become answers with an ``error``."""
    return asyncio.run(_ask_all(url, arm, questions))


async def _ask_all(url: str, arm: str, questions: Sequence[Question]) -> tuple[Answer, ...]:
    # No limit on connections, or the later requests would wait here instead of in the engine's batch.
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False, limits=limits) as client:
        return tuple(await asyncio.gather(*(_ask(client, arm, question) for question in questions)))


async def _ask(client: httpx.AsyncClient, arm: str, question: Question) -> Answer:
    try:
        response = await client.post("/v1/completions", json=_body(arm, question))
        response.raise_for_status()
        (choice,) = response.json()["choices"]
        return Answer(str(choice["text"]))
    except httpx.HTTPStatusError as error:
        return Answer(None, f"HTTP {error.response.status_code}: {error.response.text[:200]}")
    except httpx.TransportError as error:
        return Answer(None, f"{type(error).__name__}: {error}")


def _body(arm: str, question: Question) -> dict[str, Any]:
    return {
        "model": SERVED_NAME,
        "prompt": question.prompt,
        "max_tokens": len(question.right),
        "temperature": 0,
        "vllm_xargs": {"kvplugin_arm": arm},
    }
