"""vLLM's CPU platform, admitting sparse MLA when the operator asks for this plugin's backend."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

from kvplugin.vllm.backend_names import BACKEND_NAME, CPU_BACKEND_PATH, is_ours
from kvplugin.vllm.cpu.startup import prepare_engine
from kvplugin.vllm.log import warn_once
from kvplugin.vllm.rollout.startup import prepare_rollout
from kvplugin.vllm.settings import wants_rollout
from kvplugin.vllm.startup import report_unused, wants_sparse_mla

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

DEFAULT_BLOCK_SIZE = 16
"""KV block size where none is given: what the stock platform sets for MLA."""
NATIVE_ROTARY, COMPILED_ROTARY = "-rotary_embedding", "+rotary_embedding"
COMPILER_PACKAGES = ("numba", "llvmlite")


class KvpluginCpuPlatform(CpuPlatform):
    """``CpuPlatform`` in everything but sparse MLA under ``--attention-backend KVPLUGIN``."""

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """The plugin's backend for sparse MLA layers when chosen; otherwise what the stock platform answers."""
        if attn_selector_config.use_sparse and attn_selector_config.use_mla:
            if is_ours(selected_backend):
                return CPU_BACKEND_PATH
            warn_once(f"kvplugin: sparse attention on a CPU needs --attention-backend {BACKEND_NAME}")
        return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """As the stock platform, with numba out of its sight.

        It looks into every attribute of every loaded module and stops at one of llvmlite's, whose ``__dict__`` is not a
        dictionary; the policy's CPU form loads numba, and so may the host.
        """
        hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in COMPILER_PACKAGES}
        for name in hidden:
            del sys.modules[name]
        try:
            super().register_triton_kernel_overrides()
        finally:
            sys.modules.update(hidden)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Keep chunked prefill, prefix caching and the block size, which the stock platform takes from every MLA model.

        Raises:
            ConfigError: the plugin's configuration is wrong; start-up stops with its message.
        """
        if not wants_sparse_mla(vllm_config):
            super().check_and_update_config(vllm_config)
            report_unused(vllm_config)
            return
        prepare_engine(vllm_config)
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chunked, batched_tokens = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        prefix_caching = cache.enable_prefix_caching
        block_size = cache.block_size if cache.user_specified_block_size else DEFAULT_BLOCK_SIZE
        super().check_and_update_config(vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunked, batched_tokens
        cache.enable_prefix_caching, cache.block_size = prefix_caching, block_size
        if wants_rollout(vllm_config):
            prepare_rollout(vllm_config)
        # The compiled CPU kernel takes the head stride of a 3-D query for its token stride: it rotates wrong values.
        custom_ops = vllm_config.compilation_config.custom_ops
        if COMPILED_ROTARY in custom_ops:
            warn_once("kvplugin: +rotary_embedding is dropped: the compiled CPU kernel rotates MLA's values wrongly")
            custom_ops.remove(COMPILED_ROTARY)
        if NATIVE_ROTARY not in custom_ops:
            custom_ops.append(NATIVE_ROTARY)
