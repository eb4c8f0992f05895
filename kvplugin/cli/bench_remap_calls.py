"""What ``kvplugin bench remap`` times: one healthy batch, and every form of translating it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from kvplugin.fused.call import FusedCall
from kvplugin.remap import Member
from kvplugin.remap.call import NO_CONTEXT_PARALLEL, RemapCall
from kvplugin.topology import PolicyParams, PolicyTable, new_counters
from kvplugin.topology.arms import apply_arms_into
from kvplugin.topology.call import ArmsCall

FORMS = {"numba": "numba_ops", "torch": "torch_ops"}
"""Module of each form; imported by the run alone, as the rest of the command must work without numba."""


class Pool(NamedTuple):
    """The paged pool of an index group, whose requests hold equally many blocks, all of them in use."""

    requests: int
    num_blocks: int
    block_size: int
    members: tuple[Member, ...]


class Contestant(NamedTuple):
    """One form of the work.

    Attributes:
        run: fills the batch's ``physical``.
        has_policy: applies the policy first, which rewrites the rows.
    """

    run: Callable[[], object]
    has_policy: bool = False


class Batch(NamedTuple):
    """A decode batch whose rows can be restored.

    Attributes:
        learned: int32 ``[T, K]``, the rows as an indexer's top-k leaves them.
        scores: float32 ``[T, L]``, those the rows come from.
        call: policy and remap of a copy of the rows; nothing is counted of the remap.
    """

    learned: Tensor
    scores: Tensor
    call: FusedCall

    def prepare(self, contestant: Contestant) -> None:
        """Restore the rows, and read the scores where they are needed: a top-k leaves both in the caches.

        On this thread alone, through numpy: OpenMP threads go on spinning for milliseconds after a torch operator, and
        would take a core from the contestant.
        """
        self.call.policy.topk.numpy()[...] = self.learned.numpy()
        if contestant.has_policy:
            self.scores.numpy().max()


def healthy_batch(learned: Tensor, scores: Tensor, params: PolicyParams, pool: Pool) -> Batch:
    """A call of the whole group on rows without a fault, the requests' pages in no order."""
    rows, topk, table = len(learned), learned.clone(), PolicyTable([params])
    pages = torch.randperm(pool.num_blocks, generator=torch.Generator().manual_seed(0)).int()
    policy = ArmsCall(
        topk=topk,
        row_lengths=torch.full((rows,), scores.shape[1], dtype=torch.int32),
        row_live=None,
        row_phase=None,
        row_arm=None,
        offsets=None,
        scores=scores,
        score_start=None,
        witness_scores=None,
        policies=table.rows,
        enabled=table.enabled,
        listed_witnesses=table.listed_witnesses,
        counters=new_counters("cpu", 1, 1),
        error=None,
    )
    remap = RemapCall(
        topk=topk,
        request_of_row=torch.arange(rows, dtype=torch.int32) % pool.requests,
        block_table=pages.reshape(pool.requests, -1),
        members=torch.tensor(pool.members),
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        compact=False,
        context_parallel=NO_CONTEXT_PARALLEL,
        workspace=None,
        physical=torch.empty(len(pool.members), *topk.shape, dtype=torch.int32),
        valid=None,
        counters=None,
    )
    return Batch(learned, scores, FusedCall(policy, remap))


def contestants_of(call: FusedCall) -> Mapping[str, Contestant]:
    """Each form's call per layer, its call per group, and its policy before that; first numba's policy within that."""
    remap = call.remap
    alone = [
        remap._replace(members=remap.members[layer : layer + 1], physical=remap.physical[layer : layer + 1])
        for layer in range(len(remap.members))
    ]
    fused = import_module("kvplugin.fused.numba_ops")
    contestants = {"fused_numba": Contestant(partial(fused.fused_into, call), has_policy=True)}
    for form, module in FORMS.items():
        translate, select = (import_module(f"kvplugin.{part}.{module}") for part in ("remap", "topology"))
        contestants[f"per_layer_{form}"] = Contestant(partial(_translate, translate, alone))
        contestants[f"grouped_{form}"] = Contestant(partial(_translate, translate, [remap]))
        contestants[f"separate_{form}"] = Contestant(partial(_separately, select, translate, call), has_policy=True)
    return contestants


def _translate(remap: ModuleType, calls: Sequence[RemapCall]) -> None:
    for call in calls:
        remap.remap_into(call)


def _separately(topology: ModuleType, remap: ModuleType, call: FusedCall) -> None:
    apply_arms_into(topology, call.policy)
    remap.remap_into(call.remap)
