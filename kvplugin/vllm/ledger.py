"""Every point of vLLM that the plugin subclasses, registers with, wraps or replaces. ``LEDGER.md`` comes from here."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any


class Kind(StrEnum):
    """How the plugin takes hold of a point."""

    SUBCLASS = "subclass"
    REGISTER = "register"
    WRAP = "wrap"
    REPLACE = "replace"
    READ = "read"


class Build(StrEnum):
    """The vLLM build whose engines the plugin takes hold of at a point."""

    CPU = "cpu"
    GPU = "gpu"
    ANY = "any"


OTHERS = "*"
"""Stands in a signature for parameters that are handed on as they come."""


@dataclass(frozen=True)
class Point:
    """One point of vLLM.

    Attributes:
        target: ``module:qualified.name``.
        kind: how it is taken hold of.
        why, how: the reason, and the means.
        signature: parameter names of a callable as last checked, empty for what is no callable; with :data:`OTHERS`
            those that are relied on.
        module: file of the plugin that does it, as a dotted name.
        remove_when: what would make the row unnecessary.
        build: of vLLM, where the point is taken hold of.
        since: vLLM's first version that has the point, where older ones do without.
    """

    target: str
    kind: Kind
    why: str
    how: str
    signature: tuple[str, ...]
    module: str
    remove_when: str
    build: Build = Build.ANY
    since: str = ""

    def is_taken_in(self, build: Build, version: str) -> bool:
        """Whether the plugin takes hold of the point in an engine of this build and version."""
        return self.build in (build, Build.ANY) and release(version) >= release(self.since)


def release(version: str) -> tuple[int, ...]:
    """``0.32.0+cpu`` as numbers that can be compared; nothing is less than any version."""
    return tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdigit())


CHECKED_VERSIONS = {
    Build.CPU: ("0.32.0",),
    Build.GPU: ("0.30.0", "0.31.0", "0.32.0", "0.33.0"),
}
"""vLLM versions against which every row of a build was resolved. The CPU build was run. Of the GPU build its Python was
run, on CPU tensors (``make compat``), and nothing on a GPU."""

POINTS = (
    Point(
        "vllm.v1.attention.backends.registry:register_backend",
        Kind.REGISTER,
        "--attention-backend KVPLUGIN, and CUSTOM as an alias",
        "registers a class path under both names; the new member pickles through the plugin",
        ("backend", "class_path", "is_mamba"),
        "kvplugin.vllm.backend_names",
        "never: this is vLLM's own extension point",
    ),
    Point(
        "vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls",
        Kind.SUBCLASS,
        "the stock CPU platform refuses sparse attention",
        "answers the plugin's backend for sparse MLA when it was chosen",
        ("selected_backend", "attn_selector_config", "num_heads"),
        "kvplugin.vllm.cpu.platform",
        "vLLM's CPU platform serves sparse MLA",
        Build.CPU,
    ),
    Point(
        "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
        Kind.SUBCLASS,
        "it switches off chunked prefill and prefix caching for MLA and forces block size 16",
        "keeps the operator's values for DSA models under the plugin's backend; validates the plugin's configuration",
        ("vllm_config",),
        "kvplugin.vllm.cpu.platform",
        "vLLM's CPU platform serves sparse MLA",
        Build.CPU,
    ),
    Point(
        "vllm.platforms.cpu:CpuPlatform.register_triton_kernel_overrides",
        Kind.SUBCLASS,
        "its scan of all modules dies on an object of llvmlite once numba is loaded",
        "hides numba and llvmlite from the scan",
        (),
        "kvplugin.vllm.cpu.platform",
        "vLLM's scan skips objects whose __dict__ is no dictionary",
        Build.CPU,
    ),
    Point(
        "vllm.platforms:cpu_platform_plugin",
        Kind.READ,
        "the platform is replaced only where the stock CPU platform would be in charge",
        "called in the platform probe",
        (),
        "kvplugin.vllm.plugin",
        "vLLM's CPU platform serves sparse MLA",
        Build.CPU,
    ),
    Point(
        "vllm.v1.worker.cpu_worker:CPUWorker.init_device",
        Kind.SUBCLASS,
        "a row's phase needs the prompt length of its request",
        "binds the worker's model runner after vLLM made it",
        (),
        "kvplugin.vllm.cpu.worker",
        "attention metadata carries prompt lengths",
        Build.CPU,
    ),
    Point(
        "vllm.v1.worker.cpu_worker:CPUWorker.load_model",
        Kind.SUBCLASS,
        "the CPU parts must be in place before the model is built, in the worker only",
        "installs them, then loads as vLLM does",
        ("load_dummy_weights",),
        "kvplugin.vllm.cpu.worker",
        "vLLM's CPU build serves sparse MLA",
        Build.CPU,
    ),
    Point(
        "vllm.v1.worker.gpu_input_batch:InputBatch.num_prompt_tokens_cpu_tensor",
        Kind.READ,
        "a row's phase needs the prompt length of its request",
        "read when the indexer's metadata is built",
        (),
        "kvplugin.vllm.cpu.requests",
        "attention metadata carries prompt lengths",
        Build.CPU,
    ),
    Point(
        "vllm.model_executor.custom_op:CustomOp.register_oot",
        Kind.REGISTER,
        "the stock indexer op runs on a CPU only for index_topk = 512 and AVX-512",
        "registers CpuSparseAttnIndexer in place of SparseAttnIndexer",
        ("_decorated_op_cls", "name"),
        "kvplugin.vllm.cpu.parts",
        "vLLM's CPU build scores any index_topk",
        Build.CPU,
    ),
    Point(
        "vllm.model_executor.layers.sparse_attn_indexer:SparseAttnIndexer.forward_cpu",
        Kind.SUBCLASS,
        "scores, top-k and the policy's hook on a CPU",
        "overrides forward_cpu and forward_native",
        ("hidden_states", "q_quant", "k", "weights"),
        "kvplugin.vllm.cpu.indexer",
        "vLLM's CPU build scores any index_topk",
        Build.CPU,
    ),
    Point(
        "vllm.model_executor.models.deepseek_v2:DeepseekV32IndexerCache.get_attn_backend",
        Kind.REPLACE,
        "the indexer's metadata builder needs Triton",
        "set on the instances that are handed to the CPU indexer op, to answer CpuIndexerBackend",
        (),
        "kvplugin.vllm.cpu.indexer",
        "the platform chooses the indexer's backend",
        Build.CPU,
    ),
    Point(
        "vllm.v1.attention.backends.mla.indexer:DeepseekV32IndexerBackend.get_builder_cls",
        Kind.SUBCLASS,
        "the indexer's metadata builder needs Triton",
        "answers CpuIndexerMetadataBuilder",
        (),
        "kvplugin.vllm.cpu.indexer",
        "the platform chooses the indexer's backend",
        Build.CPU,
    ),
    Point(
        "vllm.model_executor.models.deepseek_v2:per_token_group_quant_fp8",
        Kind.REPLACE,
        "fp8 quantisation of indexer queries is GPU-only",
        "the model module's name points to the torch form",
        (
            "x",
            "group_size",
            "eps",
            "dtype",
            "column_major_scales",
            "tma_aligned_scales",
            "out_q",
            "use_ue8m0",
        ),
        "kvplugin.vllm.cpu.query_quantization",
        "vLLM quantises groups on CPUs",
        Build.CPU,
    ),
    Point(
        "vllm.v1.attention.backend:MLAAttentionImpl.forward_mqa",
        Kind.SUBCLASS,
        "there is no sparse MLA implementation for CPUs",
        "CpuSparseMLAImpl",
        ("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"),
        "kvplugin.vllm.cpu.attention",
        "vLLM's CPU build serves sparse MLA",
        Build.CPU,
    ),
    Point(
        "vllm.v1.attention.backend:AttentionMetadataBuilder.build",
        Kind.SUBCLASS,
        "metadata for sparse MLA and its indexer without GPU kernels",
        "CpuSparseMLAMetadataBuilder and CpuIndexerMetadataBuilder",
        ("common_prefix_len", "common_attn_metadata", "fast_build"),
        "kvplugin.vllm.cpu.attention",
        "vLLM's CPU build serves sparse MLA",
        Build.CPU,
    ),
    Point(
        "vllm.model_executor.layers.attention.sparse_mla_attention:SharedTopkIndicesBuffer.init_topk_indices_buffer",
        Kind.SUBCLASS,
        "followers read the leader's selection from the shared buffer",
        "CpuSparseMLAImpl inherits it",
        ("indexer", "topk_indices_buffer"),
        "kvplugin.vllm.cpu.attention",
        "vLLM's CPU build serves sparse MLA",
        Build.CPU,
    ),
    Point(
        "vllm.v1.attention.backend:CommonAttentionMetadata.query_start_loc",
        Kind.READ,
        "leaders and followers have metadata builders of their own; one object must stand for the batch of both",
        "its identity names the batch whose conversions are shared",
        (),
        "kvplugin.vllm.cpu.attention",
        "vLLM converts once for a leader and its followers on every path",
        Build.CPU,
    ),
    Point(
        "vllm.config.compilation:CompilationConfig.static_forward_context",
        Kind.READ,
        "index groups are those of the layers that this worker has loaded",
        "read at the first conversion: indexers, layer numbers and KV caches",
        (),
        "kvplugin.vllm.engine_remap",
        "vLLM converts once for a leader and its followers on every path",
        Build.CPU,
    ),
    Point(
        "vllm.model_executor.models.utils:extract_layer_index",
        Kind.READ,
        "groups are made of layer numbers, and layers have names",
        "called when a layer's implementation is bound to its name",
        ("layer_name", "num_attn_module"),
        "kvplugin.vllm.engine_remap",
        "vLLM converts once for a leader and its followers on every path",
    ),
    Point(
        "vllm.v1.attention.backends.mla.sparse_utils:flat_kv_row_view",
        Kind.READ,
        "physical indices count rows of a layer's flat KV cache",
        "gives these rows and the rows from block to block",
        ("kv_cache", "block_size"),
        "kvplugin.vllm.engine_remap",
        "vLLM's CPU build serves sparse MLA",
        Build.CPU,
    ),
    Point(
        "vllm.v1.worker.cpu_worker:CPUWorker.sample_tokens",
        Kind.SUBCLASS,
        "a capture keeps the log-probability of the token that its step drew",
        "copies the logits before vLLM samples, only while a capture is armed",
        ("grammar_output",),
        "kvplugin.vllm.cpu.worker",
        "never: captures need it",
        Build.CPU,
    ),
    Point(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model_state",
        Kind.READ,
        "a capture keeps the log-probability of the token that its step drew",
        "its logits, between the forward pass and sampling, only while a capture is armed",
        (),
        "kvplugin.vllm.cpu.worker",
        "never: captures need it",
        Build.CPU,
    ),
    Point(
        "vllm.v1.worker.gpu_input_batch:InputBatch.req_ids",
        Kind.READ,
        "a capture is of one request, and attention metadata names none",
        "read when metadata is built, only while a capture is armed",
        (),
        "kvplugin.vllm.capture_target",
        "attention metadata names the requests",
        Build.CPU,
    ),
    Point(
        "vllm.v1.worker.gpu_input_batch:CachedRequestState.num_prompt_tokens",
        Kind.READ,
        "a step is counted from the end of the prompt",
        "with num_tokens, read when metadata is built, only while a capture is armed",
        (),
        "kvplugin.vllm.capture_target",
        "never: captures need it",
        Build.CPU,
    ),
    Point(
        "vllm.model_executor.layers.mla:MultiHeadLatentAttentionWrapper.indexer_rope_emb",
        Kind.READ,
        "a capture says how queries and keys were rotated, for attention and indexer apart",
        "with rotary_emb and mla_attn, read when a capture is armed",
        (),
        "kvplugin.vllm.capture_identity",
        "never: captures need it",
        Build.CPU,
    ),
    Point(
        "vllm.entrypoints.serve.dev.rpc.api_router:collective_rpc",
        Kind.READ,
        "kvplugin capture --url speaks with the workers",
        "HTTP, with strings as arguments; there only with VLLM_SERVER_DEV_MODE=1",
        ("raw_request",),
        "kvplugin.vllm.capture_client",
        "never: this is vLLM's own extension point",
        Build.CPU,
    ),
    Point(
        "vllm.config.scheduler:SchedulerConfig.scheduler_cls",
        Kind.REGISTER,
        "what is in force must be decided once per step, for all ranks",
        "set to RolloutScheduler or RolloutAsyncScheduler where a rollout is configured",
        (),
        "kvplugin.vllm.rollout.startup",
        "never: this is vLLM's own extension point",
    ),
    Point(
        "vllm.v1.core.sched.scheduler:Scheduler.schedule",
        Kind.SUBCLASS,
        "what is in force must be decided once per step, for all ranks",
        "takes up the rollout before, and attaches it to the step's SchedulerOutput after",
        ("throttle_prefills",),
        "kvplugin.vllm.rollout.scheduler",
        "vLLM carries data of plugins with each step",
    ),
    Point(
        "vllm.v1.core.sched.scheduler:Scheduler.add_request",
        Kind.SUBCLASS,
        "arms must not share prefix blocks, nor may what was computed before and after a switch",
        "salts the request for its arm's epoch and hashes its blocks again",
        ("request",),
        "kvplugin.vllm.rollout.scheduler",
        "vLLM lets plugins add to a request's cache salt",
    ),
    Point(
        "vllm.v1.core.sched.scheduler:Scheduler._preempt_request",
        Kind.SUBCLASS,
        "a preempted request resumes in the epoch of then",
        "salts it again",
        ("request", "timestamp", "drop_stale_output"),
        "kvplugin.vllm.rollout.scheduler",
        "vLLM lets plugins add to a request's cache salt",
    ),
    Point(
        "vllm.v1.core.sched.scheduler:Scheduler.waiting",
        Kind.READ,
        "requests that wait when an epoch ends are salted again",
        "its requests, none of which holds blocks",
        (),
        "kvplugin.vllm.rollout.scheduler",
        "vLLM lets plugins add to a request's cache salt",
    ),
    Point(
        "vllm.v1.request:Request.update_block_hashes",
        Kind.READ,
        "a request's first block hash holds its salt",
        "called after block_hashes was emptied, for a request that holds no blocks",
        (),
        "kvplugin.vllm.rollout.engine",
        "vLLM lets plugins add to a request's cache salt",
    ),
    Point(
        "vllm.v1.worker.cpu_worker:CPUWorker.execute_model",
        Kind.SUBCLASS,
        "workers follow the rollout and the arms that a step came with",
        "RolloutMethods reads SchedulerOutput before the step runs",
        ("scheduler_output",),
        "kvplugin.vllm.cpu.worker",
        "vLLM carries data of plugins with each step",
        Build.CPU,
    ),
    Point(
        "vllm.v1.engine.input_processor:InputProcessor.__init__",
        Kind.WRAP,
        "each front end watches the rollout of its engine",
        "makes a FrontEnd where a rollout is configured",
        ("vllm_config", OTHERS),
        "kvplugin.vllm.rollout.wrap_input_processor",
        "vLLM has a hook where requests enter",
    ),
    Point(
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        Kind.WRAP,
        "a request gets its arm once, where offline and served ones enter",
        "checks the plugin's keys, and writes the arm into extra_args of the result",
        ("request_id", "prompt", OTHERS),
        "kvplugin.vllm.rollout.wrap_input_processor",
        "vLLM has a hook where requests enter",
    ),
    Point(
        "vllm.sampling_params:SamplingParams.from_optional",
        Kind.WRAP,
        "a bad key of a stream must be a status of 400, before the stream starts",
        "checks the plugin's keys; every HTTP entry point makes its parameters with it",
        ("extra_args", OTHERS),
        "kvplugin.vllm.rollout.wrap_sampling_params",
        "vLLM validates parameters of a stream before it starts",
    ),
    Point(
        "vllm.v1.engine.output_processor:OutputProcessor.add_request",
        Kind.WRAP,
        "latencies per arm need the request's internal id",
        "hangs a trace on the state of a request that has an arm",
        ("request", "prompt", "parent_req", "request_index", "queue"),
        "kvplugin.vllm.rollout.wrap_output_processor",
        "FinishedRequestStats carry the request's parameters",
    ),
    Point(
        "vllm.v1.engine.output_processor:RequestState.make_request_output",
        Kind.WRAP,
        "latencies per arm, and the arm of an output for callers in Python",
        "tells the trace what is put out; sets kvplugin_arm on the output",
        ("new_token_ids", "pooling_output", "finish_reason", OTHERS),
        "kvplugin.vllm.rollout.wrap_output_processor",
        "FinishedRequestStats carry the request's parameters",
    ),
    Point(
        "vllm.renderers.base:BaseRenderer.render_chat",
        Kind.WRAP,
        "the stable prefix of a chat is its system and tool part, and messages are known here alone",
        "renders that part with two probes, once for each, and notes its length in the engine input",
        ("conversations", "chat_params", "tok_params", "prompt_extras", "skip_mm_cache"),
        "kvplugin.vllm.rollout.wrap_renderer",
        "vLLM tells how long the leading part of a chat prompt is",
    ),
    Point(
        "vllm.renderers.base:BaseRenderer.render_chat_async",
        Kind.WRAP,
        "the same, for the server",
        "the same",
        ("conversations", "chat_params", "tok_params", "prompt_extras", "skip_mm_cache"),
        "kvplugin.vllm.rollout.wrap_renderer",
        "vLLM tells how long the leading part of a chat prompt is",
    ),
    Point(
        "vllm.plugins.endpoint_plugins.interface:EndpointPlugin.attach_router",
        Kind.REGISTER,
        "status and override over HTTP",
        "the entry point kvplugin_endpoints of vllm.endpoint_plugins",
        ("app",),
        "kvplugin.vllm.rollout.endpoints",
        "never: this is vLLM's own extension point",
    ),
    Point(
        "vllm.platforms:cuda_platform_plugin",
        Kind.READ,
        "the platform is replaced only where the stock CUDA platform would be in charge",
        "called in the platform probe",
        (),
        "kvplugin.vllm.plugin",
        "never: this is vLLM's own extension point",
        Build.GPU,
    ),
    Point(
        "vllm.platforms.cuda:CudaPlatform.get_attn_backend_cls",
        Kind.SUBCLASS,
        "the plugin's backends stand for those that vLLM picks",
        "asks vLLM, and answers the subclass of its choice",
        ("selected_backend", "attn_selector_config", "num_heads"),
        "kvplugin.vllm.gpu.platform",
        "vLLM has a hook at its top-k stage",
        Build.GPU,
    ),
    Point(
        "vllm.platforms.cuda:CudaPlatform.check_and_update_config",
        Kind.SUBCLASS,
        "a wrong configuration must stop the start, with its message",
        "validates the plugin's configuration after vLLM's own",
        ("vllm_config",),
        "kvplugin.vllm.gpu.platform",
        "never: this is vLLM's own extension point",
        Build.GPU,
    ),
    Point(
        "vllm.v1.worker.gpu_worker:Worker.init_device",
        Kind.SUBCLASS,
        "a row's phase needs the prompt length of its request",
        "binds the worker's model runner after vLLM made it",
        (),
        "kvplugin.vllm.gpu.worker",
        "attention metadata carries prompt lengths",
        Build.GPU,
    ),
    Point(
        "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
        Kind.SUBCLASS,
        "counters may be read once no graph is captured any more",
        "exports them from then on",
        (),
        "kvplugin.vllm.gpu.worker",
        "never: this is vLLM's own extension point",
        Build.GPU,
    ),
    Point(
        "vllm.v1.worker.gpu_worker:Worker.execute_model",
        Kind.SUBCLASS,
        "workers follow the rollout and the arms that a step came with",
        "RolloutMethods reads SchedulerOutput before the step runs",
        ("scheduler_output",),
        "kvplugin.vllm.gpu.worker",
        "vLLM carries data of plugins with each step",
        Build.GPU,
    ),
    Point(
        "vllm.v1.attention.backends.mla.flashmla_sparse:FlashMLASparseBackend.get_impl_cls",
        Kind.SUBCLASS,
        "layers make themselves known, and share conversions",
        "answers the plugin's implementation, and with get_builder_cls its builder",
        (),
        "kvplugin.vllm.gpu.flashmla",
        "vLLM converts once for a leader and its followers on every path",
        Build.GPU,
    ),
    Point(
        "vllm.v1.attention.backends.mla.flashinfer_mla_sparse:FlashInferMLASparseTRTLLMBackend.get_impl_cls",
        Kind.SUBCLASS,
        "layers make themselves known, and share conversions",
        "answers the plugin's implementation, and with get_builder_cls its builder",
        (),
        "kvplugin.vllm.gpu.flashinfer_trtllm",
        "vLLM converts once for a leader and its followers on every path",
        Build.GPU,
    ),
    Point(
        "vllm.v1.attention.backends.mla.flashinfer_mla_sparse:FlashInferMLASparseSM120Backend.get_impl_cls",
        Kind.SUBCLASS,
        "layers make themselves known, and share conversions",
        "answers the plugin's implementation, and with get_builder_cls its builder",
        (),
        "kvplugin.vllm.gpu.flashinfer_sm120",
        "vLLM converts once for a leader and its followers on every path",
        Build.GPU,
    ),
    Point(
        "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90:FlashInferMLASparseSM90Backend.get_impl_cls",
        Kind.SUBCLASS,
        "layers make themselves known, and share conversions",
        "answers the plugin's implementation, and with get_builder_cls its builder",
        (),
        "kvplugin.vllm.gpu.flashinfer_sm90",
        "vLLM converts once for a leader and its followers on every path",
        Build.GPU,
    ),
    Point(
        "vllm.v1.attention.backends.mla.flashattn_mla_sparse:FlashAttnMLASparseBackend.get_impl_cls",
        Kind.SUBCLASS,
        "layers make themselves known, and share conversions",
        "answers the plugin's implementation, and with get_builder_cls its builder",
        (),
        "kvplugin.vllm.gpu.flashattn",
        "vLLM converts once for a leader and its followers on every path",
        Build.GPU,
    ),
    Point(
        "vllm.v1.attention.backends.mla.flashattn_mla_sparse:FlashAttnMLASparseFA4Backend.get_impl_cls",
        Kind.SUBCLASS,
        "layers make themselves known, and share conversions",
        "answers the plugin's implementation, and with get_builder_cls its builder",
        (),
        "kvplugin.vllm.gpu.flashattn_fa4",
        "vLLM converts once for a leader and its followers on every path",
        Build.GPU,
        "0.33",
    ),
    Point(
        "vllm.v1.attention.backends.mla.flashmla_sparse:FlashMLASparseImpl.forward_mqa",
        Kind.SUBCLASS,
        "the conversions of a layer are told from those of others",
        "SharingImpl, mixed into every implementation, notes whose they are",
        ("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"),
        "kvplugin.vllm.gpu.mixins",
        "vLLM converts once for a leader and its followers on every path",
        Build.GPU,
    ),
    Point(
        "vllm.model_executor.layers.attention.sparse_mla_attention:SparseMLACommonImpl._convert_logical_to_physical_topk",
        Kind.SUBCLASS,
        "conversions that vLLM shares by itself are counted too",
        "counts, and lets vLLM convert",
        ("logical_topk_indices", "attn_metadata", "block_stride_rows", "return_valid_counts"),
        "kvplugin.vllm.gpu.mixins",
        "vLLM converts once for a leader and its followers on every path",
        Build.GPU,
    ),
    Point(
        "vllm.model_executor.layers.attention.sparse_mla_attention:SparseMLACommonMetadataBuilder.__init__",
        Kind.SUBCLASS,
        "the first builder is made once the model stands and no graph is captured yet",
        "AttachingBuilder attaches the policy, and tests itself",
        ("kv_cache_spec", "layer_names", "vllm_config", "device"),
        "kvplugin.vllm.gpu.mixins",
        "vLLM has a hook at its top-k stage",
        Build.GPU,
    ),
    Point(
        "vllm.model_executor.layers.attention.sparse_mla_attention:SharedTopkIndicesBuffer.topk_indices_buffer",
        Kind.READ,
        "a top-k is an engine's of ours where it writes to a buffer of its layers",
        "read at each new builder: drafts are given the target's late",
        (),
        "kvplugin.vllm.gpu.engine",
        "vLLM has a hook at its top-k stage",
        Build.GPU,
    ),
    Point(
        "vllm._custom_ops:top_k_per_row_prefill",
        Kind.WRAP,
        "the policy needs a prefill chunk's scores",
        "acts after the kernel, or lifts scores before it",
        ("logits", "cu_seqlen_ks", "cu_seqlen_ke", "raw_topk_indices", "num_rows", "stride0", "stride1", "topk_tokens"),
        "kvplugin.vllm.gpu.wrap_prefill_topk",
        "vLLM has a hook at its top-k stage",
        Build.GPU,
    ),
    Point(
        "vllm.model_executor.layers.sparse_attn_indexer:get_indexer_topk",
        Kind.WRAP,
        "the policy needs the scores of decode rows",
        "the top-k that it answers has the policy around it",
        ("backend",),
        "kvplugin.vllm.gpu.wrap_decode_topk",
        "vLLM has a hook at its top-k stage",
        Build.GPU,
    ),
    Point(
        "vllm.model_executor.layers.indexer_topk:SparseIndexerTopk.forward",
        Kind.READ,
        "the same",
        "called with the arguments that it is given",
        ("logits", "seq_lens", "next_n", "topk_indices", "topk_tokens", "max_seq_len"),
        "kvplugin.vllm.gpu.wrap_decode_topk",
        "vLLM has a hook at its top-k stage",
        Build.GPU,
    ),
    Point(
        "vllm.v1.attention.backends.mla.indexer:DeepseekV32IndexerMetadataBuilder.build",
        Kind.WRAP,
        "graphs replay without Python, and only builders run in each step",
        "describes the batch's rows in persistent memory, and leaves it with the metadata",
        ("common_prefix_len", "common_attn_metadata", "fast_build"),
        "kvplugin.vllm.gpu.wrap_indexer_metadata",
        "vLLM has a hook at its top-k stage",
        Build.GPU,
    ),
    Point(
        "vllm.v1.attention.backends.mla.indexer:DeepseekV32IndexerMetadataBuilder.update_draft_decode_metadata",
        Kind.WRAP,
        "later steps of a draft are not built anew",
        "describes their rows, one for each request",
        ("metadata",),
        "kvplugin.vllm.gpu.wrap_indexer_metadata",
        "vLLM has a hook at its top-k stage",
        Build.GPU,
        "0.32",
    ),
    Point(
        "vllm.v1.attention.backends.mla.indexer:DeepSeekV32IndexerDecodeMetadata.requires_padding",
        Kind.READ,
        "where requests differ in their number of queries, vLLM pads decode rows",
        "with decode_lens, tells whether the rows are padded",
        (),
        "kvplugin.vllm.gpu.wrap_indexer_metadata",
        "vLLM has a hook at its top-k stage",
        Build.GPU,
    ),
    Point(
        "vllm.v1.attention.backends.mla.indexer:DeepseekV32IndexerPrefillMetadata.row_shard_sizes",
        Kind.READ,
        "rows that vLLM deals out to tensor-parallel ranks are counted by each",
        "read when metadata is built",
        (),
        "kvplugin.vllm.gpu.wrap_indexer_metadata",
        "vLLM has a hook at its top-k stage",
        Build.GPU,
        "0.32",
    ),
    Point(
        "vllm.forward_context:ForwardContext.attn_metadata",
        Kind.READ,
        "a top-k call must find the description of its batch",
        "looked up by the name of an indexer's layer",
        (),
        "kvplugin.vllm.gpu.step",
        "vLLM has a hook at its top-k stage",
        Build.GPU,
    ),
    Point(
        "vllm.v1.attention.backend:CommonAttentionMetadata.req_idx",
        Kind.READ,
        "rows of a batch name their requests by slots (model runner V2)",
        "read when metadata is built",
        (),
        "kvplugin.vllm.gpu.requests",
        "attention metadata carries prompt lengths",
        Build.GPU,
    ),
    Point(
        "vllm.v1.worker.gpu.states:RequestState.prompt_len",
        Kind.READ,
        "a row's phase needs the prompt length of its request (model runner V2)",
        "with index_to_req_id, read when metadata is built",
        (),
        "kvplugin.vllm.gpu.requests",
        "attention metadata carries prompt lengths",
        Build.GPU,
    ),
    Point(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.req_states",
        Kind.READ,
        "the same",
        "the same",
        (),
        "kvplugin.vllm.gpu.requests",
        "attention metadata carries prompt lengths",
        Build.GPU,
    ),
    Point(
        "vllm.v1.worker.gpu_input_batch:InputBatch.num_prompt_tokens",
        Kind.READ,
        "a row's phase needs the prompt length of its request (model runner V1)",
        "with req_ids, read when metadata is built",
        (),
        "kvplugin.vllm.gpu.requests",
        "attention metadata carries prompt lengths",
        Build.GPU,
    ),
    Point(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.input_batch",
        Kind.READ,
        "the same",
        "the same",
        (),
        "kvplugin.vllm.gpu.requests",
        "attention metadata carries prompt lengths",
        Build.GPU,
    ),
    Point(
        "vllm.v1.attention.backends.mla.sparse_utils:triton_convert_req_index_to_global_index",
        Kind.WRAP,
        "vLLM converts once for each layer where a batch holds prefill rows",
        "followers read what their leader left; wrapped in each module that holds it",
        ("req_id", "block_table", "token_indices", OTHERS),
        "kvplugin.vllm.gpu.wrap_convert",
        "vLLM converts once for a leader and its followers on every path",
        Build.GPU,
    ),
    Point(
        "vllm.v1.attention.backends.mla.sparse_utils:triton_filter_and_convert_dcp_index",
        Kind.WRAP,
        "the same, under context parallelism",
        "the same",
        ("req_id", "block_table", "token_indices", OTHERS),
        "kvplugin.vllm.gpu.wrap_convert",
        "vLLM converts once for a leader and its followers on every path",
        Build.GPU,
    ),
    Point(
        "vllm.v1.attention.backends.mla.index_group:SparseMLAIndexGroup.num_layers",
        Kind.READ,
        "conversions are shared in vLLM's own index groups",
        "with physical_topk_indices and the layer's place",
        (),
        "kvplugin.vllm.gpu.conversions",
        "vLLM converts once for a leader and its followers on every path",
        Build.GPU,
    ),
    Point(
        "vllm.config.parallel:ParallelConfig.cp_kv_cache_interleave_size",
        Kind.READ,
        "under context parallelism each rank lifts the tokens that it has the scores of",
        "with the number of ranks and this one's place",
        (),
        "kvplugin.vllm.gpu.engine",
        "vLLM has a hook at its top-k stage",
        Build.GPU,
    ),
    Point(
        "vllm.config.attention:AttentionConfig.hisparse_config",
        Kind.READ,
        "the policy has not been checked with host-backed caches",
        "reported as an obstacle",
        (),
        "kvplugin.vllm.gpu.engine",
        "the policy is checked with them",
        Build.GPU,
    ),
    Point(
        "vllm.config.kernel:KernelConfig.sparse_indexer_topk_backend",
        Kind.READ,
        "the self-test goes through the decode top-k that the engine will use",
        "read when the policy is attached",
        (),
        "kvplugin.vllm.gpu.self_test",
        "vLLM has a hook at its top-k stage",
        Build.GPU,
    ),
    Point(
        "vllm.distributed:get_tensor_model_parallel_rank",
        Kind.READ,
        "rows that all ranks compute alike are counted once",
        "the first rank counts them",
        (),
        "kvplugin.vllm.gpu.engine",
        "vLLM has a hook at its top-k stage",
        Build.GPU,
    ),
    Point(
        "vllm.distributed:get_dcp_group",
        Kind.READ,
        "the same, of context-parallel ranks",
        "asked when a builder is made",
        (),
        "kvplugin.vllm.gpu.engine",
        "vLLM has a hook at its top-k stage",
        Build.GPU,
    ),
)


def resolve(target: str) -> Any:
    """The object a target names; for a field, or an attribute that instances get in their methods, its class.

    Raises:
        ImportError, AttributeError: vLLM has no such point.
    """
    module, _, path = target.partition(":")
    found: Any = import_module(module)
    for name in path.split("."):
        if isinstance(found, type) and not hasattr(found, name) and _instances_have(found, name):
            return found
        found = getattr(found, name)
    return found


def _instances_have(owner: type, name: str) -> bool:
    fields = getattr(owner, "__dataclass_fields__", {})
    return name in fields or f"self.{name} =" in inspect.getsource(owner)


def problem(point: Point) -> str | None:
    """What is wrong with a point in the vLLM that is installed, or None."""
    try:
        found = resolve(point.target)
    except Exception as error:
        return f"missing: {error}"
    if not inspect.isroutine(found):
        return None
    names = tuple(name for name in inspect.signature(found).parameters if name not in ("self", "cls"))
    wanted = set(point.signature) - {OTHERS}
    same = wanted <= set(names) if OTHERS in point.signature else names == point.signature
    return None if same else f"signature changed: ({', '.join(names)})"


def page() -> str:
    """``LEDGER.md``."""
    lines = [
        "# Points of vLLM that kvplugin touches",
        "",
        "Generated from `kvplugin/vllm/ledger.py`. Rows of the CPU build were resolved and run with vLLM "
        f"{', '.join(CHECKED_VERSIONS[Build.CPU])}; those of the GPU build were resolved with "
        f"{', '.join(CHECKED_VERSIONS[Build.GPU])}, and run there on CPU tensors, not on a GPU "
        "([compatibility](compatibility.md)).",
        "",
        "| point | build | kind | why | how | in | goes when |",
        "|---|---|---|---|---|---|---|",
    ]
    for p in POINTS:
        build = f"{p.build}, from {p.since}" if p.since else p.build
        lines.append(f"| `{p.target}` | {build} | {p.kind} | {p.why} | {p.how} | `{p.module}` | {p.remove_when} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
