"""What happens to the configuration of an engine that is to serve sparse attention, on any platform."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplugin import __version__
from kvplugin.config import ROOT_KEY, KvpluginConfig, Mode
from kvplugin.errors import ConfigError, ConfigProblem
from kvplugin.metrics.collector import register_collector
from kvplugin.metrics.definitions import InactiveReason
from kvplugin.metrics.status import report_active
from kvplugin.vllm.backend_names import is_ours, name_to_choose
from kvplugin.vllm.log import info_once, warn_once
from kvplugin.vllm.settings import EVICTION_COSTS, concerns_plugin, describe, engine_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")
"""Models whose indexer is vLLM's generic one; others that have ``index_topk`` bring an indexer of their own."""
MLA_KIND = "mla_attention"


def wants_sparse_mla(vllm_config: VllmConfig) -> bool:
    """True for a DSA model served with the plugin's backend."""
    attention = vllm_config.attention_config
    return has_sparse_attention(vllm_config) and is_ours(attention.backend_per_kind.get(MLA_KIND, attention.backend))


def has_sparse_attention(vllm_config: VllmConfig) -> bool:
    """True for the DSA models that vLLM runs through its generic sparse indexer."""
    model = vllm_config.model_config
    if model is None or not model.use_mla:
        return False
    text = model.hf_text_config
    return text.model_type in MODEL_TYPES and getattr(text, "index_topk", None) is not None


def announce(vllm_config: VllmConfig, without: str) -> KvpluginConfig | None:
    """Validate the plugin's configuration against the model, and say in one line what is in force.

    Args:
        without: what the engine does where nothing is configured.

    Raises:
        ConfigError: a wrong setting, or one that does not fit the model's top-k width.
    """
    config = engine_config(vllm_config)
    name = name_to_choose()
    if config is None:
        info_once(f"kvplugin {__version__}: inactive: not_configured; {without}")
        return None
    width = vllm_config.model_config.hf_text_config.index_topk
    if config.rollout is not None:
        info_once(f"kvplugin {__version__}: active; backend {name}, rollout {config.rollout}, top-k {width}")
        return config
    state = "inactive: policy_disabled" if config.policy.mode is Mode.DISABLED else "active"
    info_once(f"kvplugin {__version__}: {state}; backend {name}, {describe(config, width)}")
    cost = EVICTION_COSTS.get(config.policy.eviction)
    if cost is not None and config.policy.mode is not Mode.DISABLED:
        warn_once(f"kvplugin: eviction {config.policy.eviction}: {cost}")
    return config


def place_worker(vllm_config: VllmConfig, ours: str, stock: tuple[str, ...]) -> None:
    """Make the engine's worker class the plugin's.

    Args:
        ours: path of the plugin's worker.
        stock: paths that it may take the place of.

    Raises:
        ConfigError: the operator chose a worker that is not derived from the plugin's.
    """
    parallel = vllm_config.parallel_config
    if parallel.worker_cls in stock:
        parallel.worker_cls = ours
    elif parallel.worker_cls != ours and not _derives(parallel.worker_cls, ours):
        raise ConfigError(
            [
                ConfigProblem(
                    "--worker-cls",
                    f"{parallel.worker_cls!r} beside --attention-backend {name_to_choose()}",
                    f"drop it, or derive it from {ours}",
                )
            ]
        )


def report_unused(vllm_config: VllmConfig) -> None:
    """Validate the configuration of an engine the plugin does not serve, and say why it stays inactive.

    Raises:
        ConfigError: a wrong setting.
    """
    config = engine_config(vllm_config)
    if not concerns_plugin(vllm_config) or vllm_config.model_config is None:
        return
    if has_sparse_attention(vllm_config):
        warn_once(
            f"kvplugin {__version__}: inactive: backend_not_selected; {ROOT_KEY} is configured, "
            f"add --attention-backend {name_to_choose()}"
        )
        return
    text = vllm_config.model_config.hf_text_config
    own_indexer = getattr(text, "index_topk", None) is not None
    reason = InactiveReason.PRIVATE_INDEXER if own_indexer else InactiveReason.NO_SPARSE_ATTENTION
    warn_once(f"kvplugin {__version__}: inactive: {reason}; the model is served as without the plugin")
    serve_metrics(config)
    report_active(reason)


def serve_metrics(config: KvpluginConfig | None) -> None:
    """Serve what the workers count from this process, which is the one that answers ``/metrics``."""
    if config is None or config.metrics.enabled:
        register_collector()


def _derives(path: str, ours: str) -> bool:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    worker = resolve_obj_by_qualname(path)
    return isinstance(worker, type) and issubclass(worker, resolve_obj_by_qualname(ours))
