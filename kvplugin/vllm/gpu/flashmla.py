"""FlashMLA's sparse kernels (Hopper and datacenter Blackwell)."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashmla_sparse import (
    FlashMLASparseBackend,
    FlashMLASparseImpl,
    FlashMLASparseMetadataBuilder,
)

from kvplugin.vllm.gpu.mixins import AttachingBuilder, SharingImpl


class KvpluginFlashMLASparseImpl(SharingImpl, FlashMLASparseImpl):
    """vLLM's implementation, with conversions shared in its index group."""


class KvpluginFlashMLASparseMetadataBuilder(AttachingBuilder, FlashMLASparseMetadataBuilder):
    """vLLM's metadata builder, which attaches the policy."""


class KvpluginFlashMLASparseBackend(FlashMLASparseBackend):
    """vLLM's backend, under its own name, with the plugin's implementation and builder."""

    @staticmethod
    def get_impl_cls() -> type[KvpluginFlashMLASparseImpl]:
        """The implementation."""
        return KvpluginFlashMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[KvpluginFlashMLASparseMetadataBuilder]:
        """The metadata builder."""
        return KvpluginFlashMLASparseMetadataBuilder
