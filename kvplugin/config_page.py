"""The table of settings, from the models that validate them: ``python -m kvplugin.config_page``."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kvplugin.config import ROOT_KEY, KvpluginConfig


def rows(model: type[BaseModel] = KvpluginConfig, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(key, default with the other choices, meaning) of every setting, in the order of the tree."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from rows(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _values(field), field.description or ""


def table() -> str:
    """The settings as a Markdown table."""
    lines = ["| key | default, or | meaning |", "|---|---|---|"]
    lines += [f"| `{key}` | {values} | {meaning} |" for key, values, meaning in rows()]
    return "\n".join(lines) + "\n"


def _values(field: FieldInfo) -> str:
    default = field.default
    if default is PydanticUndefined or default is None:
        return "null"
    if isinstance(default, tuple):
        return f"`[{', '.join(map(str, default))}]`"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    others = [str(member) for member in type(default) if member is not default] if isinstance(default, StrEnum) else []
    if default == "auto":
        others = ["a number"] if get_args(field.annotation) else []
    return f"`{default}`" + "".join(f", {other}" for other in others)


def page() -> str:
    """``docs/configuration.md``."""
    return (
        "# Configuration\n\n"
        "Generated from `kvplugin/config.py`. Keys stand under `" + ROOT_KEY + "` in vLLM's additional config:\n"
        "`--additional-config." + ROOT_KEY + ".policy.mode=observe`, or "
        "`--additional-config '{\"" + ROOT_KEY + '": {"policy": {"mode": "observe"}}}\'`,\n'
        "or `LLM(additional_config={...})`. Unknown keys and values stop start-up with one message that names the\n"
        "valid ones. Nothing configured means nothing is computed.\n\n" + table()
    )


if __name__ == "__main__":
    print(page(), end="")
