"""What a comparison and a whole capture report, as frozen models; their JSON schema is ``docs/replay-schema.json``."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from kvplugin.replay.drift import Drift


class Model(BaseModel):
    """Base of the report's parts."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Stage(StrEnum):
    """Stages of one layer's decode step, in the order in which drift travels."""

    IDENTITY = "identity"
    CACHE = "cache"
    INDEXER_SCORES = "indexer_scores"
    SELECTION = "selection"
    ATTENTION = "attention"
    LOG_PROBS = "log_probs"


class Status(StrEnum):
    """Outcome of one stage."""

    MATCH = "match"
    DRIFT = "drift"
    UNAVAILABLE = "unavailable"


class UnavailableOracle(Model):
    """A second opinion that could not be had; the core result stands without it."""

    name: str
    reason: str


class Provenance(Model):
    """How the replay was put together."""

    logical_merge_orders: list[list[list[int]]] = Field(description="[B][Sq][blocks]: logical blocks as merged")
    cp_block_owners: list[list[int]] = Field(description="[B][blocks]; empty without context parallelism")
    page_size: int = Field(description="tokens per page and logical block")
    page_format: str = Field(description="gqa, mla or fp8_ds_mla")
    split_size: int | None = Field(description="tokens per split; null = one split")
    strict: bool = Field(description="observed values had to equal the replay bit for bit")
    backend: str = Field(description="what computed the observed values")
    device: str = Field(description="where the replay ran")
    torch: str = Field(description="version of torch")


class Fingerprints(Model):
    """Digests of one request."""

    content: str = Field(description="positions, keys, values, RoPE state and dtypes, in logical order")
    execution: str = Field(description="page size, owners, merge order, backend")
    chunks: list[str] = Field(description="content of each 16 tokens")


class ComparisonReport(Model):
    """One layer of one step: the replay against the full prefill, and the engine against the replay."""

    drifts: list[Drift]
    notes: list[str] = Field(description="what a difference was recognised as")
    fingerprints: list[Fingerprints] = Field(description="one per request of the batch")
    provenance: Provenance
    unavailable: list[UnavailableOracle]

    @property
    def within(self) -> bool:
        """True where every comparison is inside its tolerance."""
        return all(drift.within for drift in self.drifts)

    def drift(self, name: str) -> Drift:
        """The comparison called ``name``."""
        return next(drift for drift in self.drifts if drift.name == name)


class StageReport(Model):
    """One stage of one record."""

    stage: Stage
    status: Status
    reason: str = Field(default="", description="why it is unavailable")
    drifts: list[Drift] = Field(default_factory=list)
    iou: list[float] = Field(default_factory=list, description="selection overlap of each query, 0 to 1")
    findings: list[str] = Field(default_factory=list, description="what went wrong, as far as it is proven")


class RecordReport(Model):
    """One request, layer and step."""

    request: str
    layer: int
    step: int
    positions: list[int] = Field(description="position of each query token")
    stages: list[StageReport]
    comparison: ComparisonReport | None = Field(description="null where the identity stage refused the inputs")
    selected_blocks: list[list[float]] = Field(description="[Sq][blocks]: share of each block that was selected")
    position_drift: list[float] = Field(description="largest output difference of each query token, engine to replay")
    position_share: list[float] = Field(description="the same as a share of the tolerance; above 1 = drift")

    @property
    def first_drift(self) -> StageReport | None:
        """The earliest stage that drifted."""
        return next((stage for stage in self.stages if stage.status is Status.DRIFT), None)


class FirstDrift(Model):
    """Where decode first stops matching, by step, then layer, then stage."""

    stage: Stage
    request: str
    layer: int
    step: int
    position: int
    findings: list[str]


class CaptureReport(Model):
    """A whole capture."""

    schema_version: int = 1
    kvplugin: str = Field(description="version that wrote the report")
    engine: str
    model: str
    policy: str = Field(default="", description="the topology policy in force; empty where nobody has said")
    within: bool
    first_drift: FirstDrift | None
    records: list[RecordReport]
