"""WRAP of vLLM's input processor: the one place that offline and served requests pass before the engine sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.v1.engine.input_processor import InputProcessor

from kvplugin.vllm.rollout.front_end import FrontEnd
from kvplugin.vllm.rollout.scaffold import SCAFFOLD_FIELD
from kvplugin.vllm.settings import wants_rollout

FRONT_END = "kvplugin_front_end"
"""Attribute of an input processor whose engine has a rollout."""
_ORIGINALS: dict[str, Callable[..., Any]] = {}
"""Owner: :func:`install`."""


def install() -> None:
    """Make input processors give requests their arms. Idempotent."""
    if _ORIGINALS:
        return
    _ORIGINALS.update(__init__=InputProcessor.__init__, process_inputs=InputProcessor.process_inputs)
    InputProcessor.__init__ = _with_front_end(InputProcessor.__init__)
    InputProcessor.process_inputs = _with_arm(InputProcessor.process_inputs)


def uninstall() -> None:
    """Put vLLM's own methods back."""
    for name, original in _ORIGINALS.items():
        setattr(InputProcessor, name, original)
    _ORIGINALS.clear()


def _with_front_end(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: InputProcessor, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if wants_rollout(vllm_config):
            setattr(self, FRONT_END, FrontEnd(vllm_config))

    return init


def _with_arm(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def process_inputs(self: InputProcessor, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, request_id, prompt, *args, **kwargs)
        front_end: FrontEnd | None = getattr(self, FRONT_END, None)
        if front_end is not None:
            front_end.enter(request, prompt.get(SCAFFOLD_FIELD, 0) if isinstance(prompt, dict) else 0)
        return request

    return process_inputs
