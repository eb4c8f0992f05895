"""What the reference says of a batch's rows, and assertions that say which row, and what differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from batches import Row
from kernels import LONGEST, best, row_scores
from torch import Tensor

from kvplugin.config import PolicyConfig
from kvplugin.topology import Counter, lower, new_counters, reference
from kvplugin.topology.call import PolicyCall


class Expected(NamedTuple):
    """``selections``: tokens of each row; ``counters``: int64 ``[2, len(Counter)]``, prefill and decode."""

    selections: list[set[int]]
    counters: Tensor


def expected(rows: Sequence[Row], policy: dict[str, Any], width: int) -> Expected:
    """The reference's answer for these rows, each with the top-k of its own scores."""
    topk = torch.full((len(rows), width), -1, dtype=torch.int32)
    scores = torch.empty(len(rows), LONGEST)
    for number, row in enumerate(rows):
        scores[number] = row_scores(row.request.key, row.position)
        chosen = best(scores[number, : max(0, row.visible)], width)
        topk[number, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    params = lower(PolicyConfig.model_validate(policy), width)
    counters = new_counters(topk.device).reshape(-1, 2, len(Counter))[0].clone()
    reference.apply_into(
        PolicyCall(
            topk=topk,
            row_lengths=torch.tensor([row.visible for row in rows]),
            row_live=None,
            row_phase=torch.tensor([row.position >= row.request.prompt for row in rows]).to(torch.int8),
            offsets=None,
            scores=scores,
            score_start=None,
            witness_scores=None,
            params=params,
            counters=counters,
            error=torch.zeros(4, dtype=torch.int64),
        )
    )
    return Expected([{token for token in row if token >= 0} for row in topk.tolist()], counters)


def counted(counters: Tensor) -> Tensor:
    """What a hook has counted, int64 ``[2, len(Counter)]``: arms and stripes together."""
    return counters.reshape(-1, 2, len(Counter)).sum(0)


def assert_selected(found: Tensor, wanted: Sequence[set[int]]) -> None:
    """Fail with the first row whose valid entries are not the wanted ones, each once, before any -1."""
    for number, (row, tokens) in enumerate(zip(found.tolist(), wanted, strict=True)):
        valid = [token for token in row if token >= 0]
        assert row[: len(valid)] == valid, f"row {number}: -1 at slot {row.index(-1)} of {len(valid)} valid ones"
        assert len(set(valid)) == len(valid), f"row {number}: {len(valid) - len(set(valid))} tokens twice"
        extra, missing = sorted(set(valid) - tokens), sorted(tokens - set(valid))
        assert not extra, f"row {number}: selects {extra[:8]} where {missing[:8]} are right"
        assert not missing, f"row {number}: lacks {missing[:8]}"


def assert_counted(found: Tensor, wanted: Tensor) -> None:
    """Fail with the first counter that differs."""
    for phase, name in enumerate(("prefill", "decode")):
        for counter in Counter:
            have, need = int(found[phase, counter]), int(wanted[phase, counter])
            assert have == need, f"{name} {counter.name.lower()}: counted {have}, the reference {need}"
