"""Arguments that the public functions refuse, with the exact message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvplugin.config import Eviction, MismatchAction, Mode, PolicyConfig, Witness
from kvplugin.errors import ArgumentError, CoordinateError
from kvplugin.topology import (
    Counter,
    apply_topology_policy,
    lift_structural_scores,
    lower,
    new_counters,
    raise_recorded,
    read_counters,
)

MERGE = PolicyConfig(mode=Mode.SPARSE_MERGE, sink_tokens=1, max_structural_fraction=0.5)
DRIFT = MERGE.model_copy(update={"witness": Witness.DRIFT, "witness_blocks": 1, "block_size": 1})
RAISING = MERGE.model_copy(update={"coordinate_mismatch": MismatchAction.RAISE})


def apply(**changes: Any) -> torch.Tensor:
    """Two rows of four slots, L = 6, with some arguments replaced."""
    arguments: dict[str, Any] = {
        "topk": torch.tensor([[5, 4, 3, 2]] * 2),
        "row_lengths": torch.tensor([6, 6]),
        "config": MERGE,
        "scores": torch.zeros(2, 6),
    } | changes
    return apply_topology_policy(**arguments)


def lift(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "scores": torch.zeros(2, 6),
        "row_lengths": torch.tensor([6, 6]),
        "config": MERGE,
        "width": 4,
    } | changes
    lift_structural_scores(**arguments)


REFUSED = [
    (apply, {"topk": torch.zeros(2, 4)},
     "apply_topology_policy.topk: got float32 [2, 4] on cpu; must be int32 or int64 [T, K] on cpu"),
    (apply, {"topk": torch.zeros(2, 4, dtype=torch.int16)},
     "apply_topology_policy.topk: got int16 [2, 4] on cpu; must be int32 or int64 [T, K] on cpu"),
    (apply, {"topk": torch.zeros(2, 2, 4, dtype=torch.int32)},
     "apply_topology_policy.topk: got int32 [2, 2, 4] on cpu; must be int32 or int64 [T, K] on cpu"),
    (apply, {"topk": torch.zeros(2, 0, dtype=torch.int32)},
     "apply_topology_policy.topk: width 0; a row needs at least one slot"),
    (apply, {"config": lower(MERGE, 8)},
     "apply_topology_policy.config: lowered for width 8, width is 4; lower it for this width"),
    (apply, {"counters": new_counters()[:1]},
     f"apply_topology_policy.counters: got int64 [1, {len(Counter)}] on cpu; must be int64 [2, {len(Counter)}] on cpu"),
    (apply, {"counters": new_counters().int()},
     f"apply_topology_policy.counters: got int32 [2, {len(Counter)}] on cpu; must be int64 [2, {len(Counter)}] on cpu"),
    (apply, {"row_lengths": torch.tensor([6.0, 6.0])},
     "apply_topology_policy.row_lengths: got float32 [2] on cpu; must be int32 or int64 [2] on cpu"),
    (apply, {"row_lengths": torch.tensor([6])},
     "apply_topology_policy.row_lengths: got int64 [1] on cpu; must be int32 or int64 [2] on cpu"),
    (apply, {"row_lengths": torch.tensor([6, 6], device="meta")},
     "apply_topology_policy.row_lengths: got int64 [2] on meta; must be int32 or int64 [2] on cpu"),
    (apply, {"row_live": torch.tensor([1, 1])},
     "apply_topology_policy.row_live: got int64 [2] on cpu; must be bool [2] on cpu"),
    (apply, {"row_phase": torch.tensor([1, 1])},
     "apply_topology_policy.row_phase: got int64 [2] on cpu; must be int8 [2] on cpu"),
    (apply, {"offsets": torch.tensor([[0], [0]])},
     "apply_topology_policy.offsets: got int64 [2, 1] on cpu; must be int32 or int64 [2] on cpu"),
    (apply, {"score_start": torch.tensor([0, 0, 0])},
     "apply_topology_policy.score_start: got int64 [3] on cpu; must be int32 or int64 [2] on cpu"),
    (apply, {"scores": torch.zeros(2, 6, dtype=torch.float64)},
     "apply_topology_policy.scores: got float64 [2, 6] on cpu; must be float32 or bfloat16 or float16 [2, N] on cpu"),
    (apply, {"scores": torch.zeros(3, 6)},
     "apply_topology_policy.scores: got float32 [3, 6] on cpu; must be float32 or bfloat16 or float16 [2, N] on cpu"),
    (apply, {"scores": None},
     "apply_topology_policy.scores: None with eviction = lowest_score; give the indexer's scores, or another eviction"),
    (apply, {"config": DRIFT},
     "apply_topology_policy.witness_scores: None with witness = drift; give one score per policy block"),
    (apply, {"config": DRIFT, "witness_scores": torch.zeros(2, 6).half()},
     "apply_topology_policy.witness_scores: got float16 [2, 6] on cpu; must be float32 or float64 [2, B] on cpu"),
    (apply, {"config": RAISING},
     "apply_topology_policy.error: None with coordinate_mismatch = raise; give an int64 [4] buffer"),
    (apply, {"config": RAISING, "error": torch.zeros(3, dtype=torch.int64)},
     "apply_topology_policy.error: got int64 [3] on cpu; must be int64 [4] on cpu"),
    (lift, {"scores": torch.zeros(2, 6, dtype=torch.float64)},
     "lift_structural_scores.scores: got float64 [2, 6] on cpu; must be float32 or bfloat16 or float16 [T, N] on cpu"),
    (lift, {"row_lengths": torch.tensor([6, 6, 6])},
     "lift_structural_scores.row_lengths: got int64 [3] on cpu; must be int32 or int64 [2] on cpu"),
    (lift, {"config": MERGE.model_copy(update={"mode": Mode.OBSERVE})},
     "lift_structural_scores.config: mode: 'observe' with placement = before_topk; "
     "use topology_sparse_merge or topology_compress_sparse, or placement = after_topk"),
    (lift, {"config": MERGE.model_copy(update={"eviction": Eviction.OLDEST})},
     "lift_structural_scores.config: eviction: 'oldest' with placement = before_topk; "
     "use lowest_score, or placement = after_topk"),
    (lift, {"config": DRIFT},
     "lift_structural_scores.config: witness: 'drift' with placement = before_topk; "
     "use uniform, or placement = after_topk"),
    (lift, {"config": MERGE.model_copy(update={"sink_tokens": 3})},
     "kvplugin.policy: sinks (3 tokens) + local (0) + witnesses (0) = 3 tokens of structure exceed the cap of 2 for a "
     "top-k width of 4; use fewer or smaller windows, a smaller block_size, or a larger max_structural_fraction "
     "(now 0.5)"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "changes", "message"), REFUSED)
def test_refused(function: Callable[..., object], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as refusal:
        function(**changes)
    assert str(refusal.value) == message


CAPS = [
    (64, {"sink_tokens": 4, "local_blocks": 1, "block_size": 16}, (4, 16, 0), 16),
    (64, {"sink_blocks": 1, "local_tokens": 0, "block_size": 32}, (32, 0, 0), 16),
    (64, {"sink_tokens": 1, "witness_blocks": 2, "block_size": 8}, (1, 0, 16), 16),
    (64, {"sink_tokens": 2, "witness": "coverage", "coverage_segments": 15}, (2, 0, 15), 16),
    (3, {"sink_tokens": 2}, (2, 0, 0), 1),
    (64, {"sink_tokens": 65, "mode": "topology_only"}, (65, 0, 0), 64),
    (64, {"sink_tokens": 0, "local_tokens": 17, "mode": "observe"}, (0, 17, 0), 16),
]


@pytest.mark.parametrize(("width", "settings", "sizes", "cap"), CAPS)
def test_structure_beyond_the_cap_is_refused_with_its_numbers(
    width: int, settings: dict[str, Any], sizes: tuple[int, int, int], cap: int
) -> None:
    with pytest.raises(ArgumentError) as refusal:
        lower(PolicyConfig(**({"mode": "topology_sparse_merge"} | settings)), width)
    sink, local, witness = sizes
    assert str(refusal.value).startswith(
        f"kvplugin.policy: sinks ({sink} tokens) + local ({local}) + witnesses ({witness}) = {sum(sizes)} tokens of "
        f"structure exceed the cap of {cap} for a top-k width of {width}; "
    )


def test_structure_of_exactly_the_cap_is_accepted() -> None:
    params = lower(PolicyConfig(mode="topology_sparse_merge", sink_tokens=4, local_tokens=12), 64)
    assert (params.cap, params.max_structural) == (16, 16)


@pytest.mark.parametrize(
    ("width", "settings", "local"),
    [
        (2048, {}, 64),
        (64, {}, 12),
        (64, {"sink_tokens": 16}, 0),
        (64, {"witness_blocks": 1, "block_size": 8}, 4),
        (256, {"sink_tokens": 0, "mode": "topology_only"}, 64),
    ],
)
def test_auto_local_takes_what_the_cap_leaves(width: int, settings: dict[str, Any], local: int) -> None:
    params = lower(PolicyConfig(**({"mode": "topology_sparse_merge"} | settings)), width)
    assert (params.local, params.local_in_blocks) == (local, False)


def test_a_disabled_policy_is_never_beyond_its_cap() -> None:
    assert lower(PolicyConfig(sink_tokens=1000), 4).max_structural == 1000


def test_rows_may_come_as_one_head_of_a_3d_buffer() -> None:
    buffer = torch.tensor([[[5, 4, 3, 2]]] * 2, dtype=torch.int32)
    apply(topk=buffer)
    assert buffer.shape == (2, 1, 4)
    assert buffer.sort(-1).values.tolist() == [[[0, 2, 3, 5]]] * 2


def test_counters_are_added_to_the_given_buffer() -> None:
    counters = new_counters()
    assert apply(counters=counters) is counters
    apply(counters=counters, row_phase=torch.tensor([0, 1], dtype=torch.int8))
    prefill, decode = read_counters(counters).values()
    assert (prefill[Counter.SEEN], decode[Counter.SEEN]) == (1, 3)


def test_no_rows_are_accepted() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    counters = apply(topk=torch.zeros(0, 4, dtype=torch.int32), row_lengths=empty, scores=torch.zeros(0, 6))
    assert not counters.any()
    lift(scores=torch.zeros(0, 6), row_lengths=empty)


def test_a_recorded_mismatch_is_raised_later() -> None:
    error = torch.zeros(4, dtype=torch.int64)
    raise_recorded(error)
    apply(topk=torch.tensor([[5, 4, 3, 2], [5, 6, 3, 2]]), config=RAISING, error=error)
    with pytest.raises(CoordinateError, match=r"^topology policy, row 1: learned index 6 is outside \[0, 6\);"):
        raise_recorded(error)


def test_lift_refuses_params_of_another_width() -> None:
    params = lower(PolicyConfig(mode="topology_sparse_merge", sink_tokens=1), 8)
    with pytest.raises(ArgumentError, match=r"lowered for width 8, width is 4; lower it for this width"):
        lift_structural_scores(torch.zeros(1, 20), torch.tensor([20]), config=params, width=4)
