"""FlashInfer's sparse kernels for workstation Blackwell."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import (
    FlashInferMLASparseMetadataBuilder,
    FlashInferMLASparseSM120Backend,
)
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm120 import FlashInferMLASparseSM120Impl

from kvplugin.vllm.gpu.mixins import AttachingBuilder, SharingImpl


class KvpluginFlashInferMLASparseSM120Impl(SharingImpl, FlashInferMLASparseSM120Impl):
    """vLLM's implementation, with conversions shared in its index group."""


class KvpluginFlashInferMLASparseSM120Builder(AttachingBuilder, FlashInferMLASparseMetadataBuilder):
    """vLLM's metadata builder, which attaches the policy."""


class KvpluginFlashInferMLASparseSM120Backend(FlashInferMLASparseSM120Backend):
    """vLLM's backend, under its own name, with the plugin's implementation and builder."""

    @staticmethod
    def get_impl_cls() -> type[KvpluginFlashInferMLASparseSM120Impl]:
        """The implementation."""
        return KvpluginFlashInferMLASparseSM120Impl

    @staticmethod
    def get_builder_cls() -> type[KvpluginFlashInferMLASparseSM120Builder]:
        """The metadata builder."""
        return KvpluginFlashInferMLASparseSM120Builder
