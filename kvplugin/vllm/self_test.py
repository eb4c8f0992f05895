"""The start-up self-test: synthetic rows through the engine's own top-k stage, checked against the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvplugin.errors import EngineMismatch
from kvplugin.topology import Counter, PolicyParams, new_counters, reference
from kvplugin.topology.call import PolicyCall
from kvplugin.vllm.hook import PolicyHook, TopkFunction
from kvplugin.vllm.rows import Rows

SelectRows = Callable[[Tensor, Tensor, Tensor, Rows], None]
"""The engine's top-k stage, hook included: ``(scores, row_lengths, selection, rows)``."""

POINT = "kvplugin self-test"


def run_self_test(hook: PolicyHook, select_rows: SelectRows, topk: TopkFunction) -> int:
    """Prove for every policy that the hook fires and does what the reference says; leaves its counters at 0.

    The newest tokens score best, so an unhooked top-k returns no sinks and the policy has something to do.

    Returns:
        Rows checked.

    Raises:
        EngineMismatch: the hook did not fire, or a row's selection differs from the reference.
    """
    return sum(_test_policy(hook, arm, params, select_rows, topk) for arm, params in hook.acting.items())


def _test_policy(hook: PolicyHook, arm: int, params: PolicyParams, select_rows: SelectRows, topk: TopkFunction) -> int:
    width, device = params.width, hook.counters.device
    lengths = torch.tensor([max(1, width // 2), width + 1, 3 * width], dtype=torch.int32, device=device)
    rows, columns = len(lengths), 3 * width
    phase = torch.full((rows,), 0 if params.acts_in_prefill else 1, dtype=torch.int8, device=device)
    facts = Rows(phase, torch.full((rows,), arm, dtype=torch.int32, device=device))
    scores = torch.arange(columns, dtype=torch.float32, device=device).expand(rows, -1)
    selection = torch.full((rows, width), -1, dtype=torch.int32, device=device)
    select_rows(scores.clone(), lengths, selection, facts)

    expected = torch.full_like(selection, -1)
    topk(scores, lengths, expected)
    counters = new_counters(device)
    error = torch.zeros(4, dtype=torch.int64, device=device)
    reference.apply_into(PolicyCall(expected, lengths, None, phase, None, scores, None, None, params, counters, error))
    fired = int(hook.counters[..., Counter.SEEN].sum() + hook.sampled[..., Counter.SEEN].sum())
    hook.reset()
    if fired == 0:
        raise EngineMismatch(POINT, "the policy hook did not fire on synthetic rows", "report this engine version")
    got, want = selection.sort(1).values, expected.sort(1).values
    if not torch.equal(got, want):
        row = int((got != want).any(1).nonzero()[0])
        raise EngineMismatch(
            POINT,
            f"mode {params.mode}: row of length {int(lengths[row])} selects {_difference(got[row], want[row])}",
            "report this engine version",
        )
    return rows


def _difference(got: Tensor, want: Tensor) -> str:
    have, need = set(got.tolist()), set(want.tolist())
    return f"{sorted(have - need)[:8]} where the reference selects {sorted(need - have)[:8]}"
