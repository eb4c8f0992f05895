"""The demo's requests: the same ones on every machine and in every run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

SEED = 20
TEXT_LENGTHS = (20, 64, 100, 160, 240, 350, 480, 640, 820, 1020, 1250, 1480)
"""Characters, each one token; a chat's template adds 18. Up to the top-k budget of 64 there is nothing to decide."""

_VOCABULARY = (
    "a cache keeps what an answer needs the first token draws attention but so does the last one while the middle of a "
    "long text is found by its content alone some words come back again and again others stand only once"
)


class Endpoint(StrEnum):
    """Where a request goes."""

    COMPLETION = "/v1/completions"
    CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class DemoRequest:
    """One request: ``text`` is the prompt of a completion, or the user's message of a chat."""

    endpoint: Endpoint
    text: str


def demo_requests() -> tuple[DemoRequest, ...]:
    """Completions and chats in turn, from the shortest prompt to the longest."""
    source = random.Random(SEED)
    endpoints = tuple(Endpoint) * len(TEXT_LENGTHS)
    return tuple(
        DemoRequest(endpoint, _text(source, length)) for endpoint, length in zip(endpoints, TEXT_LENGTHS, strict=False)
    )


def _text(source: random.Random, length: int) -> str:
    return " ".join(source.choices(_VOCABULARY.split(), k=length))[:length]
