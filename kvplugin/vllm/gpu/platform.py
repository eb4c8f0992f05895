"""vLLM's CUDA platform, answering the plugin's backends where the operator asked for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms.cuda import CudaPlatform

from kvplugin.config import Fill
from kvplugin.errors import ConfigError, ConfigProblem
from kvplugin.vllm.backend_names import is_ours
from kvplugin.vllm.gpu.backends import BACKENDS, HOST_PLANNED
from kvplugin.vllm.gpu.startup import prepare_engine
from kvplugin.vllm.log import warn_once
from kvplugin.vllm.settings import disabled_by_environment, engine_config
from kvplugin.vllm.startup import report_unused, wants_sparse_mla

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig


class KvpluginCudaPlatform(CudaPlatform):
    """``CudaPlatform`` in everything but the class that serves sparse MLA under the plugin's backend names."""

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """What vLLM picks for the layer by itself; for sparse MLA the plugin's subclass of it.

        Raises:
            ValueError: vLLM has no backend for the layer, with its reasons.
            ConfigError: the policy does not go with the backend.
        """
        if not is_ours(selected_backend):
            return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))
        stock = str(super().get_attn_backend_cls(None, attn_selector_config, num_heads))
        sparse = attn_selector_config.use_mla and attn_selector_config.use_sparse
        if not sparse or disabled_by_environment():
            return stock
        if stock not in BACKENDS:
            warn_once(f"kvplugin: inactive: unsupported_vllm; vLLM picks {stock}, which the plugin does not know")
            return stock
        if stock == HOST_PLANNED:
            _refuse_shorter_rows()
        return BACKENDS[stock]

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """As vLLM's, then prepare an engine of ours.

        Raises:
            ConfigError: the plugin's configuration is wrong; start-up stops with its message.
        """
        super().check_and_update_config(vllm_config)
        if disabled_by_environment():
            return
        if wants_sparse_mla(vllm_config):
            prepare_engine(vllm_config)
        else:
            report_unused(vllm_config)


def _refuse_shorter_rows() -> None:
    from vllm.config import get_current_vllm_config

    config = engine_config(get_current_vllm_config())
    if config is not None and config.policy.fill is Fill.NONE:
        raise ConfigError(
            [
                ConfigProblem(
                    "kvplugin.policy.fill",
                    "'none' with FLASHINFER_MLA_SPARSE_SM90, which plans the tokens of each row on the host",
                    "use local",
                )
            ]
        )
