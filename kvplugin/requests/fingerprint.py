"""What identifies the stable part of a prompt: digests of its fields, no text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from kvplugin.errors import RequestError
from kvplugin.requests.digest import fields
from kvplugin.requests.keys import RequestKey


class EngineFacts(NamedTuple):
    """What of an engine makes the same tokens other KV, or other policy blocks.

    Attributes:
        model: its name.
        dtype: of its activations.
        block_size: tokens per policy block of the request's arm.
        cache_layout: dtype and block size of the KV cache.
    """

    model: str
    dtype: str
    block_size: int
    cache_layout: str


class Fingerprint(NamedTuple):
    """A digest for each field, 32 bytes; together they are the fingerprint."""

    scaffold: bytes
    contract: bytes
    scaffold_tokens: bytes
    model: bytes
    dtype: bytes
    block_size: bytes
    cache_layout: bytes

    @property
    def digest(self) -> str:
        """The whole fingerprint, hexadecimal."""
        return sha256(fields(*self)).hexdigest()

    def changes(self, other: Fingerprint) -> tuple[str, ...]:
        """Names of the fields that differ."""
        return tuple(name for name, a, b in zip(self._fields, self, other, strict=True) if a != b)


def prompt_fingerprint(
    scaffold: str | None, contract: str | None, scaffold_tokens: int, prompt: Sequence[int], engine: EngineFacts
) -> Fingerprint:
    """The fingerprint of a prompt.

    Args:
        scaffold, contract: as the caller gave them.
        scaffold_tokens: length of the stable part.
        prompt: token ids.
        engine: the engine that serves it.

    Raises:
        RequestError: the stable part is longer than the prompt.
    """
    if scaffold_tokens > len(prompt):
        found = f"{scaffold_tokens} of a prompt of {len(prompt)} tokens"
        raise RequestError(RequestKey.SCAFFOLD_TOKENS, found, "give at most the prompt's length")
    tokens = array("q", prompt[:scaffold_tokens]).tobytes()
    values: tuple[str | bytes, ...] = (
        *(_optional(text) for text in (scaffold, contract)),
        tokens,
        engine.model,
        engine.dtype,
        str(engine.block_size),
        engine.cache_layout,
    )
    names = Fingerprint._fields
    return Fingerprint(*(sha256(fields(name, value)).digest() for name, value in zip(names, values, strict=True)))


def _optional(text: str | None) -> bytes:
    """Nothing and an empty text are two things."""
    return b"" if text is None else fields(text)
