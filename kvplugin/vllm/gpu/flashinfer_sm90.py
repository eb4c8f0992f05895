"""FlashInfer's sparse kernels for Hopper, which plan lengths on the host."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90 import (
    FlashInferMLASparseSM90Backend,
    FlashInferMLASparseSM90Builder,
    FlashInferMLASparseSM90Impl,
)

from kvplugin.vllm.gpu.mixins import AttachingBuilder, SharingImpl


class KvpluginFlashInferMLASparseSM90Impl(SharingImpl, FlashInferMLASparseSM90Impl):
    """vLLM's implementation, with conversions shared in its index group."""


class KvpluginFlashInferMLASparseSM90Builder(AttachingBuilder, FlashInferMLASparseSM90Builder):
    """vLLM's metadata builder, which attaches the policy."""


class KvpluginFlashInferMLASparseSM90Backend(FlashInferMLASparseSM90Backend):
    """vLLM's backend, under its own name, with the plugin's implementation and builder."""

    @staticmethod
    def get_impl_cls() -> type[KvpluginFlashInferMLASparseSM90Impl]:
        """The implementation."""
        return KvpluginFlashInferMLASparseSM90Impl

    @staticmethod
    def get_builder_cls() -> type[KvpluginFlashInferMLASparseSM90Builder]:
        """The metadata builder."""
        return KvpluginFlashInferMLASparseSM90Builder
