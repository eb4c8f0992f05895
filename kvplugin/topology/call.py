"""One checked call of the policy: the tensors every implementation receives, shapes and dtypes already verified."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvplugin.topology.params import PolicyParams


class PolicyCall(NamedTuple):
    """Arguments of one ``apply_into`` call: one policy for all rows. Shapes, dtypes and devices can be trusted, values
    can *not*.

    Attributes:
        topk: int32 or int64 ``[T, K]``, rewritten in place; any strides.
        row_lengths: int32 or int64 ``[T]``; L < 0 marks a row to leave alone.
        row_live: bool ``[T]`` or None (all live).
        row_phase: int8 ``[T]`` (0 prefill, 1 decode) or None (all decode); other values count as decode.
        offsets: int32 or int64 ``[T]`` or None (all 0); learned values are absolute, ``offset + token``.
        scores: float32, bfloat16 or float16 ``[T, N]`` or None; ``scores[t, score_start[t] + token]``.
        score_start: int32 or int64 ``[T]`` or None (all 0).
        witness_scores: float32 or float64 ``[T, B]`` or None, one score per policy block (drift witnesses).
        params: the policy, lowered for width K.
        counters: int64 ``[2, len(Counter)]``, added to.
        error: int64 ``[4]`` = (row + 1, value, low, high) of a coordinate mismatch, or None: of the first one, where
            rows have an order. Only written while ``error[0] == 0`` and ``params.mismatch`` is RAISE.
    """

    topk: Tensor
    row_lengths: Tensor
    row_live: Tensor | None
    row_phase: Tensor | None
    offsets: Tensor | None
    scores: Tensor | None
    score_start: Tensor | None
    witness_scores: Tensor | None
    params: PolicyParams
    counters: Tensor
    error: Tensor | None


class LiftCall(NamedTuple):
    """Arguments of one ``lift_into`` call: raise the scores of structural tokens to +inf, in place.

    ``scores`` is float32, bfloat16 or float16 ``[T, N]``; the other fields are as in :class:`PolicyCall`.

    Attributes:
        ranks, rank, interleave: rank ``(token // interleave) % ranks`` has the scores of a token, side by side, and
            this is ``rank``; lengths and structure are those of the whole row.
    """

    scores: Tensor
    row_lengths: Tensor
    row_live: Tensor | None
    row_phase: Tensor | None
    score_start: Tensor | None
    params: PolicyParams
    ranks: int = 1
    rank: int = 0
    interleave: int = 1


class ArmsCall(NamedTuple):
    """A call whose rows follow the policies of several arms.

    Attributes:
        topk ... witness_scores, error: as in :class:`PolicyCall`.
        row_arm: int32 ``[T]``, row of ``policies`` for each row, or None (all 0); rows of an unknown arm are bypassed.
        policies, enabled, listed_witnesses: of a :class:`kvplugin.topology.table.PolicyTable`.
        counters: int64 ``[stripes, arms, 2, len(Counter)]``, added to.
    """

    topk: Tensor
    row_lengths: Tensor
    row_live: Tensor | None
    row_phase: Tensor | None
    row_arm: Tensor | None
    offsets: Tensor | None
    scores: Tensor | None
    score_start: Tensor | None
    witness_scores: Tensor | None
    policies: Tensor
    enabled: Tensor
    listed_witnesses: int
    counters: Tensor
    error: Tensor | None


class LiftArmsCall(NamedTuple):
    """A lift whose rows follow the policies of several arms; fields as in :class:`LiftCall` and :class:`ArmsCall`."""

    scores: Tensor
    row_lengths: Tensor
    row_live: Tensor | None
    row_phase: Tensor | None
    row_arm: Tensor | None
    score_start: Tensor | None
    policies: Tensor
    enabled: Tensor
    width: int
    ranks: int = 1
    rank: int = 0
    interleave: int = 1
