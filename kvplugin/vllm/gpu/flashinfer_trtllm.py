"""FlashInfer's sparse kernels for datacenter Blackwell (TRTLLM-GEN)."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import (
    FlashInferMLASparseImpl,
    FlashInferMLASparseTRTLLMBackend,
    FlashInferMLASparseTRTLLMMetadataBuilder,
)

from kvplugin.vllm.gpu.mixins import AttachingBuilder, SharingImpl


class KvpluginFlashInferMLASparseImpl(SharingImpl, FlashInferMLASparseImpl):
    """vLLM's implementation, with conversions shared in its index group."""


class KvpluginFlashInferMLASparseTRTLLMMetadataBuilder(AttachingBuilder, FlashInferMLASparseTRTLLMMetadataBuilder):
    """vLLM's metadata builder, which attaches the policy."""


class KvpluginFlashInferMLASparseTRTLLMBackend(FlashInferMLASparseTRTLLMBackend):
    """vLLM's backend, under its own name, with the plugin's implementation and builder."""

    @staticmethod
    def get_impl_cls() -> type[KvpluginFlashInferMLASparseImpl]:
        """The implementation."""
        return KvpluginFlashInferMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[KvpluginFlashInferMLASparseTRTLLMMetadataBuilder]:
        """The metadata builder."""
        return KvpluginFlashInferMLASparseTRTLLMMetadataBuilder
