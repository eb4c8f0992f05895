"""Small YAML texts that people write, read with distrust."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

from kvplugin.errors import ConfigError, ConfigProblem

MOST_CHARACTERS = 1 << 20


class _Loader(yaml.SafeLoader):
    """Plain values alone: no aliases, which can blow a small text up, and no key twice, of which one would be lost."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"alias *{event.anchor}", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is no text", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} stands twice", problem_mark=key_node.start_mark)
            seen.add(key)
        made: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return made


def read_mapping(text: str, source: str) -> Any:
    """What a YAML (or JSON) text says; the caller checks what kind of thing it is.

    Args:
        text: the whole text.
        source: how messages call it.

    Raises:
        ConfigError: the text is no YAML, too long, or uses aliases, tags or a key twice.
    """
    if len(text) > MOST_CHARACTERS:
        found = f"{len(text)} characters long"
        raise ConfigError([ConfigProblem(source, found, f"use at most {MOST_CHARACTERS}")])
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError([ConfigProblem(source, f"{error.problem}{place}", "give plain YAML")]) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        found = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError([ConfigProblem(source, found, "give plain YAML")]) from None
