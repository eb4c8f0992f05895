"""The manifest of a capture folder: JSON that names every tensor's file, dtype and shape."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from kvplugin.replay.inputs import LseBase
from kvplugin.replay.pages import PageFormat
from kvplugin.replay.rope import RopeLayout, RopeState

MANIFEST_NAME = "manifest.json"
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.safetensors")
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "int32", "uint8", "bool")
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

LABEL_LENGTH = 200
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Characters that a terminal may take for a command."""
Label = Annotated[str, Field(max_length=LABEL_LENGTH, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
DtypeName = Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]


def label(text: str) -> str:
    """``text`` as a label: cut, and without control characters."""
    return CONTROLS.sub("?", text)[:LABEL_LENGTH]


class Model(BaseModel):
    """Base of the manifest's parts."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Role(StrEnum):
    """What a tensor of a record is; shapes as in ``ReplayInputs`` and ``Record``, with B = 1."""

    Q = "q"
    BLOCK_TABLE = "block_table"
    KV_SEQ_LENS = "kv_seq_lens"
    CACHE_POSITION = "cache_position"
    QUERY_POSITION_IDS = "query_position_ids"
    GLOBAL_TOKEN_POSITIONS = "global_token_positions"
    KEY_POSITION_IDS = "key_position_ids"
    KEYS = "keys"
    VALUES = "values"
    PAGE_IDS = "page_ids"
    BLOCK_OWNERS = "block_owners"
    SELECTION = "selection"
    SELECTION_BEFORE = "selection_before"
    PHYSICAL = "physical"
    OUT = "out"
    LSE = "lse"
    RANK_OUT = "rank_out"
    RANK_LSE = "rank_lse"
    INDEXER_Q = "indexer_q"
    INDEXER_KEYS = "indexer_keys"
    INDEXER_WEIGHTS = "indexer_weights"
    INDEXER_SCORES = "indexer_scores"
    FRESH_KEYS = "fresh_keys"
    FRESH_VALUES = "fresh_values"
    LOG_PROBS = "log_probs"
    REFERENCE_LOG_PROBS = "reference_log_probs"
    HEAD_WEIGHT = "head_weight"
    HEAD_TARGETS = "head_targets"
    HEAD_MASK = "head_mask"


REQUIRED = (
    Role.Q,
    Role.BLOCK_TABLE,
    Role.KV_SEQ_LENS,
    Role.CACHE_POSITION,
    Role.QUERY_POSITION_IDS,
    Role.GLOBAL_TOKEN_POSITIONS,
    Role.KEY_POSITION_IDS,
    Role.KEYS,
)
"""Without these nothing can be replayed."""


class TensorEntry(Model):
    """Where a tensor lies, and what it must be."""

    file: str = Field(description="plain name of a safetensors file in the same folder")
    name: Label = Field(description="its name in that file")
    dtype: DtypeName
    shape: list[Annotated[int, Field(ge=0)]]


class RopeEntry(Model):
    """A RoPE record; see ``RopeRecord``."""

    theta: float
    layout: RopeLayout
    rotary_dim: int
    q_state: RopeState
    k_state: RopeState
    q_dtype: DtypeName
    k_dtype: DtypeName
    cast_before_rotation: bool = False
    rotary_first: bool = Field(default=False, description="rotated elements first, as in DeepSeek's indexer")


class PrefixEntry(Model):
    """A prefix identity; all three fields or none."""

    key: Label | None = None
    length: int | None = None
    fingerprint: Label | None = None


class FloorEntry(Model):
    """A/A floor: the largest differences between two honest runs."""

    out: float = Field(default=0.0, ge=0)
    lse: float = Field(default=0.0, ge=0)
    log_prob: float = Field(default=0.0, ge=0)
    score: float = Field(default=0.0, ge=0)


class RecordEntry(Model):
    """One request, layer and step."""

    request: Label = Field(description="opaque id; never text of the prompt")
    layer: int = Field(ge=0)
    step: int = Field(ge=0)
    tensors: dict[Role, TensorEntry]
    page_format: PageFormat
    latent_dim: int = Field(default=0, ge=0, description="C for MLA")
    scale: float = Field(description="factor of the logits")
    rope: RopeEntry
    indexer_rope: RopeEntry | None = Field(default=None, description="the indexer's own record")
    lse_base: LseBase | None = Field(default=None, description="mandatory with lse or rank_lse")
    cp_world_size: int | None = Field(default=None, description="ranks of decode context parallelism")
    index_group: int | None = Field(default=None, description="leader layer whose selection this layer uses")
    out_dtype: DtypeName | None = None
    prefix: PrefixEntry | None = None
    hidden_size: int = Field(default=1, ge=1)
    backend: Label = "unknown"
    content: Digest | None = Field(default=None, description="content fingerprint at capture")
    chunks: list[Digest] = Field(default_factory=list, description="content fingerprint of each 16 tokens at capture")
    floor: FloorEntry = FloorEntry()


class Manifest(Model):
    """The whole file."""

    format: Literal["kvplugin.replay.capture"] = "kvplugin.replay.capture"
    version: Literal[1] = 1
    kvplugin: Label
    engine: Label
    model: Label
    policy: Label = Field(default="", description="the topology policy in force; empty where nobody has said")
    dropped: int = Field(default=0, ge=0, description="records left out at the size limit")
    records: list[RecordEntry]
