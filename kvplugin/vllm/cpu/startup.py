"""What happens to the configuration of an engine that is to serve sparse attention on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplugin import __version__
from kvplugin.config import ROOT_KEY, KvpluginConfig, Mode
from kvplugin.errors import ConfigError, ConfigProblem
from kvplugin.metrics.collector import register_collector
from kvplugin.metrics.definitions import InactiveReason
from kvplugin.metrics.status import report_active
from kvplugin.vllm.backend_names import BACKEND_NAME, is_ours
from kvplugin.vllm.log import info_once, warn_once
from kvplugin.vllm.settings import EVICTION_COSTS, concerns_plugin, describe, engine_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")
WORKER_PATH = "kvplugin.vllm.cpu.worker.KvpluginCpuWorker"
STOCK_WORKERS = ("auto", "vllm.v1.worker.cpu_worker.CPUWorker")
MLA_KIND = "mla_attention"
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16")
"""What the CPU implementation stores; vLLM does not ask a CPU backend for it."""


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


def prepare_engine(vllm_config: VllmConfig) -> None:
    """Validate the plugin's configuration against the model, announce it, and put the plugin's worker in place.

    Raises:
        ConfigError: a wrong setting, or one that does not fit the model's top-k width.
    """
    config = engine_config(vllm_config)
    if config is None:
        info_once(f"kvplugin {__version__}: inactive: not_configured; sparse attention on the CPU, without a policy")
    else:
        _announce(config, vllm_config.model_config.hf_text_config.index_topk)
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(
            [
                ConfigProblem(
                    "--kv-cache-dtype",
                    f"{cache_dtype!r} beside --attention-backend {BACKEND_NAME} on a CPU",
                    f"use {', '.join(KV_CACHE_DTYPES)}",
                )
            ]
        )
    _serve_metrics(config)
    parallel = vllm_config.parallel_config
    if parallel.worker_cls in STOCK_WORKERS:
        parallel.worker_cls = WORKER_PATH
    elif parallel.worker_cls != WORKER_PATH and not _is_our_worker(parallel.worker_cls):
        raise ConfigError(
            [
                ConfigProblem(
                    "--worker-cls",
                    f"{parallel.worker_cls!r} beside --attention-backend {BACKEND_NAME} on a CPU",
                    f"drop it, or derive it from {WORKER_PATH}",
                )
            ]
        )


def _announce(config: KvpluginConfig, width: int) -> None:
    if config.rollout is not None:
        info_once(f"kvplugin {__version__}: active; backend {BACKEND_NAME}, rollout {config.rollout}, top-k {width}")
        return
    state = "inactive: policy_disabled" if config.policy.mode is Mode.DISABLED else "active"
    info_once(f"kvplugin {__version__}: {state}; backend {BACKEND_NAME}, {describe(config, width)}")
    cost = EVICTION_COSTS.get(config.policy.eviction)
    if cost is not None and config.policy.mode is not Mode.DISABLED:
        warn_once(f"kvplugin: eviction {config.policy.eviction}: {cost}")


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
            f"add --attention-backend {BACKEND_NAME}"
        )
    else:
        warn_once(f"kvplugin {__version__}: inactive: no_sparse_attention; the model is served as without the plugin")
        _serve_metrics(config)
        report_active(InactiveReason.NO_SPARSE_ATTENTION)


def _serve_metrics(config: KvpluginConfig | None) -> None:
    """Serve what the workers count from this process, which is the one that answers ``/metrics``."""
    if config is None or config.metrics.enabled:
        register_collector()


def _is_our_worker(path: str) -> bool:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from kvplugin.vllm.cpu.worker import KvpluginCpuWorker

    worker = resolve_obj_by_qualname(path)
    return isinstance(worker, type) and issubclass(worker, KvpluginCpuWorker)
