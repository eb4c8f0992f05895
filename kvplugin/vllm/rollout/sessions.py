"""Does a request begin as the last one of its session did? Then that part of it is a stable prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvplugin.config import PolicyConfig
from kvplugin.errors import RequestError
from kvplugin.metrics.definitions import FINGERPRINT_INVALIDATIONS, FINGERPRINTS
from kvplugin.metrics.host import HostMetrics
from kvplugin.requests.fingerprint import EngineFacts, prompt_fingerprint
from kvplugin.requests.keys import DERIVED_SCAFFOLD_KEY, RequestKey
from kvplugin.requests.sessions import SessionStore, Standing

if TYPE_CHECKING:
    from vllm.v1.request import Request


class PrefixSessions:
    """The sessions of one engine core; all its front ends meet here."""

    def __init__(self, vllm_config: Any, metrics: HostMetrics) -> None:
        model, cache = vllm_config.model_config, vllm_config.cache_config
        self._facts = EngineFacts(str(model.model), str(model.dtype), 0, f"{cache.cache_dtype}/{cache.block_size}")
        self._store = SessionStore()
        self._metrics = metrics

    def stable_prefix(self, request: Request, policy: PolicyConfig | None) -> int:
        """Tokens that a request's prompt has in common with the last one of its session, as far as both said so.

        Args:
            request: one that enters the engine, with the plugin's keys as its front end checked them.
            policy: of its arm; None = an arm that is gone.
        """
        params = request.sampling_params
        given = (None if params is None else params.extra_args) or {}
        session = given.get(RequestKey.SESSION) or request.session_id
        if not session or request.prompt_token_ids is None:
            return 0
        told = given.get(RequestKey.SCAFFOLD_TOKENS)
        # What was derived from a chat template is no promise: a truncated prompt can be shorter.
        derived = min(given.get(DERIVED_SCAFFOLD_KEY, 0), len(request.prompt_token_ids))
        tokens = derived if told is None else told
        facts = self._facts._replace(block_size=0 if policy is None else policy.block_size)
        try:
            found = prompt_fingerprint(
                given.get(RequestKey.SCAFFOLD), given.get(RequestKey.CONTRACT), tokens, request.prompt_token_ids, facts
            )
        except RequestError:  # the front end refuses it; another client of the engine may not have asked it
            return 0
        finding = self._store.observe(session, found)
        self._metrics.inc(FINGERPRINTS, (finding.standing,))
        for name in finding.changed:
            self._metrics.inc(FINGERPRINT_INVALIDATIONS, (name,))
        return tokens if finding.standing is Standing.HIT else 0
