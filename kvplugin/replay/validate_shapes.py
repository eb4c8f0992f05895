"""Rules that need no value of a tensor: ranks, sizes, dtypes, devices, the records."""

from __future__ import annotations

import torch

from kvplugin.replay.inputs import CompareSettings, ContextParallel, LogProbHead, Observed, PrefixIdentity, ReplayInputs
from kvplugin.replay.pages import FP8_TOKEN_BYTES, KVPool, PageFormat
from kvplugin.replay.refuse import FLOAT_DTYPES, INDEX_DTYPES, check_count, check_positive, check_tensor, refuse
from kvplugin.replay.rope import RopeState

LARGEST_SCALE = 1e12
"""Far beyond any head size, and its square and its inverse still fit float32."""

MOST_RANKS = 4096
"""Every rank's states are held, blocks or not."""


def check_pool(pool: KVPool) -> None:
    """Rank, dtype and sizes of the pages."""
    device = pool.keys.device
    if pool.keys.dim() > 1 and pool.page_size == 0:
        refuse("pool.keys", f"page size 0 in {list(pool.keys.shape)}", "the page size must be positive")
    if pool.format is PageFormat.GQA:
        check_tensor("pool.keys", pool.keys, ("P", "page", "Hkv", "D"), FLOAT_DTYPES, device)
        if pool.values is None:
            refuse("pool.values", "None", "GQA pages need values; MLA pages have none")
        else:
            pages = (*pool.keys.shape[:3], "Dv")
            check_tensor("pool.values", pool.values, pages, FLOAT_DTYPES, device)
        return
    if pool.values is not None:
        refuse("pool.values", "given", f"{pool.format} pages have none: the latents are the values")
    if pool.format is PageFormat.FP8_DS_MLA:
        check_tensor("pool.keys", pool.keys, ("P", "page", FP8_TOKEN_BYTES), (torch.uint8,), device)
    else:
        check_tensor("pool.keys", pool.keys, ("P", "page", "C + R"), FLOAT_DTYPES, device)
        check_count("pool.latent_dim", pool.latent_dim)
        if pool.latent_dim > pool.key_dim:
            refuse("pool.latent_dim", f"got {pool.latent_dim}", f"must be at most C + R = {pool.key_dim}")


def check_queries(inputs: ReplayInputs) -> None:
    """Query, tables and positions against the pool, and the scale."""
    pool, device = inputs.pool, inputs.pool.keys.device
    check_tensor("q", inputs.q, ("B", "Hq", "Sq", pool.key_dim), FLOAT_DTYPES, device)
    batch, heads, queries, _ = inputs.q.shape
    if heads % pool.kv_heads:
        refuse("q", f"{heads} query heads", f"must be a multiple of the {pool.kv_heads} KV heads")
    check_tensor("block_table", inputs.block_table, (batch, "M"), INDEX_DTYPES, device)
    check_tensor("kv_seq_lens", inputs.kv_seq_lens, (batch,), INDEX_DTYPES, device)
    check_tensor("cache_position", inputs.cache_position, (batch, queries), INDEX_DTYPES, device)
    check_tensor("query_position_ids", inputs.query_position_ids, (batch, queries), INDEX_DTYPES, device)
    slots = pool.keys.shape[:2]
    check_tensor("global_token_positions", inputs.global_token_positions, slots, INDEX_DTYPES, device)
    check_tensor("key_position_ids", inputs.key_position_ids, slots, INDEX_DTYPES, device)
    if inputs.selection is not None:
        check_tensor("selection", inputs.selection, (batch, queries, "K"), INDEX_DTYPES, device)
    if inputs.out_dtype is not None and inputs.out_dtype not in FLOAT_DTYPES:
        refuse("out_dtype", f"got {inputs.out_dtype}", "must be torch.float32, torch.bfloat16 or torch.float16")
    check_positive("scale", inputs.scale)
    if not 1 / LARGEST_SCALE <= inputs.scale <= LARGEST_SCALE:
        refuse("scale", f"got {inputs.scale!r}", f"must be in [{1 / LARGEST_SCALE}, {LARGEST_SCALE}]")


def check_rope(inputs: ReplayInputs) -> None:
    """The RoPE record: finite theta, whole rotation, no cast before it."""
    rope, pool = inputs.rope, inputs.pool
    check_positive("rope.theta", rope.theta)
    whole = pool.key_dim if pool.format is PageFormat.GQA else pool.key_dim - pool.latent_dim
    if rope.rotary_dim != whole:
        part = "the head size" if pool.format is PageFormat.GQA else "the rope part R"
        refuse("rope.rotary_dim", f"got {rope.rotary_dim}", f"must be {part}, {whole}: partial rotary is not replayed")
    if rope.rotary_dim % 2:
        refuse("rope.rotary_dim", f"got {rope.rotary_dim}", "must be even")
    if rope.cast_before_rotation:
        refuse("rope.cast_before_rotation", "got True", "must be False: a cast before the rotation is not replayed")
    if rope.rotary_first and rope.rotary_dim != pool.key_dim:
        refuse("rope.rotary_first", "got True", "must be False: MLA's rope part comes last")
    for field, dtype in (("rope.q_dtype", rope.q_dtype), ("rope.k_dtype", rope.k_dtype)):
        if dtype not in FLOAT_DTYPES:
            refuse(field, f"got {dtype}", "must be torch.float32, torch.bfloat16 or torch.float16")
    if pool.format is PageFormat.FP8_DS_MLA and rope.k_state is RopeState.PRE:
        refuse("rope.k_state", "got pre_rope", "must be post_rope: fp8_ds_mla pages hold rotated keys")


def check_context_parallel(parallel: ContextParallel, inputs: ReplayInputs) -> None:
    """World size and the owners' shape."""
    check_count("context_parallel.world_size", parallel.world_size)
    if parallel.world_size > MOST_RANKS:
        refuse("context_parallel.world_size", f"got {parallel.world_size}", f"must be at most {MOST_RANKS}")
    owners, table = parallel.block_owners, inputs.block_table
    check_tensor("cp_block_owners", owners, tuple(table.shape), INDEX_DTYPES, table.device)


def check_prefixes(prefixes: tuple[PrefixIdentity | None, ...], batch: int) -> None:
    """One identity per request or none; its fields all or nothing."""
    if prefixes and len(prefixes) != batch:
        refuse("prefixes", f"got {len(prefixes)}", f"must be one per request, {batch}, or none")
    for row, prefix in enumerate(prefixes):
        if prefix is None:
            continue
        fields = {"key": prefix.key, "length": prefix.length, "fingerprint": prefix.fingerprint}
        missing = [name for name, value in fields.items() if value is None]
        if missing:
            refuse(
                "prefixes", f"row {row}: {' and '.join(missing)} missing", "key, length and fingerprint, or no prefix"
            )
        check_count(f"prefixes, row {row}, length", prefix.length)


def check_head(head: LogProbHead, inputs: ReplayInputs) -> None:
    """The log-probability head against the output."""
    batch, heads, queries, _ = inputs.q.shape
    device, hidden = inputs.q.device, heads * inputs.pool.value_dim
    check_tensor("head.weight", head.weight, ("V", hidden), FLOAT_DTYPES, device)
    check_tensor("head.targets", head.targets, (batch, queries), (torch.int64,), device)
    check_tensor("head.mask", head.mask, (batch, queries), (torch.bool,), device)


def check_observed(observed: Observed, inputs: ReplayInputs) -> None:
    """States from outside: shapes, and the base of their log-sum-exp, which nobody may guess."""
    batch, heads, queries, _ = inputs.q.shape
    device, dim = inputs.q.device, inputs.pool.value_dim
    parallel = inputs.context_parallel
    for field, tensor, shape, dtypes in (
        ("observed.out", observed.out, (batch, heads, queries, dim), FLOAT_DTYPES),
        ("observed.lse", observed.lse, (batch, heads, queries), (torch.float32,)),
        ("observed.rank_out", observed.rank_out, ("W", batch, heads, queries, dim), FLOAT_DTYPES),
        ("observed.rank_lse", observed.rank_lse, ("W", batch, heads, queries), (torch.float32,)),
    ):
        if tensor is not None:
            check_tensor(field, tensor, shape, dtypes, device)
    for field, tensor in (("rank_out", observed.rank_out), ("rank_lse", observed.rank_lse)):
        if tensor is not None and (parallel is None or len(tensor) != parallel.world_size):
            world = "no context-parallel owners" if parallel is None else f"{parallel.world_size} ranks"
            refuse(f"observed.{field}", f"states of {len(tensor)} ranks", f"the inputs have {world}")
    if observed.lse_base is None and (observed.lse is not None or observed.rank_lse is not None):
        refuse("observed.lse_base", "None", "states from outside need 'e' or '2'")


def check_settings(settings: CompareSettings, inputs: ReplayInputs) -> None:
    """The split size in whole pages."""
    if settings.split_size is not None:
        check_count("split_size", settings.split_size, inputs.pool.page_size)
