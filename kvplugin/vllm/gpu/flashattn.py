"""FlashAttention's sparse kernels for Hopper."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashattn_mla_sparse import (
    FlashAttnMLASparseBackend,
    FlashAttnMLASparseImpl,
    FlashAttnMLASparseMetadataBuilder,
)

from kvplugin.vllm.gpu.mixins import AttachingBuilder, SharingImpl


class KvpluginFlashAttnMLASparseImpl(SharingImpl, FlashAttnMLASparseImpl):
    """vLLM's implementation, with conversions shared in its index group."""


class KvpluginFlashAttnMLASparseMetadataBuilder(AttachingBuilder, FlashAttnMLASparseMetadataBuilder):
    """vLLM's metadata builder, which attaches the policy."""


class KvpluginFlashAttnMLASparseBackend(FlashAttnMLASparseBackend):
    """vLLM's backend, under its own name, with the plugin's implementation and builder."""

    @staticmethod
    def get_impl_cls() -> type[KvpluginFlashAttnMLASparseImpl]:
        """The implementation."""
        return KvpluginFlashAttnMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[KvpluginFlashAttnMLASparseMetadataBuilder]:
        """The metadata builder."""
        return KvpluginFlashAttnMLASparseMetadataBuilder
