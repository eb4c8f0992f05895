"""Every metric of kvplugin, once: names, labels with their values, and the counter columns behind each value.

``python -m kvplugin.metrics.definitions`` prints the page that operators read.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum, unique
from typing import Final, Literal

from kvplugin.config import Phase
from kvplugin.metrics.metric import Buffer, Label, LabelValue, Metric, MetricType
from kvplugin.remap.counters import RemapCounter
from kvplugin.remap.paths import RemapPath
from kvplugin.topology.counters import BYPASS_REASONS, PHASE_ROWS, Counter

EXACT = Buffer("exact", len(PHASE_ROWS), Counter)
"""What the policy did, row 0 prefill and row 1 decode."""
SAMPLED = Buffer("sampled", len(PHASE_ROWS), Counter)
"""As :data:`EXACT`, over the rows that ``before_topk`` samples."""
REMAP_PATHS = Buffer("remap_paths", 1, RemapPath)
"""How layers came by their physical indices."""
REMAP_INVALID = Buffer("remap_invalid", 1, RemapCounter)
"""Slots without a physical row."""

ACTIVE: Final = "active"
"""The value of ``kvplugin_active``'s label where the policy's hook is in place."""


@unique
class InactiveReason(StrEnum):
    """Why the policy's hook is not in place."""

    NOT_CONFIGURED = "not_configured"
    DISABLED_BY_ENV = "disabled_by_env"
    POLICY_DISABLED = "policy_disabled"
    NO_SPARSE_ATTENTION = "no_sparse_attention"
    UNSUPPORTED_PLATFORM = "unsupported_platform"
    UNSUPPORTED_VLLM = "unsupported_vllm"
    SELF_TEST_FAILED = "self_test_failed"
    NOT_REPORTED = "not_reported"


ActiveState = InactiveReason | Literal["active"]


def _column(counter: IntEnum, meaning: str) -> LabelValue:
    return LabelValue(counter.name.lower(), meaning, columns=(counter,))


_PHASE_MEANINGS = {
    Phase.PREFILL: "the row's position lies inside the prompt",
    Phase.DECODE: "the row's position lies after it",
}
_BYPASS_MEANINGS = {
    Counter.BYPASS_MAX_WIDTH: "the top-k buffer is wider than `limits.max_width`",
    Counter.BYPASS_MAX_ROWS: "the call has more rows than `limits.max_rows`",
    Counter.BYPASS_MAX_ELEMENTS: "the call has more slots than `limits.max_elements`",
    Counter.BYPASS_PHASE: "`phases` leaves the row's phase out",
    Counter.BYPASS_MAX_ROW_LENGTH: "the row sees more tokens than `limits.max_row_length`",
    Counter.BYPASS_BAD_OFFSET: "the row's offset cannot be used",
    Counter.BYPASS_NO_SCORES: "the eviction rule needs scores and the row has none",
    Counter.BYPASS_UNKNOWN_ARM: "the row's arm is not in the table of policies",
}
_STATE_MEANINGS: dict[ActiveState, str] = {
    ACTIVE: "the hook is in place and the self-test saw it fire",
    InactiveReason.NOT_CONFIGURED: "the additional config has no `kvplugin` key",
    InactiveReason.DISABLED_BY_ENV: "`KVPLUGIN_DISABLE` or `VLLM_KVPLUGIN_DISABLE` is set (log and doctor only)",
    InactiveReason.POLICY_DISABLED: "`policy.mode` is `disabled`",
    InactiveReason.NO_SPARSE_ATTENTION: "the model has no DeepSeek sparse attention",
    InactiveReason.UNSUPPORTED_PLATFORM: "another platform than vLLM's CPU one is in charge (log and doctor only)",
    InactiveReason.UNSUPPORTED_VLLM: "this vLLM lacks a point the hook needs (log and doctor only)",
    InactiveReason.SELF_TEST_FAILED: "the hook is in place and the self-test did not see it fire",
    InactiveReason.NOT_REPORTED: "the engine is up and no worker has said how it went",
}

DEFAULT_ARM = "default"
ARM = Label("arm", (LabelValue(DEFAULT_ARM, "the policy of the engine's configuration"),))
PHASE = Label("phase", tuple(LabelValue(p, _PHASE_MEANINGS[p], rows=(row,)) for row, p in enumerate(PHASE_ROWS)))
OUTCOME = Label(
    "outcome",
    (
        _column(Counter.SEEN, "live rows; equals rewritten + identity + bypassed"),
        _column(Counter.REWRITTEN, "the selection differs from the learned set"),
        _column(Counter.IDENTITY, "the selection equals the learned set"),
        _column(Counter.RESCUED, "no valid learned token although the row sees some"),
        _column(Counter.FALLBACK, "learned indices outside the row: no structure was added"),
        _column(Counter.EMPTY, "leaves without a token although the row sees some"),
        LabelValue("bypassed", "left alone, for any reason", columns=tuple(BYPASS_REASONS.values())),
    ),
)
KIND = Label(
    "kind",
    (
        _column(Counter.KEPT, "learned and selected"),
        _column(Counter.EVICTED, "learned and not selected"),
        _column(Counter.INJECTED, "structural, selected, not learned"),
        _column(Counter.BACKFILLED, "the rest of the selection"),
        _column(Counter.INVALID, "learned slots that hold neither -1 nor an index of the row"),
        _column(Counter.SINK_HIT, "sinks that were learned anyway"),
        _column(Counter.SINK_POSSIBLE, "sinks"),
        _column(Counter.LOCAL_HIT, "local-window tokens that were learned anyway"),
        _column(Counter.LOCAL_POSSIBLE, "local-window tokens"),
        _column(Counter.WITNESS_HIT, "witness tokens that were learned anyway"),
        _column(Counter.WITNESS_POSSIBLE, "witness tokens"),
        _column(Counter.SEGMENTS, "coverage segments (not tokens) with a visible token"),
        _column(Counter.SEGMENTS_EMPTY_BEFORE, "those without a learned token before the policy"),
        _column(Counter.SEGMENTS_EMPTY_AFTER, "those without a selected token after it"),
    ),
)
REASON = Label(
    "reason", tuple(LabelValue(name, _BYPASS_MEANINGS[c], columns=(c,)) for name, c in BYPASS_REASONS.items())
)
_PATH_MEANINGS = {
    RemapPath.GROUPED: "a leader's conversion, for its whole index group",
    RemapPath.MEMO: "a follower's read of its leader's conversion; nothing is converted",
    RemapPath.PER_LAYER: "a layer's own conversion: `remap.grouped` is off, or it shares its top-k with no other layer",
    RemapPath.FALLBACK: "a layer's own conversion, because its leader's could not be used; the log says why",
}
_INVALID_MEANINGS = {
    RemapCounter.INVALID_TOKEN: "a negative index other than -1",
    RemapCounter.INVALID_REQUEST: "the row's request is not in the block table",
    RemapCounter.INVALID_BLOCK: "the token lies beyond the block table's last column",
    RemapCounter.INVALID_PAGE: "the block table names no block of the KV pool there",
    RemapCounter.OVERFLOW: "the row of the KV pool does not fit 32 bits",
}
PATH = Label("path", tuple(_column(path, meaning) for path, meaning in _PATH_MEANINGS.items()))
INVALID_REASON = Label("reason", tuple(_column(reason, meaning) for reason, meaning in _INVALID_MEANINGS.items()))
STATE = Label("reason", tuple(LabelValue(state, meaning) for state, meaning in _STATE_MEANINGS.items()))

_SAMPLE = "in the rows that placement before_topk computes both ways"

POLICY_ROWS = Metric(
    "kvplugin_policy_rows_total",
    MetricType.COUNTER,
    "Rows of the top-k buffer, once per index group, by what the policy did with them.",
    (ARM, PHASE, OUTCOME),
    EXACT,
)
POLICY_TOKENS = Metric(
    "kvplugin_policy_tokens_total",
    MetricType.COUNTER,
    "Tokens of the rows that were not bypassed, by what became of them.",
    (ARM, PHASE, KIND),
    EXACT,
)
POLICY_BYPASS = Metric(
    "kvplugin_policy_bypass_total",
    MetricType.COUNTER,
    "Rows that the policy left alone, by reason.",
    (REASON,),
    EXACT,
)
POLICY_SAMPLED_ROWS = Metric(
    "kvplugin_policy_sampled_rows_total",
    MetricType.COUNTER,
    f"As kvplugin_policy_rows_total, {_SAMPLE}.",
    (ARM, PHASE, OUTCOME),
    SAMPLED,
)
POLICY_SAMPLED_TOKENS = Metric(
    "kvplugin_policy_sampled_tokens_total",
    MetricType.COUNTER,
    f"As kvplugin_policy_tokens_total, {_SAMPLE}.",
    (ARM, PHASE, KIND),
    SAMPLED,
)
REMAP_CONVERSIONS = Metric(
    "kvplugin_remap_conversions_total",
    MetricType.COUNTER,
    "Layers in all steps, by how they came by their physical indices; all but memo are conversions.",
    (PATH,),
    REMAP_PATHS,
)
REMAP_INVALID_SLOTS = Metric(
    "kvplugin_remap_invalid_total",
    MetricType.COUNTER,
    "Slots in all conversions that hold an index without a row in the KV pool, by the first reason; 0 in good health.",
    (INVALID_REASON,),
    REMAP_INVALID,
)
ACTIVE_STATE = Metric(
    "kvplugin_active",
    MetricType.GAUGE,
    "1 where the policy's hook is in place, 0 where it is not; only the reason that holds has a series.",
    (STATE,),
)
BUILD_INFO = Metric(
    "kvplugin_build_info",
    MetricType.GAUGE,
    "Always 1; the labels say what is installed.",
    (Label("version"), Label("vllm_version"), Label("torch_version")),
)

METRICS = (
    POLICY_ROWS,
    POLICY_TOKENS,
    POLICY_BYPASS,
    POLICY_SAMPLED_ROWS,
    POLICY_SAMPLED_TOKENS,
    REMAP_CONVERSIONS,
    REMAP_INVALID_SLOTS,
    ACTIVE_STATE,
    BUILD_INFO,
)

if __name__ == "__main__":
    from kvplugin.metrics.page import render_page

    print(render_page(), end="")
