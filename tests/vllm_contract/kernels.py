"""What stands in for compiled kernels: scores that depend on a row and a token alone, and top-k in arbitrary order."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch
from standins import LOG
from torch import Tensor

LONGEST = 1024
"""Tokens of the longest request."""
GARBAGE = (float("nan"), 3.0e38)
"""What lies outside a row's window, by turns: both would win any top-k that looked there."""
CAPABILITIES = (
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_group_gemm_supported",
    "cutlass_scaled_mm_supports_fp4",
)
"""Questions that vLLM asks of its kernels while it is imported; the answer is no."""


class Layout(NamedTuple):
    """How the rows' scores come.

    Attributes:
        dtype: of the scores.
        size, rank, interleave: this rank's tokens among those that share a row.
    """

    dtype: torch.dtype = torch.float32
    size: int = 1
    rank: int = 0
    interleave: int = 1

    def tokens(self, length: int) -> Tensor:
        """The tokens of a row that this rank has scores of, side by side."""
        every = torch.arange(length)
        return every[(every // self.interleave) % self.size == self.rank]


_layout = [Layout()]


def set_layout(layout: Layout) -> None:
    """From now on scores come like this."""
    _layout[0] = layout


@cache
def score_row(key: int, position: int) -> Tensor:
    """float32 ``[LONGEST]``: what the query at ``position`` of request ``key`` gives to each token; no two alike."""
    generator = torch.Generator().manual_seed(key * 65537 + position)
    return torch.randperm(LONGEST, generator=generator).float() / LONGEST - 0.5


def row_scores(key: int, position: int) -> Tensor:
    """The same as the kernels round it."""
    return score_row(key, position).to(_layout[0].dtype).float()


def best(scores: Tensor, count: int) -> list[int]:
    """The ``count`` best of a row, best first; ties go to the lower token."""
    return scores.sort(descending=True, stable=True).indices[:count].tolist()


def identities(keys: list[int], positions: list[int]) -> Tensor:
    """What goes through vLLM as quantised queries: float32 ``[T, 1, 4]`` that says whose row it is."""
    rows = torch.zeros(len(keys), 1, 4)
    rows[:, 0, 0], rows[:, 0, 1] = torch.tensor(keys), torch.tensor(positions)
    return rows


def define() -> None:
    """Define the operators that vLLM's own wrappers call."""
    for name in CAPABILITIES:
        _library.define(f"{name}(int capability) -> bool")
        _library.impl(name, lambda capability: False, "CompositeExplicitAutograd")
    _define(
        "top_k_per_row_prefill",
        "(Tensor logits, Tensor starts, Tensor ends, Tensor(a!) indices, int rows, int s0, int s1, int k) -> ()",
        _topk_prefill,
    )
    _define(
        "top_k_per_row_decode",
        "(Tensor logits, int next_n, Tensor lens, Tensor(a!) indices, int rows, int s0, int s1, int k) -> ()",
        lambda logits, next_n, lens, indices, rows, s0, s1, k: _topk_decode("per row", logits, lens, indices, k),
    )
    for kind in ("cooperative", "persistent"):
        _define(
            f"{kind}_topk",
            "(Tensor logits, Tensor lens, Tensor(a!) indices, Tensor workspace, int k, int max_len) -> ()",
            partial(_topk_of_batch, kind),
        )
    _cache_library.define("cp_gather_indexer_k_quant_cache(Tensor a, Tensor b, Tensor c, Tensor d, Tensor e) -> ()")
    _cache_library.impl("cp_gather_indexer_k_quant_cache", lambda *tensors: None, "CompositeExplicitAutograd")


_library = torch.library.Library("_C", "FRAGMENT")
_cache_library = torch.library.Library("_C_cache_ops", "FRAGMENT")


def _define(name: str, schema: str, implementation: Any) -> None:
    _library.define(name + schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")


def deep_select(logits: Tensor, topk: int, *, end: Tensor, output_idx: Tensor) -> None:
    """For the library of that name, which reads bfloat16."""
    _topk_decode("deep_select", logits, end, output_idx, topk)


def _topk_prefill(logits: Tensor, starts: Tensor, ends: Tensor, indices: Tensor, rows: int, s0: int, s1: int, k: int):
    LOG.append(f"top-k of {rows} prefill rows")
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        _write(indices[row, :k], logits[row, start:end], row)


def _topk_of_batch(
    kind: str, logits: Tensor, lens: Tensor, indices: Tensor, workspace: Tensor, k: int, max_len: int
) -> None:
    _topk_decode(kind, logits, lens, indices, k)


def _topk_decode(kind: str, logits: Tensor, lens: Tensor, indices: Tensor, k: int) -> None:
    LOG.append(f"top-k of {len(logits)} decode rows ({kind})")
    queries = len(logits) // lens.shape[0]
    for row, length in enumerate(_decode_ends(lens, len(logits), queries)):
        _write(indices[row, :k], logits[row, :length], row)


def _decode_ends(lens: Tensor, rows: int, queries: int) -> list[int]:
    if lens.numel() == rows:
        return lens.flatten().tolist()
    return [max(0, length - queries + 1 + query) for length in lens.flatten().tolist() for query in range(queries)]


def _write(out: Tensor, window: Tensor, seed: int) -> None:
    chosen = torch.tensor(best(window.float(), len(out)), dtype=out.dtype)
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed))
    out.fill_(-1)
    out[: len(chosen)] = chosen[order]


def prefill_logits(
    q: Any, kv: Any, weights: Tensor, starts: Tensor, ends: Tensor, longest: int | None = None, **options: Any
) -> Tensor:
    """For DeepGEMM's logits of a prefill chunk; from 0.33 on each row begins at column 0."""
    shifted = longest is None
    width = -(-int(ends.max()) // 4) * 4 + 4
    logits = _garbage(len(starts), width)
    rows = zip(_whose(q), starts.tolist(), ends.tolist(), strict=True)
    for row, (identity, start, end) in enumerate(rows):
        assert identity is not None, "prefill rows are not padded"
        tokens = _layout[0].tokens(identity[1] + 1)
        assert len(tokens) == end - start, f"row {row} sees {end - start} tokens here, expected {len(tokens)}"
        first = start if shifted else 0
        logits[row, first : first + len(tokens)] = score_row(*identity)[tokens].to(logits.dtype)
    return logits


def decode_logits(
    q: Any,
    kv_cache: Tensor,
    weights: Tensor,
    lens: Tensor,
    table: Tensor,
    schedule: Any,
    *,
    max_model_len: int,
    **rest: Any,
) -> Tensor:
    """For DeepGEMM's paged logits. Rows that only pad have scores too, of nobody's."""
    whose = _whose(q)
    logits = _garbage(len(whose), max_model_len)
    for row, length in enumerate(_decode_ends(lens, len(whose), q[0].shape[1])):
        if whose[row] is None:
            logits[row, :length] = torch.rand(length, generator=torch.Generator().manual_seed(row)).to(logits.dtype)
        else:
            tokens = _layout[0].tokens(LONGEST)[:length]
            logits[row, :length] = score_row(*whose[row])[tokens].to(logits.dtype)
    return logits


def _garbage(rows: int, columns: int) -> Tensor:
    return torch.tensor(GARBAGE).repeat(rows, -(-columns // 2))[:, :columns].to(_layout[0].dtype).contiguous()


def _whose(q: Any) -> list[tuple[int, int] | None]:
    rows = q[0].reshape(-1, q[0].shape[-1])[:, :2]
    return [(int(key), int(position)) if key > 0 else None for key, position in rows.tolist()]
