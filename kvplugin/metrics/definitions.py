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
from kvplugin.requests.fingerprint import Fingerprint
from kvplugin.requests.keys import RequestKey
from kvplugin.requests.sessions import Standing
from kvplugin.topology.counters import BYPASS_REASONS, PHASE_ROWS, Counter
from kvplugin.topology.prefix import PrefixCounter
from kvplugin.topology.signals import BOUNDS, UNIT, Signal, SignalColumn, columns_of

EXACT = Buffer("exact", len(PHASE_ROWS), Counter, per_arm=True)
"""What the policy did, row 0 prefill and row 1 decode."""
SAMPLED = Buffer("sampled", len(PHASE_ROWS), Counter, per_arm=True)
"""As :data:`EXACT`, over the rows that ``before_topk`` samples."""
PREFIX = Buffer("prefix", len(PHASE_ROWS), PrefixCounter, per_arm=True)
"""What rows see of their request's stable prefix."""
SIGNALS = Buffer("signals", len(PHASE_ROWS), SignalColumn, per_arm=True)
"""How healthy the indexer's selections are, from sampled rows."""
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
    PRIVATE_INDEXER = "private_indexer"
    NO_SCORES = "no_scores"
    HISPARSE = "hisparse"
    NOT_REPORTED = "not_reported"


OTHER = "other"
"""Label value for whatever is not listed."""


@unique
class ArmChoice(StrEnum):
    """What decided a request's arm."""

    EXPLICIT = "explicit"
    SESSION = "session"
    REQUEST = "request"


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
    InactiveReason.UNSUPPORTED_PLATFORM: "the platform is neither vLLM's CUDA nor its CPU one (log and doctor only)",
    InactiveReason.UNSUPPORTED_VLLM: "this vLLM lacks a point the hook needs (log and doctor only)",
    InactiveReason.SELF_TEST_FAILED: "the hook is in place and the self-test did not see it fire",
    InactiveReason.PRIVATE_INDEXER: "the model brings an indexer of its own, which the hook does not reach",
    InactiveReason.NO_SCORES: "context parallelism splits a row's scores: use `placement: before_topk`",
    InactiveReason.HISPARSE: "HiSparse keeps the KV cache on the host and has a top-k path of its own",
    InactiveReason.NOT_REPORTED: "the engine is up and no worker has said how it went",
}

DEFAULT_ARM = "default"
ARM = Label(
    "arm", meaning=f"The arms of the rollout that are, or were, in force; without a rollout `{DEFAULT_ARM}` alone."
)
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
_FIELD_MEANINGS = {
    "scaffold": "`kvplugin_scaffold`",
    "contract": "`kvplugin_contract`",
    "scaffold_tokens": "the tokens themselves, or how many",
    "model": "the model",
    "dtype": "its activations' dtype",
    "block_size": "tokens per policy block",
    "cache_layout": "dtype and block size of the KV cache",
}
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
PREFIX_KIND = Label(
    "kind",
    (
        _column(PrefixCounter.VISIBLE, "tokens of the stable prefix that the row sees"),
        _column(PrefixCounter.UNSELECTED, "those that it does not attend to"),
    ),
)
_SIGNAL_MEANINGS = {
    Signal.SINK_HIT: "sinks that were learned anyway, of those there are",
    Signal.LOCAL_HIT: "local-window tokens that were learned anyway, of those there are",
    Signal.WITNESS_HIT: "witness tokens that were learned anyway, of those there are",
    Signal.EVICTED_SHARE: "positive scores of learned tokens that leave for structure, of those of all learned tokens",
    Signal.EVICTION_MARGIN: "lowest score that stays less highest one that leaves, by the range of the learned scores",
    Signal.STEP_OVERLAP: "learned in this step and the one before, of those learned in either",
    Signal.LEADER_OVERLAP: "learned by this indexer and the one before it, of those learned by either",
    Signal.VALID_DEFICIT: "slots without a valid token, of those that could have one",
    Signal.INVALID_SHARE: "slots that hold neither -1 nor a token of the row, of all slots",
}
SIGNAL = Label(
    "signal",
    tuple(
        LabelValue(signal.name.lower(), meaning, columns=columns_of(signal))
        for signal, meaning in _SIGNAL_MEANINGS.items()
    ),
)
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
POLICY_PREFIX_ROWS = Metric(
    "kvplugin_policy_prefix_rows_total",
    MetricType.COUNTER,
    "Rows of mode topology_compress_sparse whose request has a stable prefix, once per index group.",
    (ARM, PHASE),
    PREFIX,
    (PrefixCounter.ROWS,),
)
POLICY_PREFIX_TOKENS = Metric(
    "kvplugin_policy_prefix_tokens_total",
    MetricType.COUNTER,
    "Tokens of stable prefixes, once per such row and index group: a token counts again for each row that sees it.",
    (ARM, PHASE, PREFIX_KIND),
    PREFIX,
)
POLICY_SIGNAL = Metric(
    "kvplugin_policy_signal_ratio",
    MetricType.HISTOGRAM,
    "Signs of the indexer's health, from 0 to 1, in sampled rows before the policy: metrics.signals_every.",
    (ARM, PHASE, SIGNAL),
    SIGNALS,
    buckets=BOUNDS,
    unit=1 / UNIT,
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

CHOICE = Label(
    "choice",
    (
        LabelValue(ArmChoice.EXPLICIT, "the request names its arm"),
        LabelValue(ArmChoice.SESSION, "hash of its session"),
        LabelValue(ArmChoice.REQUEST, "hash of its request id"),
    ),
)
FINISH = Label(
    "reason",
    (
        LabelValue("stop", "a stop token or string"),
        LabelValue("length", "the token limit"),
        LabelValue("abort", "the client went away"),
        LabelValue("error", "the engine failed on it"),
        LabelValue("repetition", "it repeated itself"),
        LabelValue(OTHER, "any other"),
    ),
)
ERROR_KEY = Label(
    "key", (*(LabelValue(key, "its value is no good") for key in RequestKey), LabelValue(OTHER, "no key of the plugin"))
)
PROCESS = Label(
    "process",
    (LabelValue("frontend", "where requests are given their arms"), LabelValue("engine", "where steps are scheduled")),
)
STANDING = Label(
    "result",
    (
        LabelValue(Standing.HIT, "the session's last prompt had the same"),
        LabelValue(Standing.MISS, "the session is new, or was forgotten"),
        LabelValue(Standing.INVALIDATED, "the session's last prompt had another"),
    ),
)
FINGERPRINT_FIELD = Label("field", tuple(LabelValue(name, _FIELD_MEANINGS[name]) for name in Fingerprint._fields))

REQUESTS = Metric(
    "kvplugin_requests_total",
    MetricType.COUNTER,
    "Requests that were given an arm, by what decided it.",
    (ARM, CHOICE),
)
REQUEST_ERRORS = Metric(
    "kvplugin_request_errors_total",
    MetricType.COUNTER,
    "Requests that were refused for one of the plugin's keys. HTTP requests are checked twice and refused once.",
    (ERROR_KEY,),
)
REQUEST_PROMPT_TOKENS = Metric(
    "kvplugin_request_prompt_tokens_total",
    MetricType.COUNTER,
    "Prompt tokens of requests, counted when they enter the engine.",
    (ARM,),
)
REQUEST_GENERATION_TOKENS = Metric(
    "kvplugin_request_generation_tokens_total", MetricType.COUNTER, "Tokens put out, as they are put out.", (ARM,)
)
REQUEST_FINISHED = Metric(
    "kvplugin_request_finished_total", MetricType.COUNTER, "Requests that ended, by reason.", (ARM, FINISH)
)
REQUEST_TTFT = Metric(
    "kvplugin_request_ttft_seconds",
    MetricType.HISTOGRAM,
    "From a request's arrival to its first token.",
    (ARM,),
    buckets=(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
)
REQUEST_INTER_TOKEN = Metric(
    "kvplugin_request_inter_token_seconds",
    MetricType.HISTOGRAM,
    "Between two tokens of a request; tokens that come together share the time since the ones before.",
    (ARM,),
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5),
)
REQUEST_E2E = Metric(
    "kvplugin_request_e2e_seconds",
    MetricType.HISTOGRAM,
    "From a request's arrival to its end.",
    (ARM,),
    buckets=(0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920),
)
ROLLOUT_GENERATION = Metric(
    "kvplugin_rollout_generation",
    MetricType.GAUGE,
    "How often the rollout in force has changed since the engine started, and 1.",
    (),
)
ROLLOUT_ENABLED = Metric("kvplugin_rollout_enabled", MetricType.GAUGE, "0 while the kill switch is pulled, else 1.", ())
ROLLOUT_SHARE = Metric(
    "kvplugin_rollout_share", MetricType.GAUGE, "Fraction of the traffic that is to go to an arm.", (ARM,)
)
ROLLOUT_RELOAD_FAILURES = Metric(
    "kvplugin_rollout_reload_failures_total",
    MetricType.COUNTER,
    "Times that the rollout file or the override turned bad; the last good one stayed in force.",
    (PROCESS,),
)
GUARD_TRIPPED = Metric(
    "kvplugin_guard_tripped",
    MetricType.GAUGE,
    "1 while the guard has taken an arm's policy away, else 0; kvplugin rollout rearm gives it back.",
    (ARM,),
)
GUARD_TRIPS = Metric(
    "kvplugin_guard_trips_total",
    MetricType.COUNTER,
    "Times that the guard took an arm's policy away, by the signal that told it to.",
    (ARM, SIGNAL),
)
GUARD_FAILURES = Metric(
    "kvplugin_guard_failures_total",
    MetricType.COUNTER,
    "Times that the guard could not take an arm's policy away, because the override cannot be written.",
    (ARM,),
)
FINGERPRINTS = Metric(
    "kvplugin_fingerprints_total",
    MetricType.COUNTER,
    "Requests of a session, by how their prompt's stable part stands to the last one's.",
    (STANDING,),
)
FINGERPRINT_INVALIDATIONS = Metric(
    "kvplugin_fingerprint_invalidations_total",
    MetricType.COUNTER,
    "Fields that differed in invalidated fingerprints.",
    (FINGERPRINT_FIELD,),
)

ENGINE_METRICS = (
    POLICY_ROWS,
    POLICY_TOKENS,
    POLICY_BYPASS,
    POLICY_SAMPLED_ROWS,
    POLICY_SAMPLED_TOKENS,
    POLICY_PREFIX_ROWS,
    POLICY_PREFIX_TOKENS,
    POLICY_SIGNAL,
    REMAP_CONVERSIONS,
    REMAP_INVALID_SLOTS,
)
"""Counted on the engine's device, or beside it."""
FRONT_END_METRICS = (
    REQUESTS,
    REQUEST_ERRORS,
    REQUEST_PROMPT_TOKENS,
    REQUEST_GENERATION_TOKENS,
    REQUEST_FINISHED,
    REQUEST_TTFT,
    REQUEST_INTER_TOKEN,
    REQUEST_E2E,
    ROLLOUT_RELOAD_FAILURES,
)
"""Kept by each front-end process."""
ROLLOUT_METRICS = (
    ROLLOUT_GENERATION,
    ROLLOUT_ENABLED,
    ROLLOUT_SHARE,
    ROLLOUT_RELOAD_FAILURES,
    GUARD_TRIPPED,
    FINGERPRINTS,
    FINGERPRINT_INVALIDATIONS,
)
"""Kept by each engine core."""
GUARD_METRICS = (GUARD_TRIPS, GUARD_FAILURES)
"""Kept by each worker that exports counters."""
METRICS = tuple(
    dict.fromkeys((*ENGINE_METRICS, *FRONT_END_METRICS, *ROLLOUT_METRICS, *GUARD_METRICS, ACTIVE_STATE, BUILD_INFO))
)

if __name__ == "__main__":
    from kvplugin.metrics.page import render_page

    print(render_page(), end="")
