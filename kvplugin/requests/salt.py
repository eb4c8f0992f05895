"""Salts of the prefix cache: KV is only shared where it was computed under the same policy."""

from __future__ import annotations

from hashlib import sha256

from kvplugin.config import Mode, PolicyConfig
from kvplugin.requests.digest import fields

UNMODIFIED = "unmodified"
"""Digest of every policy that leaves selections as they are."""
_NO_MATTER = {"check_duplicates"}
"""Settings that count and do not select. Limits and phases do select."""


def policy_digest(policy: PolicyConfig | None, *, enabled: bool) -> str:
    """Equal for two policies that select alike: what is counted makes no difference. None = an arm that is gone."""
    if policy is None or not enabled or policy.mode in (Mode.DISABLED, Mode.OBSERVE):
        return UNMODIFIED
    selecting = policy.model_dump_json(exclude=_NO_MATTER)
    return sha256(selecting.encode()).hexdigest()[:16]


def cache_salt(own: str | None, arm: str, policy: str, epoch: int) -> str:
    """Salt of one request.

    Args:
        own: the caller's own salt; it is combined with, never replaced.
        arm: name of the arm; two arms share nothing, even where their policies are equal.
        policy: :func:`policy_digest` of the arm.
        epoch: how often the arm's policy has changed.
    """
    caller = fields("none") if own is None else fields("own", own)
    return sha256(fields("kvplugin.salt.v1", caller, arm, policy, str(epoch))).hexdigest()
