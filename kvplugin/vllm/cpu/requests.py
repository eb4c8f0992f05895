"""The requests of the batch being built, from the model runner that builds it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvplugin.vllm.log import warn_once
from kvplugin.vllm.rollout.batch_requests import BatchRequests
from kvplugin.vllm.rows import request_key

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


class RunnerRequests:
    """The one model runner of a worker process, held weakly, and what is known of its requests."""

    runner: weakref.ReferenceType[Any] | None = None
    facts: BatchRequests | None = None

    @classmethod
    def bind(cls, runner: Any, facts: BatchRequests | None) -> None:
        """Read this runner's batch from now on.

        Args:
            runner: the worker's model runner.
            facts: of its requests; None where the engine has no rollout.
        """
        cls.runner, cls.facts = weakref.ref(runner), facts


def prompt_lengths(common: CommonAttentionMetadata) -> Tensor:
    """Prompt length of each request of the batch, int64 ``[num_reqs]``, in the batch's row order.

    A request that was preempted is prefilled again beyond its prompt, so vLLM's ``is_prefilling`` does not tell a row's
    phase; it is the answer only for runners that keep no prompt lengths (model runner V2).
    """
    lengths = getattr(_input_batch(), "num_prompt_tokens_cpu_tensor", None)
    if lengths is not None:
        known: Tensor = lengths[: common.num_reqs].long()
        return known
    warn_once(
        "kvplugin: this model runner keeps no prompt lengths; tokens recomputed after a preemption count as prefill"
    )
    if common.is_prefilling is None:
        return torch.zeros(common.num_reqs, dtype=torch.int64)
    return torch.where(common.is_prefilling[: common.num_reqs], common.seq_lens[: common.num_reqs].long(), 0)


def arms_and_prefixes(common: CommonAttentionMetadata) -> tuple[Tensor, Tensor] | None:
    """Policy slot and stable prefix of each request of the batch, int32 ``[num_reqs]``; None without a rollout."""
    facts = RunnerRequests.facts
    if facts is None:
        return None
    requests = _request_ids(common)
    missing = common.num_reqs - len(requests)
    return (
        torch.tensor([*facts.slots(requests), *[0] * missing], dtype=torch.int32),
        torch.tensor([*facts.stable_prefixes(requests), *[0] * missing], dtype=torch.int32),
    )


def request_keys(common: CommonAttentionMetadata) -> Tensor:
    """A key of each request of the batch that it keeps as long as it runs, int32 ``[num_reqs]``; 0 = nobody knows."""
    keys = np.zeros(common.num_reqs, dtype=np.int32)
    requests = _request_ids(common)
    keys[: len(requests)] = [request_key(name) for name in requests]
    return torch.from_numpy(keys)


def _request_ids(common: CommonAttentionMetadata) -> list[str]:
    """Of the batch; one that warms the engine up has rows and no requests."""
    return list(getattr(_input_batch(), "req_ids", ()))[: common.num_reqs]


def _input_batch() -> Any:
    runner = RunnerRequests.runner() if RunnerRequests.runner is not None else None
    return getattr(runner, "input_batch", None)
