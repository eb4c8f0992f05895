"""The plugin's keys of a request, from ``vllm_xargs`` or ``SamplingParams.extra_args``."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvplugin.errors import RequestError

PREFIX = "kvplugin_"
LONGEST_NAME = 256
LONGEST_TEXT = 65536
LONGEST_QUOTE = 80

ASSIGNED_ARM_KEY = "kvplugin.assigned_arm"
STABLE_PREFIX_KEY = "kvplugin.stable_prefix"
DERIVED_SCAFFOLD_KEY = "kvplugin.derived_scaffold_tokens"
"""What the plugin itself adds to a request on its way; a caller cannot set it."""
INTERNAL_KEYS = (ASSIGNED_ARM_KEY, STABLE_PREFIX_KEY, DERIVED_SCAFFOLD_KEY)


class RequestKey(StrEnum):
    """A key that a caller may set."""

    ARM = "kvplugin_arm"
    SESSION = "kvplugin_session"
    SCAFFOLD = "kvplugin_scaffold"
    SCAFFOLD_TOKENS = "kvplugin_scaffold_tokens"
    CONTRACT = "kvplugin_contract"


@dataclass(frozen=True)
class RequestKeys:
    """What a caller said of one request; None = nothing.

    Attributes:
        arm: the arm it must be served by.
        session: requests with the same one are served by the same arm, and their prompts are compared.
        scaffold: name or text of the part that the session's prompts begin with.
        scaffold_tokens: length of that part in tokens.
        contract: name or text of what the answer has to keep to.
    """

    arm: str | None = None
    session: str | None = None
    scaffold: str | None = None
    scaffold_tokens: int | None = None
    contract: str | None = None


def request_keys(extra_args: Mapping[str, Any] | None, arms: Collection[str]) -> RequestKeys:
    """The plugin's keys among those of a request; other plugins' are left alone.

    Args:
        extra_args: of the request.
        arms: names in force.

    Raises:
        RequestError: a key is unknown, or its value is no good.
    """
    given = {name: value for name, value in (extra_args or {}).items() if str(name).startswith(PREFIX)}
    internal = [name for name in INTERNAL_KEYS if name in (extra_args or {})]
    for name in (*given, *internal):
        if name not in RequestKey.__members__.values():
            near = difflib.get_close_matches(name, list(RequestKey), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RequestError(name, "unknown key", f"use {', '.join(RequestKey)}{hint}")
    arm = _name(RequestKey.ARM, given)
    if arm is not None and arm not in arms:
        raise RequestError(RequestKey.ARM, f"{_quoted(arm)} is an unknown arm", f"use {', '.join(arms)}")
    return RequestKeys(
        arm,
        _name(RequestKey.SESSION, given),
        _name(RequestKey.SCAFFOLD, given, LONGEST_TEXT),
        _tokens(RequestKey.SCAFFOLD_TOKENS, given),
        _name(RequestKey.CONTRACT, given, LONGEST_TEXT),
    )


def _name(key: RequestKey, given: Mapping[str, Any], longest: int = LONGEST_NAME) -> str | None:
    value = given.get(key)
    if value is None or (isinstance(value, str) and 0 < len(value) <= longest):
        return value
    found = f"{len(value)} characters" if isinstance(value, str) else _quoted(value)
    raise RequestError(key, found, f"give a text of 1 to {longest} characters")


def _tokens(key: RequestKey, given: Mapping[str, Any]) -> int | None:
    value = given.get(key)
    if value is None or (type(value) is int and value >= 0):
        return value
    raise RequestError(key, _quoted(value), "give a number of tokens, 0 or more")


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"
