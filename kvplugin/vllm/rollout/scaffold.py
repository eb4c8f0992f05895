"""How many tokens of a chat prompt are its system and tool part: the stable prefix a session is likely to repeat."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import takewhile
from typing import Any

SCAFFOLD_FIELD = "kvplugin_scaffold_tokens"
"""Field of an engine input, which vLLM hands from its renderer to its input processor."""
LEADING_ROLES = ("system", "developer")
PROBES = ("A", "0")
"""User messages that differ in their first character: what two prompts share that differ in these alone lies before
them, whatever the tokenizer merges."""
MOST_REMEMBERED = 512

Conversation = Sequence[Any]


class Scaffolds:
    """Lengths of the leading parts met lately. One renderer owns it; it keeps digests and numbers, no text."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, int] = OrderedDict()

    def probes(self, conversation: Conversation, template: Mapping[str, Any]) -> tuple[str, list[list[Any]]]:
        """Two conversations that begin as the given one does; none where the answer is known.

        Args:
            conversation: chat messages.
            template: whatever else shapes the prompt.

        Returns:
            The key to ask and tell by, and the conversations to render.
        """
        leading = list(takewhile(lambda message: _role(message) in LEADING_ROLES, conversation))
        key = sha256(json.dumps([leading, template], sort_keys=True, default=repr).encode()).hexdigest()
        if key in self._known:
            self._known.move_to_end(key)
            return key, []
        return key, [[*leading, {"role": "user", "content": probe}] for probe in PROBES]

    def learn(self, key: str, tokens: Sequence[Sequence[int]]) -> None:
        """What the probes were rendered to."""
        self._known[key] = shared_length(*tokens) if len(tokens) == len(PROBES) else 0
        while len(self._known) > MOST_REMEMBERED:
            self._known.popitem(last=False)

    def length(self, key: str) -> int:
        """Tokens of a leading part; 0 where it could not be rendered."""
        return self._known.get(key, 0)


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else getattr(message, "role", None)
