"""FlashAttention 4's sparse kernels for datacenter Blackwell, in vLLM from 0.33 on."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashattn_mla_sparse import (
    FlashAttnMLASparseFA4Backend,
    FlashAttnMLASparseFA4Impl,
    FlashAttnMLASparseFA4MetadataBuilder,
)

from kvplugin.vllm.gpu.mixins import AttachingBuilder, SharingImpl


class KvpluginFlashAttnMLASparseFA4Impl(SharingImpl, FlashAttnMLASparseFA4Impl):
    """vLLM's implementation, with conversions shared in its index group."""


class KvpluginFlashAttnMLASparseFA4MetadataBuilder(AttachingBuilder, FlashAttnMLASparseFA4MetadataBuilder):
    """vLLM's metadata builder, which attaches the policy."""


class KvpluginFlashAttnMLASparseFA4Backend(FlashAttnMLASparseFA4Backend):
    """vLLM's backend, under its own name, with the plugin's implementation and builder."""

    @staticmethod
    def get_impl_cls() -> type[KvpluginFlashAttnMLASparseFA4Impl]:
        """The implementation."""
        return KvpluginFlashAttnMLASparseFA4Impl

    @staticmethod
    def get_builder_cls() -> type[KvpluginFlashAttnMLASparseFA4MetadataBuilder]:
        """The metadata builder."""
        return KvpluginFlashAttnMLASparseFA4MetadataBuilder
