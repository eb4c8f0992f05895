"""WRAP of vLLM's chat renderer: a chat prompt says how long its system and tool part is.

Messages are known here and nowhere later. The extra rendering happens once for each system and tool part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from vllm.renderers.base import BaseRenderer

from kvplugin.vllm.log import logger, warn_once
from kvplugin.vllm.rollout.scaffold import SCAFFOLD_FIELD, Scaffolds
from kvplugin.vllm.settings import wants_rollout

SCAFFOLDS = "kvplugin_scaffolds"
"""Attribute of a renderer that has rendered chats for an engine with a rollout."""
_ORIGINALS: dict[str, Callable[..., Any]] = {}
"""Owner: :func:`install`."""


def install() -> None:
    """Make renderers measure the leading part of chats. Idempotent."""
    if _ORIGINALS:
        return
    for name, wrap in (("render_chat", _measuring), ("render_chat_async", _measuring_async)):
        _ORIGINALS[name] = getattr(BaseRenderer, name)
        setattr(BaseRenderer, name, wrap(_ORIGINALS[name]))


def uninstall() -> None:
    """Put vLLM's own methods back."""
    for name, original in _ORIGINALS.items():
        setattr(BaseRenderer, name, original)
    _ORIGINALS.clear()


def _measuring(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def render_chat(
        self: Any, conversations: Sequence[Any], chat_params: Any, tok_params: Any = None, **kwargs: Any
    ) -> Any:
        found = original(self, conversations, chat_params, tok_params, **kwargs)
        for conversation, engine_input in _measured(self, conversations, found):
            key, probes = _scaffolds(self).probes(conversation, asdict(chat_params))
            if probes:
                tokens: list[Any] = []
                with _unharmed():
                    prompts = [self.render_messages(probe, chat_params)[1] for probe in probes]
                    tokens = self.tokenize_prompts(prompts, tok_params or self.default_chat_tok_params)
                _scaffolds(self).learn(key, [prompt["prompt_token_ids"] for prompt in tokens])
            engine_input[SCAFFOLD_FIELD] = _scaffolds(self).length(key)
        return found

    return render_chat


def _measuring_async(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def render_chat_async(
        self: Any, conversations: Sequence[Any], chat_params: Any, tok_params: Any = None, **kwargs: Any
    ) -> Any:
        found = await original(self, conversations, chat_params, tok_params, **kwargs)
        for conversation, engine_input in _measured(self, conversations, found):
            key, probes = _scaffolds(self).probes(conversation, asdict(chat_params))
            if probes:
                tokens: list[Any] = []
                with _unharmed():
                    prompts = [(await self.render_messages_async(probe, chat_params))[1] for probe in probes]
                    tokens = await self.tokenize_prompts_async(prompts, tok_params or self.default_chat_tok_params)
                _scaffolds(self).learn(key, [prompt["prompt_token_ids"] for prompt in tokens])
            engine_input[SCAFFOLD_FIELD] = _scaffolds(self).length(key)
        return found

    return render_chat_async


def _measured(renderer: Any, conversations: Sequence[Any], found: Any) -> Iterator[tuple[Any, Any]]:
    """Conversations and their engine inputs, where the engine has a use for the answer."""
    if wants_rollout(renderer.config):
        yield from zip(conversations, found[1], strict=True)


def _scaffolds(renderer: Any) -> Scaffolds:
    if not hasattr(renderer, SCAFFOLDS):
        setattr(renderer, SCAFFOLDS, Scaffolds())
    found: Scaffolds = getattr(renderer, SCAFFOLDS)
    return found


@contextmanager
def _unharmed() -> Iterator[None]:
    """A template that cannot render the leading part alone leaves the request without a derived stable prefix."""
    try:
        yield
    except Exception as error:
        warn_once(
            "kvplugin: the chat template cannot render a system part alone; "
            f"send kvplugin_scaffold_tokens for stable prefixes ({type(error).__name__})"
        )
        logger.debug("kvplugin: measuring a chat's leading part failed", exc_info=True)
