"""Decode replay: does decode match prefill, and where does it stop matching? Needs torch and pydantic, no engine."""

from kvplugin.replay.capture.floor import with_floor
from kvplugin.replay.capture.read import read_capture
from kvplugin.replay.capture.records import Capture, FreshCache, Indexer, Record
from kvplugin.replay.capture.write import CaptureWriter, write_capture
from kvplugin.replay.compare import Comparison, compare
from kvplugin.replay.compute import Replayed, decode_replay
from kvplugin.replay.drift import Drift
from kvplugin.replay.errors import CaptureFileError, IdentityError, MissingExtra
from kvplugin.replay.fingerprint import content_fingerprint, execution_fingerprint, prefix_fingerprint
from kvplugin.replay.inputs import (
    CompareSettings,
    ContextParallel,
    Floor,
    LogProbHead,
    LseBase,
    Observed,
    PrefixIdentity,
    ReplayInputs,
)
from kvplugin.replay.merge import merge_groups, merge_states
from kvplugin.replay.oracle import MergeOracle, transformer_engine_oracle
from kvplugin.replay.pages import KVPool, PageFormat, decode_fp8_ds_mla, paged
from kvplugin.replay.reconstruct import append, logical_slots, reconstruct, slot_positions
from kvplugin.replay.reference import Attention, full_prefill
from kvplugin.replay.report import CaptureReport, ComparisonReport, Stage, Status
from kvplugin.replay.rope import RopeLayout, RopeRecord, RopeState, rotate
from kvplugin.replay.stages.capture_report import replay_capture
from kvplugin.replay.validate import validate

__all__ = [
    "Attention",
    "Capture",
    "CaptureFileError",
    "CaptureReport",
    "CaptureWriter",
    "CompareSettings",
    "Comparison",
    "ComparisonReport",
    "ContextParallel",
    "Drift",
    "Floor",
    "FreshCache",
    "IdentityError",
    "Indexer",
    "KVPool",
    "LogProbHead",
    "LseBase",
    "MergeOracle",
    "MissingExtra",
    "Observed",
    "PageFormat",
    "PrefixIdentity",
    "Record",
    "ReplayInputs",
    "Replayed",
    "RopeLayout",
    "RopeRecord",
    "RopeState",
    "Stage",
    "Status",
    "append",
    "compare",
    "content_fingerprint",
    "decode_fp8_ds_mla",
    "decode_replay",
    "execution_fingerprint",
    "full_prefill",
    "logical_slots",
    "merge_groups",
    "merge_states",
    "paged",
    "prefix_fingerprint",
    "read_capture",
    "reconstruct",
    "replay_capture",
    "rotate",
    "slot_positions",
    "transformer_engine_oracle",
    "validate",
    "with_floor",
    "write_capture",
]
