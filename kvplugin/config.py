"""Everything an operator may set: one frozen pydantic tree, validated once, with the defaults in this file only."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from kvplugin.errors import ConfigError, ConfigProblem

ROOT_KEY = "kvplugin"
LARGEST_COUNT = 2**31 - 1
MOST_ARMS = 16
"""Arms of a rollout, and rows of a table of policies."""
LONGEST_QUOTE = 120
"""Characters of a wrong value that a message repeats."""


class Mode(StrEnum):
    """What the policy does with a row (DESIGN: modes)."""

    DISABLED = "disabled"
    OBSERVE = "observe"
    SPARSE_MERGE = "topology_sparse_merge"
    COMPRESS_SPARSE = "topology_compress_sparse"
    ONLY = "topology_only"

    @property
    def merges(self) -> bool:
        """True where the selection is the structural set joined with the best learned tokens."""
        return self in (Mode.SPARSE_MERGE, Mode.COMPRESS_SPARSE)

    @property
    def selects(self) -> bool:
        """True where a row may come to attend to other tokens than the indexer chose."""
        return self.merges or self is Mode.ONLY


class Witness(StrEnum):
    """How the tokens that stand for the middle of the context are chosen."""

    UNIFORM = "uniform"
    DRIFT = "drift"
    COVERAGE = "coverage"


class Eviction(StrEnum):
    """Which learned tokens leave when structure needs their slots."""

    LOWEST_SCORE = "lowest_score"
    NONE = "none"
    OLDEST = "oldest"
    INPUT_ORDER = "input_order"


class Fill(StrEnum):
    """What ``topology_only`` does with slots that the structural set leaves free."""

    LOCAL = "local"
    NONE = "none"


class MismatchAction(StrEnum):
    """What happens to a row that holds learned indices outside its valid interval."""

    FALLBACK = "fallback"
    DROP = "drop"
    RAISE = "raise"


class Phase(StrEnum):
    """Phase of a row: ``prefill`` while its position lies inside the prompt, ``decode`` after it."""

    PREFILL = "prefill"
    DECODE = "decode"


class Placement(StrEnum):
    """Where the policy acts: on the top-k's result, or on the scores it reads."""

    AFTER_TOPK = "after_topk"
    BEFORE_TOPK = "before_topk"


def choice(enum: type[StrEnum]) -> BeforeValidator:
    """The one strip + lower validator behind every enum field."""

    def parse(value: object) -> object:
        if isinstance(value, enum):
            return value
        choices = [member.value for member in enum]
        text = value.strip().lower() if isinstance(value, str) else None
        if text in choices:
            return enum(text)
        near = difflib.get_close_matches(text or "", choices, n=1, cutoff=0.5)
        raise PydanticCustomError(
            "choice",
            "{found} is unknown; use {choices}{hint}",
            {
                "found": repr(value),
                "choices": ", ".join(choices),
                "hint": f"; did you mean {near[0]!r}?" if near else "",
            },
        )

    return BeforeValidator(parse)


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("count", "{found} is not a count; use a whole number", {"found": repr(value)})
    return value


def _auto_or_count(value: object) -> object:
    """Settle the choice here: pydantic would name both branches of the union in its message."""
    if isinstance(value, str):
        text = value.strip().lower()
        value = int(text) if text.isdecimal() else text
    if value in ("auto", None) or (type(value) is int and 0 <= value <= LARGEST_COUNT):
        return value
    raise PydanticCustomError(
        "count", "{found} is not a count; use auto or a whole number of at least 0", {"found": repr(value)}
    )


def _split(value: object) -> object:
    """Accept ``prefill,decode`` from a command line beside a YAML list; a repeated phase counts once."""
    parts = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    return list(dict.fromkeys(parts)) if isinstance(parts, (list, tuple)) and _all_text(parts) else parts


def _all_text(values: Sequence[object]) -> bool:
    return all(isinstance(value, str) for value in values)


Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=LARGEST_COUNT)]
Limit = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=2**62)] | None
PhaseChoice = Annotated[Phase, choice(Phase)]


Conflict = tuple[str, str, str]
"""Key (relative to the model that finds it), what was found, and the cure."""


_Model = TypeVar("_Model", bound=BaseModel)


def refuse(model: _Model, conflicts: Iterator[Conflict]) -> _Model:
    """The model, or in a validator of it an error that :func:`validated` takes apart again, one problem a conflict."""
    found = tuple(conflicts)
    if found:
        text = "; ".join(f"{key}: {what}; {cure}" for key, what, cure in found)
        raise PydanticCustomError("conflict", "{text}", {"text": text, "conflicts": found})
    return model


class Settings(BaseModel):
    """Base of everything an operator may set."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Limits(Settings):
    """Rows and calls beyond a limit are left as they are, counted, and warned about once."""

    max_row_length: Limit = None
    """Longest row, in KV tokens, that the policy touches; null = no limit."""
    max_rows: Limit = None
    """Most rows in one call; null = no limit."""
    max_elements: Limit = None
    """Most index slots (rows x width) in one call; null = no limit."""
    max_width: Limit = 8192
    """Widest top-k buffer, in slots; null = no limit."""


class PolicyConfig(Settings):
    """One topology policy: which tokens a row attends to inside its top-k budget."""

    mode: Annotated[Mode, choice(Mode)] = Mode.DISABLED
    """What the policy does with a row."""
    sink_tokens: Count | None = 4
    """Attention sinks: the first tokens of the request, in tokens."""
    sink_blocks: Count | None = None
    """Attention sinks in blocks of `block_size`, instead of `sink_tokens`."""
    local_tokens: Annotated[Literal["auto"] | Count | None, BeforeValidator(_auto_or_count)] = "auto"
    """Local window: the last tokens of the row, in tokens; `auto` = what the structural cap leaves, at most 64."""
    local_blocks: Count | None = None
    """Local window in blocks of `block_size`, counted from the row's last block, instead of `local_tokens`."""
    witness_blocks: Count = 0
    """Blocks that stand for the middle of the context (`uniform` and `drift`)."""
    witness: Annotated[Witness, choice(Witness)] = Witness.UNIFORM
    """How witnesses are chosen; `drift` needs block scores and is for library use."""
    coverage_segments: Count = 0
    """Segments of the context that each keep a selected token (`coverage` only)."""
    block_size: Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=65536)] = 64
    """Tokens per policy block."""
    max_structural_fraction: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.25
    """Largest share of the top-k budget that structure may take."""
    eviction: Annotated[Eviction, choice(Eviction)] = Eviction.LOWEST_SCORE
    """Which learned tokens leave; anything but `lowest_score` costs accuracy."""
    fill: Annotated[Fill, choice(Fill)] = Fill.LOCAL
    """`topology_only`: fill free slots from the local window backwards, or leave them empty."""
    coordinate_mismatch: Annotated[MismatchAction, choice(MismatchAction)] = MismatchAction.FALLBACK
    """What happens to a row that holds learned indices outside its valid interval."""
    check_duplicates: bool = False
    """Debugging aid: count a repeated learned index as bad input."""
    phases: Annotated[tuple[PhaseChoice, ...], BeforeValidator(_split), Field(min_length=1)] = tuple(Phase)
    """Phases in which the policy acts."""
    limits: Limits = Limits()
    """Bounds beyond which rows are bypassed."""

    @model_validator(mode="before")
    @classmethod
    def _blocks_replace_tokens(cls, data: Any) -> Any:
        """A window given in blocks takes the place of the default that is in tokens."""
        if not isinstance(data, Mapping):
            return data
        given = dict(data)
        for kind in ("sink", "local"):
            if given.get(f"{kind}_blocks") is not None:
                given.setdefault(f"{kind}_tokens", None)
        return given

    @model_validator(mode="after")
    def _rules(self) -> Self:
        return refuse(self, policy_conflicts(self))


def policy_conflicts(policy: PolicyConfig) -> Iterator[Conflict]:
    """Yield (key, found, cure) for every pair of settings that cannot stand together."""
    for kind in ("sink", "local"):
        tokens, blocks = getattr(policy, f"{kind}_tokens"), getattr(policy, f"{kind}_blocks")
        if tokens is not None and blocks is not None:
            yield f"{kind}_blocks", f"{blocks} given beside {kind}_tokens = {tokens}", "give one of the two"
        if tokens is None and blocks is None:
            yield f"{kind}_tokens", "null without blocks", f"give a number, or {kind}_blocks"
    if policy.witness is Witness.COVERAGE:
        if policy.coverage_segments == 0:
            yield "coverage_segments", "0 with witness = coverage", "give at least 1 segment"
        if policy.eviction is not Eviction.LOWEST_SCORE:
            yield "eviction", f"'{policy.eviction}' with witness = coverage", "use lowest_score"
    elif policy.coverage_segments:
        yield (
            "coverage_segments",
            f"{policy.coverage_segments} with witness = {policy.witness}",
            "use witness = coverage, or 0",
        )
    if policy.mode is Mode.ONLY and not _has_structure(policy):
        yield (
            "mode",
            "'topology_only' with no sink, local or witness tokens",
            "give at least one; rows would attend to nothing",
        )
    if policy.fill is Fill.NONE and policy.mode is not Mode.ONLY:
        yield "fill", f"'none' with mode = {policy.mode}", "use local; only topology_only may leave slots empty"


def _has_structure(policy: PolicyConfig) -> bool:
    return any(
        (
            policy.sink_tokens,
            policy.sink_blocks,
            policy.local_tokens,
            policy.local_blocks,
            policy.witness_blocks,
            policy.coverage_segments,
        )
    )


class RemapConfig(Settings):
    """Translation of the selected tokens into rows of the KV pool."""

    grouped: bool = True
    """Translate once for all layers that share a top-k; `false` translates for each layer, with the same result."""


class MetricsConfig(Settings):
    """Export of the plugin's counters."""

    enabled: bool = True
    """Export counters to Prometheus."""
    sample_every: Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=2**20)] = 64
    """`before_topk`: one row in this many is also computed without the lift, for the sampled counters."""
    signals_every: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=2**20)] = 64
    """One row in this many is looked at for the signals of the indexer's health; 0 = none."""


class KvpluginConfig(Settings):
    """The whole configuration, as found under `kvplugin` in vLLM's additional config."""

    policy: PolicyConfig = PolicyConfig()
    """The topology policy."""
    placement: Annotated[Placement, choice(Placement)] = Placement.AFTER_TOPK
    """Where the policy acts; `before_topk` lifts the scores of structural tokens before the top-k kernel."""
    remap: RemapConfig = RemapConfig()
    """How selected tokens become rows of the KV pool."""
    metrics: MetricsConfig = MetricsConfig()
    """Export of the plugin's counters."""
    rollout: Annotated[str, Field(min_length=1)] | None = None
    """Path of a rollout file, which gives arms and their policies in the place of `policy`; see docs/ab.md."""
    rollout_state: Annotated[str, Field(min_length=1)] | None = None
    """Path of the runtime override that stands over the rollout file; null = one per rollout file, under
    `KVPLUGIN_STATE_DIR`, else the user's state directory."""
    rollout_writable: bool = True
    """Whether `PUT /v1/kvplugin/rollout` may change the override, where that endpoint is loaded."""

    @model_validator(mode="after")
    def _rules(self) -> Self:
        return refuse(self, _engine_conflicts(self))


def _engine_conflicts(config: KvpluginConfig) -> Iterator[Conflict]:
    if config.rollout is not None and config.policy != PolicyConfig():
        yield "policy", "given beside a rollout", "give each arm of the rollout its policy, or drop rollout"
    if config.rollout is None and config.rollout_state is not None:
        yield "rollout_state", "given without a rollout", "give rollout, or drop rollout_state"
    if config.placement is Placement.BEFORE_TOPK and config.rollout is None:
        for key, found, cure in before_topk_conflicts(config.policy):
            yield f"policy.{key}", found, cure


def before_topk_conflicts(policy: PolicyConfig) -> Iterator[Conflict]:
    """Yield (key, found, cure) for what `before_topk` cannot do: it only lifts a closed-form set of scores."""
    with_placement = "with placement = before_topk"
    if not policy.mode.merges:
        yield (
            "mode",
            f"'{policy.mode}' {with_placement}",
            "use topology_sparse_merge or topology_compress_sparse, or placement = after_topk",
        )
    if policy.eviction is not Eviction.LOWEST_SCORE:
        yield (
            "eviction",
            f"'{policy.eviction}' {with_placement}",
            "use lowest_score, or placement = after_topk",
        )
    if policy.witness is not Witness.UNIFORM:
        yield (
            "witness",
            f"'{policy.witness}' {with_placement}",
            "use uniform, or placement = after_topk",
        )


def load_config(raw: Mapping[str, Any]) -> KvpluginConfig:
    """Validate the mapping found under ``kvplugin``.

    Raises:
        ConfigError: listing every wrong key or value, each with the valid ones.
    """
    return validated(KvpluginConfig, raw, ROOT_KEY, "policy.mode")


def validated(model: type[_Model], raw: Any, root: str, example: str) -> _Model:
    """Validate a mapping that an operator wrote.

    Args:
        model: what it should be.
        raw: what it is.
        root: what its keys are named after in messages.
        example: a key for one who gave no mapping at all.

    Raises:
        ConfigError: listing every wrong key or value, each with the valid ones.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError([ConfigProblem(root, f"{_shortened(raw)} is not a mapping", f"give keys such as {example}")])
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise ConfigError([problem for each in details for problem in _problems(model, root, each)]) from None


def _problems(model: type[BaseModel], root: str, details: ErrorDetails) -> list[ConfigProblem]:
    location = [str(part) for part in details["loc"] if part != "[key]"]
    context: dict[str, Any] = details.get("ctx", {})
    key = ".".join([root, *location])
    if details["type"] == "conflict":
        return [ConfigProblem(f"{key}.{name}", found, cure) for name, found, cure in context["conflicts"]]
    if details["type"] == "extra_forbidden":
        valid = list(_model_at(model, location[:-1]).model_fields)
        near = difflib.get_close_matches(location[-1], valid, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return [ConfigProblem(key, "unknown key", f"use {', '.join(valid)}{hint}")]
    if details["type"] in ("choice", "count"):
        found, _, cure = details["msg"].partition("; ")
        return [ConfigProblem(key, found, cure)]
    reason = details["msg"][0].lower() + details["msg"][1:]
    return [ConfigProblem(key, f"{_shortened(details['input'])} is not valid", reason)]


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"


def _model_at(model: type[BaseModel], location: list[str]) -> type[BaseModel]:
    """The model that a location leads to, through fields and through the values of mappings."""
    kind: Any = model
    for name in location:
        kind = kind.model_fields[name].annotation if _is_model(kind) else get_args(kind)[-1]
    assert _is_model(kind)
    found: type[BaseModel] = kind
    return found


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
