"""The plugin's settings as one engine sees them: environment switch and vLLM's additional config."""

from __future__ import annotations

import os
from typing import Any

from kvplugin.config import ROOT_KEY, Eviction, KvpluginConfig, Mode, Witness, load_config
from kvplugin.errors import ArgumentError, ConfigError, ConfigProblem
from kvplugin.topology import lower

DISABLE_VARIABLES = ("KVPLUGIN_DISABLE", "VLLM_KVPLUGIN_DISABLE")
"""Either one set to anything but 0 or nothing makes the plugin inert; Ray passes on the second."""


def disabled_by_environment() -> bool:
    """True where the operator switched the plugin off for this process."""
    return any(os.environ.get(name, "").strip().lower() not in ("", "0", "false") for name in DISABLE_VARIABLES)


def concerns_plugin(vllm_config: Any) -> bool:
    """True for an engine that configures the plugin or asks for its backend; any other sees nothing of it."""
    from kvplugin.vllm.backend_names import is_ours

    attention = vllm_config.attention_config
    chosen = (attention.backend, *attention.backend_per_kind.values())
    return _configuration(vllm_config) is not None or any(is_ours(member) for member in chosen)


def _configuration(vllm_config: Any) -> Any:
    additional = vllm_config.additional_config
    return additional.get(ROOT_KEY) if isinstance(additional, dict) else None


def wants_rollout(vllm_config: Any) -> bool:
    """True for an engine that is configured with a rollout file."""
    raw = _configuration(vllm_config)
    return isinstance(raw, dict) and raw.get("rollout") is not None


def exports_metrics(vllm_config: Any) -> bool:
    """Whether an engine's metrics are exported."""
    config = engine_config(vllm_config)
    return config is None or config.metrics.enabled


def engine_config(vllm_config: Any) -> KvpluginConfig | None:
    """The validated configuration of an engine, or None where nothing is configured.

    Raises:
        ConfigError: a key or value is wrong, or names something the engine cannot do.
    """
    raw = _configuration(vllm_config)
    if raw is None:
        return None
    config = load_config(raw)
    if config.policy.witness is Witness.DRIFT:
        raise ConfigError(
            [
                ConfigProblem(
                    f"{ROOT_KEY}.policy.witness",
                    "'drift' needs block scores, which the engine does not have",
                    "use uniform or coverage; drift is for library use",
                )
            ]
        )
    return config


EVICTION_COSTS = {
    Eviction.OLDEST: "the lowest token ids leave, whatever they score; it cost 13 to 63 points on a tiny model",
    Eviction.INPUT_ORDER: "later slots leave, and slot order means nothing; it cost 17 to 43 points, and "
    "tensor-parallel ranks may select different tokens",
    Eviction.NONE: "structure only takes slots that the indexer left free: none on a healthy row",
}
"""What an eviction rule other than ``lowest_score`` costs, for the warning at start."""


def describe(config: KvpluginConfig, width: int) -> str:
    """What is in force for a top-k of ``width``, in one line, for the banner.

    Raises:
        ConfigError: the policy's structure does not fit the width.
    """
    try:
        params = lower(config.policy, width)
    except ArgumentError as error:
        raise ConfigError([ConfigProblem(error.where, error.found, error.allowed)]) from None
    parts = [f"mode {params.mode}"]
    if params.mode is not Mode.DISABLED:
        parts.append(f"top-k {width}")
        parts.append(f"sink {params.sink}{' blocks' if params.sink_in_blocks else ''}")
        parts.append(f"local {params.local}{' blocks' if params.local_in_blocks else ''}")
        if params.witness is Witness.COVERAGE:
            parts.append(f"coverage {params.segments} segments")
        else:
            parts.append(f"witness {params.witness_blocks} blocks of {params.block_size}")
        parts.append(f"eviction {params.eviction}")
        parts.append(f"phases {'+'.join(config.policy.phases)}")
        parts.append(f"placement {config.placement}")
    return ", ".join(parts)
