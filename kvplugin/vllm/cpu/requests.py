"""Prompt lengths of the batch being built, from the model runner that builds it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvplugin.vllm.log import warn_once

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


class RunnerRequests:
    """The one model runner of a worker process, held weakly; owner of nothing else."""

    runner: weakref.ReferenceType[Any] | None = None

    @classmethod
    def bind(cls, runner: Any) -> None:
        """Read prompt lengths from this runner's input batch from now on."""
        cls.runner = weakref.ref(runner)


def prompt_lengths(common: CommonAttentionMetadata) -> Tensor:
    """Prompt length of each request of the batch, int64 ``[num_reqs]``, in the batch's row order.

    A request that was preempted is prefilled again beyond its prompt, so vLLM's ``is_prefilling`` does not tell a row's
    phase; it is the answer only for runners that keep no prompt lengths (model runner V2).
    """
    runner = RunnerRequests.runner() if RunnerRequests.runner is not None else None
    lengths = getattr(getattr(runner, "input_batch", None), "num_prompt_tokens_cpu_tensor", None)
    if lengths is not None:
        known: Tensor = lengths[: common.num_reqs].long()
        return known
    warn_once(
        "kvplugin: this model runner keeps no prompt lengths; tokens recomputed after a preemption count as prefill"
    )
    if common.is_prefilling is None:
        return torch.zeros(common.num_reqs, dtype=torch.int64)
    return torch.where(common.is_prefilling[: common.num_reqs], common.seq_lens[: common.num_reqs].long(), 0)
