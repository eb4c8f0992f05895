"""One engine of vLLM's on CPU tensors: its builders, its indexer, its index groups, and the plugin's parts in them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import BLOCK_SIZE, COLUMNS, Batch, Row
from kernels import LONGEST, Layout, decode_logits, identities, prefill_logits, set_layout
from standins import LOG, Ranks, RecordingEvent, RecordingStream, ranks
from torch import Tensor

from integration.parity.interpreter import scalar_conditions_as_masks

CPU = torch.device("cpu")
HEADS, LATENT, ROPE = 16, 512, 64
POLICY = {"mode": "topology_sparse_merge", "sink_tokens": 4, "local_tokens": 12, "witness_blocks": 0}


class Rig:
    """An engine with one index group after the other.

    Args:
        policy: of the plugin; None = not configured.
        groups: layers of each index group.
        drafts: speculative tokens.
        width: K; ``wide`` the width of the buffer.
        rows, requests: of the largest batch.
        placement, options: of the plugin, beside the policy.
        tensor, context: ranks of this engine; ``interleave`` of the context-parallel ones.
        backend: of the decode top-k.
        cache_dtype: of the KV cache.
    """

    def __init__(
        self,
        policy: dict[str, Any] | None = POLICY,
        *,
        groups: Sequence[int] = (3,),
        drafts: int = 0,
        width: int = 128,
        wide: int | None = None,
        rows: int = 160,
        requests: int = 72,
        placement: str = "after_topk",
        options: dict[str, Any] | None = None,
        tensor: Ranks | None = None,
        context: Ranks | None = None,
        interleave: int = 1,
        backend: str = "auto",
        cache_dtype: str = "auto",
    ) -> None:
        self.policy, self.width = policy, width
        self.tensor, self.context = tensor or Ranks(1, 0), context or Ranks(1, 0)
        self.interleave = interleave
        self.runner: Any = None
        self.cache_dtype = cache_dtype
        self.config = _config(self, drafts, rows, requests, backend)
        if policy is not None:
            self.config.additional_config = {
                "kvplugin": {
                    "policy": policy,
                    "placement": placement,
                    "metrics": {"enabled": False},
                    **(options or {}),
                }
            }
        self.buffer = torch.full((rows, wide or width), -1, dtype=torch.int32)
        self.layers = [f"model.layers.{number}.self_attn.attn" for number in range(sum(groups))]
        self.leaders = {sum(groups[:number]) for number in range(len(groups))}
        self.indexers = {number: f"model.layers.{number}.self_attn.indexer.k_cache" for number in self.leaders}
        self.impls: list[Any] = []
        self.attended: list[tuple[Tensor, Tensor]] = []
        with self.current():
            self._make_layers()
            self.builder = self._mla_builder()
            self.indexer_builder = self._indexer_builder()
        self.hook = self.impls[0].kvplugin_engine.state.hook
        if self.hook is not None:
            _tell(self.hook, "on_topk", "policy")
            _tell(self.hook, "lift_shared", "policy")

    @property
    def engine(self) -> Any:
        return self.impls[0].kvplugin_engine

    @contextmanager
    def current(self) -> Iterator[None]:
        """While this engine is the one that vLLM works for."""
        from vllm.config import set_current_vllm_config

        set_layout(Layout(_dtype[0], self.context.world_size, self.context.rank_in_group, self.interleave))
        with set_current_vllm_config(self.config), ranks(tensor=self.tensor, context=self.context):
            yield

    def step(self, batch: Batch, mode: str = "NONE", **options: Any) -> Tensor:
        """One forward pass: every layer builds, selects, converts and attends.

        Args:
            mode: of CUDA graphs, as vLLM's forward context names it.
            options: fields of vLLM's common metadata.

        Returns:
            The selection of each row that lives, as the buffer holds it.
        """
        common = batch.common(**self._context_lengths(batch), **options)
        tokens = common.num_actual_tokens
        with self.current():
            metadata = self.build(common)
            with self.forward(metadata, mode):
                for layer in range(len(self.layers)):
                    if layer in self.leaders:
                        self.select(batch.rows, tokens, layer)
                    self.attend(layer, metadata, tokens)
        return self.buffer[: len(batch.rows), : self.width]

    def select_only(self, batch: Batch) -> None:
        """A forward pass as far as the indexers of all leaders."""
        common = batch.common(**self._context_lengths(batch))
        with self.current():
            metadata = dict.fromkeys(self.indexers.values(), self.indexer_builder.build(0, common))
            with self.forward(metadata):
                for layer in sorted(self.leaders):
                    self.select(batch.rows, common.num_actual_tokens, layer)

    def _context_lengths(self, batch: Batch) -> dict[str, Any]:
        if self.context.world_size == 1:
            return {}
        layout = Layout(_dtype[0], self.context.world_size, self.context.rank_in_group, self.interleave)
        lengths = [len(layout.tokens(request.length)) for request in batch.requests]
        return {"dcp_local_seq_lens": torch.tensor(lengths, dtype=torch.int32)}

    def build(self, common: Any) -> dict[str, Any]:
        """The metadata of all layers, by name."""
        LOG.clear()
        self.attended.clear()
        indexer = self.indexer_builder.build(0, common)
        mla = self.builder.build(0, common)
        return dict.fromkeys(self.indexers.values(), indexer) | dict.fromkeys(self.layers, mla)

    @contextmanager
    def forward(self, metadata: Any, mode: str = "NONE") -> Iterator[None]:
        """While vLLM's forward context has this metadata."""
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import ForwardContext, override_forward_context

        names = inspect.signature(ForwardContext).parameters
        given = {
            "no_compile_layers": {},
            "attn_metadata": metadata,
            "slot_mapping": {},
            "virtual_engine": 0,
            "cudagraph_runtime_mode": CUDAGraphMode[mode],
        }
        with override_forward_context(ForwardContext(**{k: v for k, v in given.items() if k in names})):
            yield

    def select(self, rows: Sequence[Row], tokens: int, leader: int = 0, buffer: Tensor | None = None) -> None:
        """vLLM's indexer of one layer; rows after the given ones pad."""
        from vllm.model_executor.layers import sparse_attn_indexer

        padding = tokens - len(rows)
        queries = identities(
            [row.request.key for row in rows] + [0] * padding, [row.position for row in rows] + [0] * padding
        )
        given = {
            "hidden_states": torch.zeros(tokens, 1),
            "k_cache_prefix": self.indexers[leader],
            "kv_cache": torch.zeros(1, BLOCK_SIZE, 4, dtype=torch.uint8),
            "q_quant": queries,
            "q_scale": None,
            "k": None,
            "weights": torch.zeros(4 * tokens + 64, 1),
            "quant_block_size": 128,
            "scale_fmt": "ue8m0",
            "topk_tokens": self.width,
            "head_dim": 128,
            "max_model_len": LONGEST,
            "total_seq_lens": LONGEST * 8,
            "topk_indices_buffer": self.buffer if buffer is None else buffer,
            "skip_k_cache_insert": True,
            "use_pcp": False,
            "pcp_shard_decode_requests": False,
            "dense_mha_metadata_layer_name": self.layers[leader],
            "dcp_rank": self.context.rank_in_group,
            "dcp_world_size": self.context.world_size,
            "cp_kv_cache_interleave_size": self.interleave,
            "topk_backend": self.config.kernel_config.sparse_indexer_topk_backend,
        }
        names = inspect.signature(sparse_attn_indexer.sparse_attn_indexer).parameters
        sparse_attn_indexer.sparse_attn_indexer(**{name: value for name, value in given.items() if name in names})

    def attend(self, layer: int, metadata: dict[str, Any], tokens: int) -> None:
        """What follows the indexer in a layer."""
        impl, own = self.impls[layer], metadata[self.layers[layer]]
        impl.record_logical_topk_ready()
        impl.prepare_for_batch(own)
        impl.forward_mqa(torch.zeros(tokens, HEADS, LATENT + ROPE), _pool(), own, None)

    def _make_layers(self) -> None:
        from vllm.v1.attention.backends.mla.index_group import SparseMLAIndexGroupBuilder

        from kvplugin.vllm.gpu.flashmla import KvpluginFlashMLASparseBackend

        group_builder = SparseMLAIndexGroupBuilder(self.buffer)
        layers = self.config.compilation_config.static_forward_context
        for number, name in enumerate(self.layers):
            leads = number in self.leaders
            impl = KvpluginFlashMLASparseBackend.get_impl_cls()(
                num_heads=HEADS,
                head_size=LATENT + ROPE,
                scale=1.0,
                num_kv_heads=1,
                alibi_slopes=None,
                sliding_window=None,
                kv_cache_dtype=self.cache_dtype,
                logits_soft_cap=None,
                attn_type="decoder",
                kv_sharing_target_layer_name=None,
                q_lora_rank=None,
                kv_lora_rank=LATENT,
                qk_nope_head_dim=128,
                qk_rope_head_dim=ROPE,
                qk_head_dim=128 + ROPE,
                v_head_dim=128,
                kv_b_proj=None,
                indexer=SimpleNamespace(topk_indices_buffer=self.buffer) if leads else None,
                topk_indices_buffer=None if leads else self.buffer,
                index_group_builder=group_builder,
            )
            impl._bf16_flash_mla_kernel = self._kernel_of(number)
            self.impls.append(impl)
            layers[name] = SimpleNamespace(impl=impl, prefill_backend=None, dcp_manager=_manager())

    def _kernel_of(self, number: int) -> Any:
        def attend(q: Tensor, kv: Tensor, indices: Tensor, lengths: Tensor, heads: int, out: Any = None) -> Any:
            LOG.append(f"layer {number} attends")
            self.attended.append((indices.clone(), lengths.clone()))
            return q[..., :LATENT], None

        return attend

    def _mla_builder(self) -> Any:
        from kvplugin.vllm.gpu.flashmla import KvpluginFlashMLASparseBackend

        return KvpluginFlashMLASparseBackend.get_builder_cls()(_spec(LATENT + ROPE), self.layers, self.config, CPU)

    def _indexer_builder(self) -> Any:
        from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

        builder = DeepseekV32IndexerBackend.get_builder_cls()
        names = list(self.indexers.values())
        return builder(_spec(132), names, self.config, CPU, block_table_width=COLUMNS)


def _manager() -> Any:
    """What a layer has under context parallelism; builders look at its class alone."""
    from vllm.model_executor.layers.attention import sparse_mla_attention

    manager = getattr(sparse_mla_attention, "MLADCPManager", SimpleNamespace)
    return object.__new__(manager)


@cache
def _pool() -> Tensor:
    """A KV cache for 80 requests, of which nothing but the shape is read."""
    return torch.empty(1 + 81 * COLUMNS, BLOCK_SIZE, LATENT + ROPE, dtype=torch.uint8)


_dtype = [torch.float32]


def use_dtype(dtype: torch.dtype) -> None:
    """Scores of engines come in this type from now on."""
    _dtype[0] = dtype


def _spec(head_size: int) -> Any:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=head_size, dtype=torch.uint8)


def _config(rig: Rig, drafts: int, rows: int, requests: int, backend: str) -> Any:
    """vLLM's configuration: its own classes where a GPU's absence lets them stand, else only what is read."""
    from vllm.config import AttentionConfig, CompilationConfig, KernelConfig

    text = SimpleNamespace(
        model_type="deepseek_v32",
        index_topk=rig.width,
        num_hidden_layers=8,
        kv_lora_rank=LATENT,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=ROPE,
        v_head_dim=128,
    )
    attention = AttentionConfig()
    if hasattr(attention, "sparse_mla_prefill_workspace_factor"):
        attention.sparse_mla_prefill_workspace_factor = 5
    speculative = SimpleNamespace(
        num_speculative_tokens=drafts, enable_adaptive_verification=False, parallel_drafting=False
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=text,
            hf_config=text,
            use_mla=True,
            dtype=torch.bfloat16,
            max_model_len=LONGEST,
            get_num_attention_heads=lambda parallel: HEADS,
            model_arch_config=SimpleNamespace(total_num_attention_heads=HEADS),
            architectures=["DeepseekV32ForCausalLM"],
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=rig.tensor.world_size,
            decode_context_parallel_size=rig.context.world_size,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=rig.interleave,
            dcp_comm_backend="ag_rs",
            worker_cls="auto",
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=rows, max_num_seqs=requests),
        cache_config=SimpleNamespace(cache_dtype=rig.cache_dtype, block_size=BLOCK_SIZE),
        speculative_config=speculative if drafts else None,
        num_speculative_tokens=drafts,
        attention_config=attention,
        compilation_config=CompilationConfig(),
        kernel_config=KernelConfig(sparse_indexer_topk_backend=backend),
        device_config=SimpleNamespace(device_type="cpu"),
        additional_config={},
    )


def _tell(owner: Any, name: str, what: str) -> None:
    method = getattr(owner, name)

    def told(*args: Any, **kwargs: Any) -> Any:
        LOG.append(what)
        return method(*args, **kwargs)

    setattr(owner, name, told)


@contextmanager
def gpu_stand_ins() -> Iterator[None]:
    """Put in place what computes and waits on a GPU, around vLLM's own Python."""
    from vllm.model_executor.layers import sparse_attn_indexer
    from vllm.utils import torch_utils
    from vllm.v1.attention.backends.mla import index_group, indexer, sparse_utils
    from vllm.v1.worker import workspace

    kernel = sparse_utils._CONVERT_REQ_INDEX_TO_GLOBAL_INDEX_KERNEL
    numbers = iter(range(1_000_000))
    events = iter(("selection ready", "rows ready") * 1_000_000)

    def convert(*args: Any, **kwargs: Any) -> Any:
        LOG.append("conversion")
        return kernel(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, scalar_conditions_as_masks():
        patch.setattr(sparse_attn_indexer, "fp8_fp4_mqa_logits", prefill_logits)
        patch.setattr(sparse_attn_indexer, "fp8_fp4_paged_mqa_logits", decode_logits)
        patch.setattr(sparse_utils, "_CONVERT_REQ_INDEX_TO_GLOBAL_INDEX_KERNEL", convert)
        patch.setattr(index_group, "_create_event", lambda: RecordingEvent(next(events)))
        patch.setattr(index_group, "_create_side_stream", lambda device: RecordingStream(f"side {next(numbers)}"))
        patch.setattr(torch_utils._current_stream_tls, "value", RecordingStream("compute"), raising=False)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(indexer, "has_deep_gemm", lambda: True)
        patch.setattr(
            indexer, "get_paged_mqa_logits_metadata", lambda *args, **kwargs: torch.zeros(1, 2, dtype=torch.int32)
        )
        for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
            if vars(module).get("PIN_MEMORY"):
                patch.setattr(module, "PIN_MEMORY", False)
        workspace.init_workspace_manager(CPU)
        yield
