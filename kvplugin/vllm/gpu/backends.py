"""Which backend of the plugin stands for which of vLLM's sparse MLA backends."""

from __future__ import annotations

_STOCK = "vllm.v1.attention.backends.mla"
_OURS = "kvplugin.vllm.gpu"

HOST_PLANNED = f"{_STOCK}.flashinfer_mla_sparse_sm90.FlashInferMLASparseSM90Backend"
"""Plans each row's number of tokens on the host, so that a policy must keep it."""

BACKENDS = {
    f"{_STOCK}.flashmla_sparse.FlashMLASparseBackend": f"{_OURS}.flashmla.KvpluginFlashMLASparseBackend",
    f"{_STOCK}.flashinfer_mla_sparse.FlashInferMLASparseTRTLLMBackend": (
        f"{_OURS}.flashinfer_trtllm.KvpluginFlashInferMLASparseTRTLLMBackend"
    ),
    f"{_STOCK}.flashinfer_mla_sparse.FlashInferMLASparseSM120Backend": (
        f"{_OURS}.flashinfer_sm120.KvpluginFlashInferMLASparseSM120Backend"
    ),
    HOST_PLANNED: f"{_OURS}.flashinfer_sm90.KvpluginFlashInferMLASparseSM90Backend",
    f"{_STOCK}.flashattn_mla_sparse.FlashAttnMLASparseBackend": f"{_OURS}.flashattn.KvpluginFlashAttnMLASparseBackend",
    f"{_STOCK}.flashattn_mla_sparse.FlashAttnMLASparseFA4Backend": (
        f"{_OURS}.flashattn_fa4.KvpluginFlashAttnMLASparseFA4Backend"
    ),
}
"""Path of ours by the path of vLLM's. The last one is in vLLM from 0.33 on."""
