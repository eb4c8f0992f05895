"""What a comparison reads: one layer of one decode step, for a batch of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from kvplugin.replay.pages import KVPool
from kvplugin.replay.rope import RopeRecord


class LseBase(StrEnum):
    """Logarithm of a log-sum-exp that comes from outside."""

    E = "e"
    TWO = "2"


@dataclass(frozen=True)
class PrefixIdentity:
    """What a request believes about its cached prefix; all three fields, or no identity at all.

    Attributes:
        key: name under which the prefix was found. Not part of the identity: content is.
        length: tokens of the prefix.
        fingerprint: digest of the prefix's cached content, see :func:`kvplugin.replay.prefix_fingerprint`.
    """

    key: str | None
    length: int | None
    fingerprint: str | None


@dataclass(frozen=True)
class ContextParallel:
    """Which rank holds each logical block.

    Attributes:
        block_owners: int32 or int64 ``[B, M]``; -1 past the request's blocks.
        world_size: number of ranks.
    """

    block_owners: Tensor
    world_size: int


@dataclass(frozen=True)
class LogProbHead:
    """Turns attention output into log-probabilities: ``out`` as ``[B, Sq, Hq * Dv]`` times ``weight``.

    Attributes:
        weight: floating ``[V, Hq * Dv]``.
        targets: int64 ``[B, Sq]``, the tokens whose log-probabilities are compared.
        mask: bool ``[B, Sq]``, which of them count.
    """

    weight: Tensor
    targets: Tensor
    mask: Tensor


@dataclass(frozen=True)
class ReplayInputs:
    """One layer, one step, B requests with Sq query tokens each, over a shared pool.

    Attributes:
        q: float32, bfloat16 or float16 ``[B, Hq, Sq, D]``.
        pool: the KV pages.
        block_table: int ``[B, M]``, pages in logical order; -1 past the request's pages.
        kv_seq_lens: int ``[B]``, cached tokens of each request, its query tokens included.
        cache_position: int ``[B, Sq]``, position at which each query token was cached.
        query_position_ids: int ``[B, Sq]``, position the model used for it.
        global_token_positions: int ``[P, page]``, position of the token in each slot; -1 = unused.
        key_position_ids: int ``[P, page]``, position its key was rotated with; -1 = unused.
        rope: the rotation of q and cached keys.
        scale: factor of the logits.
        prefixes: one entry per request, or none at all.
        context_parallel: owners of the blocks.
        selection: int ``[B, Sq, K]``, logical token indices each query attends to; -1 from the first unused slot on.
        head: for log-probabilities.
        out_dtype: dtype of the final output; default that of q.
    """

    q: Tensor
    pool: KVPool
    block_table: Tensor
    kv_seq_lens: Tensor
    cache_position: Tensor
    query_position_ids: Tensor
    global_token_positions: Tensor
    key_position_ids: Tensor
    rope: RopeRecord
    scale: float
    prefixes: tuple[PrefixIdentity | None, ...] = ()
    context_parallel: ContextParallel | None = None
    selection: Tensor | None = None
    head: LogProbHead | None = None
    out_dtype: torch.dtype | None = None

    @property
    def final_dtype(self) -> torch.dtype:
        """The dtype to which the output is cast, once."""
        return self.out_dtype or self.q.dtype


@dataclass(frozen=True)
class Observed:
    """What the engine computed.

    Attributes:
        out: floating ``[B, Hq, Sq, Dv]``.
        lse: float32 ``[B, Hq, Sq]``; an fp64 or half one is refused.
        rank_out: floating ``[W, B, Hq, Sq, Dv]``, the state of each context-parallel rank before the merge.
        rank_lse: float32 ``[W, B, Hq, Sq]``.
        lse_base: base of ``lse`` and ``rank_lse``; mandatory with either.
    """

    out: Tensor | None = None
    lse: Tensor | None = None
    rank_out: Tensor | None = None
    rank_lse: Tensor | None = None
    lse_base: LseBase | None = None


@dataclass(frozen=True)
class Floor:
    """Largest difference between two honest runs (A/A), per quantity; wins over a tolerance that is smaller."""

    out: float = 0.0
    lse: float = 0.0
    log_prob: float = 0.0
    score: float = 0.0


@dataclass(frozen=True)
class CompareSettings:
    """How to compare.

    Attributes:
        split_size: tokens per split of the KV (a multiple of the page size): each split merges its own blocks, then
            splits merge in order, as split-KV kernels do. None: one split.
        strict: what was observed must equal the replay bit for bit; no tolerance, no floor.
        floor: the capture's own A/A floor.
        backend: name of what computed the observed values, part of the execution identity.
    """

    split_size: int | None = None
    strict: bool = False
    floor: Floor = field(default_factory=Floor)
    backend: str = "replay"
