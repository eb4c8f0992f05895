"""A capture in memory: one record per request, layer and step."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from kvplugin.replay.inputs import Floor, Observed, ReplayInputs
from kvplugin.replay.rope import RopeRecord


@dataclass(frozen=True)
class Indexer:
    """What the indexer scored with; score of token s = ``sum_h weights[h] * relu(q[h] . keys[s])``.

    Attributes:
        q: floating ``[Sq, Hi, Di]``, dequantised.
        keys: floating ``[length, Di]``, dequantised, in logical order.
        weights: floating ``[Sq, Hi]``, every scale folded in.
        rope: the indexer's own rotation; its layout is not that of the main attention in every model.
    """

    q: Tensor
    keys: Tensor
    weights: Tensor
    rope: RopeRecord


@dataclass(frozen=True)
class FreshCache:
    """The newest n tokens' cache elements, in logical order and in the pool's layout and RoPE state.

    Either a fresh prefill of the whole request gives them (n = length), or the step that computed them, on their way to
    the cache.

    Attributes:
        keys: ``[n, Hkv, D]``, or ``[n, C + R]`` for MLA (576 for fp8_ds_mla), floating.
        values: ``[n, Hkv, Dv]``; None for MLA.
    """

    keys: Tensor
    values: Tensor | None = None


@dataclass(frozen=True)
class Record:
    """One request (a batch of one), one layer, one step.

    Attributes:
        request: opaque id, never text of the prompt.
        layer, step: where it was captured.
        inputs: what the layer read; ``selection`` is the one after the policy.
        observed: what the layer computed.
        index_group: leader layer whose selection this layer uses.
        selection_before: int ``[Sq, K]``, the indexer's own top-k, before the policy.
        physical: int ``[Sq, K]``, cache rows the kernel read, ``page * page_size + offset``; -1 = unused.
        page_ids: int64 ``[P]``, the engine's number of each page of the pool; default the pool's own.
        indexer, indexer_scores: what the indexer read, and float32 ``[Sq, length]`` that it computed.
        fresh: cache elements of a fresh prefill, or of the step before they were cached.
        log_probs, reference_log_probs: float32 ``[Sq]`` of the sampled tokens, by decode and by a full prefill.
        hidden_size: of the model, for the log-probabilities' tolerance.
        content, chunks: content fingerprints taken when the record was captured.
        floor: the A/A floor.
        backend: name of the attention backend.
    """

    request: str
    layer: int
    step: int
    inputs: ReplayInputs
    observed: Observed = field(default_factory=Observed)
    index_group: int | None = None
    selection_before: Tensor | None = None
    physical: Tensor | None = None
    page_ids: Tensor | None = None
    indexer: Indexer | None = None
    indexer_scores: Tensor | None = None
    fresh: FreshCache | None = None
    log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None
    hidden_size: int = 1
    content: str | None = None
    chunks: tuple[str, ...] = ()
    floor: Floor = field(default_factory=Floor)
    backend: str = "unknown"

    @property
    def place(self) -> str:
        """Where it was captured, for messages."""
        return f"request {self.request}, layer {self.layer}, step {self.step}"

    @property
    def positions(self) -> list[int]:
        """Position of each query token."""
        return [int(position) for position in self.inputs.query_position_ids[0]]


@dataclass(frozen=True)
class Capture:
    """Records of one engine run.

    Attributes:
        engine: name and version of the engine.
        model: name of the model.
        records: in any order.
        dropped: records left out because the capture had reached its size limit.
        policy: the topology policy in force, in words; empty where nobody has said.
    """

    engine: str
    model: str
    records: tuple[Record, ...]
    dropped: int = 0
    policy: str = ""
