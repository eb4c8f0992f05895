"""Hypothesis strategies: shapes, memory layouts, hazard values, policies and scores for the topology policy.

Hypothesis draws what kind of row, score or policy a case has; a seeded generator fills in the numbers, which keeps the
search among kinds and not among digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from policy_cases import Case, Layout
from torch import Tensor

from kvplugin.config import Eviction, Fill, MismatchAction, Mode, PolicyConfig, Witness
from kvplugin.topology import PolicyParams, lower

ROWS = (3, 1)
WIDTHS = (7, 7, 64, 1)
ACTIVE_MODES = (Mode.SPARSE_MERGE, Mode.ONLY, Mode.OBSERVE, Mode.COMPRESS_SPARSE)
MERGE_MODES = tuple(mode for mode in Mode if mode.merges)
SCORE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN_LOGITS_INDEX = 2143289344
"""What a top-k kernel emits as an index when the logits are NaN: the bits of a NaN."""
SPECIAL_SCORES = (math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0)
INT32_MAX = 2**31 - 1


def lengths_for(width: int) -> list[int]:
    """Row lengths around everything that changes with them; those at which tokens leave come up more often."""
    return [3 * width, 3 * width, width + 1, width + 1, width, width - 1, 1, 0, -1, 100_000]


def hazards_for(length: int, dtype: torch.dtype) -> list[int]:
    """Index values that are no token of a row of this length, and that kernels are known to emit."""
    hazards = [-(2**31), -123456, -1, length, NAN_LOGITS_INDEX, INT32_MAX]
    # Cut to 32 bits, these would be tokens 0 and 1.
    return hazards if dtype == torch.int32 else [*hazards, 2**32, 2**32 + 1, -(2**63), 2**63 - 1]


def _mostly(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    """The usual value in four of five draws."""
    return st.sampled_from([*[usual] * (4 * len(others)), *others])


def _structure(draw: st.DrawFn, room: int, block_size: int, witness: Witness) -> dict[str, int]:
    """Windows and witnesses, in tokens or blocks, that take at most ``room`` tokens."""
    sizes = {}
    if witness is Witness.COVERAGE:
        sizes["coverage_segments"] = draw(st.integers(1, room))
        room -= sizes["coverage_segments"]
    else:
        sizes["witness_blocks"] = min(draw(st.integers(0, 3)), room // block_size)
        room -= sizes["witness_blocks"] * block_size
    for kind in ("sink", "local"):
        unit, name = draw(st.sampled_from([(1, "tokens"), (block_size, "blocks")]))
        count = min(draw(st.integers(0, 5)), room // unit)
        sizes[f"{kind}_{name}"] = count
        room -= count * unit
    return sizes


@st.composite
def policies(draw: st.DrawFn, width: int, modes: Sequence[Mode] = ACTIVE_MODES, **fixed: Any) -> PolicyParams:
    """A policy whose structure fits its cap at this width; ``fixed`` settings are not drawn."""
    mode = draw(st.sampled_from(modes))
    fraction = draw(st.sampled_from((1.0, 0.5, 0.25)))
    block_size = draw(st.sampled_from((1, 1, 16, 64)))
    eviction = fixed.get("eviction") or draw(st.sampled_from([Eviction.LOWEST_SCORE] * 3 + list(Eviction)))
    scored = eviction is Eviction.LOWEST_SCORE
    witness = fixed.get("witness") or draw(st.sampled_from([w for w in Witness if scored or w is not Witness.COVERAGE]))
    sizes = _structure(draw, width if mode is Mode.ONLY else max(1, int(width * fraction)), block_size, witness)
    if mode is Mode.ONLY and not any(sizes.values()):
        sizes["local_tokens"] = 1
        sizes.pop("local_blocks", None)
    settings = {
        "mode": mode,
        "max_structural_fraction": fraction,
        "block_size": block_size,
        "eviction": eviction,
        "witness": witness,
        "fill": draw(st.sampled_from(Fill)) if mode is Mode.ONLY else Fill.LOCAL,
        "coordinate_mismatch": draw(st.sampled_from(MismatchAction)),
        "check_duplicates": draw(st.booleans()),
        "phases": draw(_mostly(("prefill", "decode"), ("prefill",), ("decode",))),
        "limits": draw(_mostly({}, {"max_row_length": width}, {"max_rows": 2}, {"max_elements": 64})),
    }
    return lower(PolicyConfig(**(settings | sizes | fixed)), width)


@st.composite
def learned_rows(
    draw: st.DrawFn, width: int, length: int, offset: int, dtype: torch.dtype, hazards: bool, repeats: bool
) -> list[int]:
    """One row of absolute indices: a set of tokens in random slots, among holes; perhaps with a hazard or a repeat."""
    random = Random(draw(st.integers(0, 2**16)))
    visible = max(0, min(length, INT32_MAX))
    most = min(width, visible)
    size = draw(st.sampled_from([most] * 6 + [most // 2, 0]))
    row = [offset + token for token in random.sample(range(visible), size)]
    row += [-1] * (width - size)
    if hazards and draw(st.sampled_from((False, False, True))):
        row[random.randrange(width)] = draw(st.sampled_from(hazards_for(length, dtype)))
    if repeats and draw(st.sampled_from((False, False, True))):
        row[random.randrange(width)] = row[random.randrange(width)]
    random.shuffle(row)
    limit = torch.iinfo(dtype)
    return [min(max(index, limit.min), limit.max) for index in row]


@st.composite
def score_matrices(draw: st.DrawFn, rows: int, columns: int, finite: bool = False) -> Tensor:
    """Scores ``[T, N]``: distinct, tied, all equal, or (unless finite) holding NaN, infinities and both zeros."""
    kind = draw(st.sampled_from(["distinct", "tied", "equal", *([] if finite else ["special"])]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    if kind == "distinct":
        scores = torch.randn(rows, columns, generator=generator)
    elif kind == "tied":
        scores = torch.randint(-2, 3, (rows, columns), generator=generator).float()
    elif kind == "equal":
        scores = torch.zeros(rows, columns)
    else:
        choice = torch.randint(len(SPECIAL_SCORES), (rows, columns), generator=generator)
        scores = torch.tensor(SPECIAL_SCORES)[choice]
    return scores.to(draw(st.sampled_from(SCORE_DTYPES)))


def _optional(draw: st.DrawFn, rows: int, values: Sequence[Any], dtype: torch.dtype) -> Tensor | None:
    if draw(st.booleans()):
        return None
    return torch.tensor(draw(st.lists(st.sampled_from(values), min_size=rows, max_size=rows)), dtype=dtype)


@st.composite
def cases(
    draw: st.DrawFn,
    modes: Sequence[Mode] = ACTIVE_MODES,
    *,
    clean: bool = False,
    finite: bool = False,
    long_rows: bool = True,
    unchecked_repeats: bool = False,
    offsets_given: bool = True,
    **fixed: Any,
) -> Case:
    """A whole call.

    Args:
        modes: modes to draw from.
        clean: rows without bad or repeated indices, and metadata that bypasses no row.
        finite: finite scores only.
        long_rows: include rows of 100 000 tokens.
        offsets_given: draw offsets.
        unchecked_repeats: repeat indices also where the policy does not look for that; it promises little then.
        fixed: settings of the policy that are not drawn.
    """
    rows, width = draw(st.sampled_from(ROWS)), draw(st.sampled_from(WIDTHS))
    index_dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    usual = lengths_for(width) if long_rows else lengths_for(width)[:-1]
    lengths = draw(st.lists(st.sampled_from(usual), min_size=rows, max_size=rows))
    offsets = None
    if offsets_given:
        offsets = _optional(draw, rows, [5, 1000, 0, *([] if clean else [-1, INT32_MAX])], torch.int64)
    starts = _optional(draw, rows, [3, 3, 0, 0, *([] if clean else [-1])], torch.int32)
    missing_columns = 0 if clean else draw(_mostly(0, 1))
    columns = max(0, max([*lengths, 0]) + 3 - missing_columns)
    per_row_offset = [0] * rows if offsets is None else offsets.tolist()
    unlimited = {"phases": ("prefill", "decode"), "limits": {}} if clean else {}
    params = draw(policies(width, modes, **(unlimited | fixed)))
    repeats = not clean and (params.check_duplicates or unchecked_repeats)
    topk = [
        draw(learned_rows(width, length, offset, index_dtype, not clean, repeats))
        for length, offset in zip(lengths, per_row_offset, strict=True)
    ]
    blocks = draw(st.integers(0, 12))
    witness_scores = draw(score_matrices(rows, blocks)).float() if params.witness is Witness.DRIFT else None
    return Case(
        topk=torch.tensor(topk, dtype=index_dtype).reshape(rows, width),
        row_lengths=torch.tensor(lengths, dtype=draw(st.sampled_from((torch.int32, torch.int64)))),
        row_live=_optional(draw, rows, [True] * 4 + [False], torch.bool),
        row_phase=_optional(draw, rows, [0, 1, 2], torch.int8),
        offsets=offsets,
        scores=draw(score_matrices(rows, columns, finite)),
        score_start=starts,
        witness_scores=witness_scores,
        params=params,
        layout=draw(st.sampled_from(Layout)),
    )
