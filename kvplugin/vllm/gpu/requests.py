"""Who the requests of a batch are: asked of the model runner that builds it, version 1 or 2."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvplugin.vllm.gpu.request_columns import RequestColumns, RequestMemory
from kvplugin.vllm.log import warn_once
from kvplugin.vllm.rollout.batch_requests import BatchRequests
from kvplugin.vllm.rows import request_key

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

NEVER = np.iinfo(np.int32).max
"""Prompt length of a request whose rows are all prefill."""


class RequestSource(Protocol):
    """Knows the requests of the batch that is being built."""

    def renew(self, common: CommonAttentionMetadata, memory: RequestMemory) -> RequestColumns:
        """Bring ``memory`` up to date, and return the columns of the batch's requests, in its order."""


class NoSource:
    """For engines whose requests nobody tells the plugin of: phases are vLLM's guess, and all rows are of one arm."""

    def renew(self, common: CommonAttentionMetadata, memory: RequestMemory) -> RequestColumns:
        """As :class:`RequestSource` says."""
        warn_once("kvplugin: nobody tells prompt lengths here; tokens recomputed after a preemption count as prefill")
        prefilling = common.is_prefilling
        if prefilling is not None:
            prompts = np.where(prefilling[: common.num_reqs].numpy(), NEVER, 0)
            nothing = np.zeros_like(prompts)
            memory.renew(prompts, nothing, nothing, nothing)
        return memory.columns


class RunnerRequests:
    """The requests of a worker's model runner.

    Args:
        runner: the model runner; held weakly.
        facts: arms and stable prefixes of its requests; None where the engine has no rollout.
    """

    def __init__(self, runner: Any, facts: BatchRequests | None) -> None:
        self._runner = weakref.ref(runner)
        self._facts = facts

    def renew(self, common: CommonAttentionMetadata, memory: RequestMemory) -> RequestColumns:
        """As :class:`RequestSource` says."""
        runner = self._runner()
        states = getattr(runner, "req_states", None)
        if states is not None:
            return self._renew_from_slots(states, common.req_idx, memory)
        return self._renew_from_batch(runner.input_batch, common, memory)  # type: ignore[union-attr]

    def _renew_from_slots(self, states: Any, slots: np.ndarray | None, memory: RequestMemory) -> RequestColumns:
        """Model runner V2: a batch's rows name slots, and drafts go through the target's requests in the same order."""
        if slots is not None:
            names = states.index_to_req_id
            self._put(
                memory, states.prompt_len.np[slots], slots, lambda: [names.get(slot, "") for slot in slots.tolist()]
            )
        return memory.columns

    def _renew_from_batch(self, batch: Any, common: CommonAttentionMetadata, memory: RequestMemory) -> RequestColumns:
        """Model runner V1: rows are those of the persistent batch, which a micro-batch sees a part of."""
        count = batch.num_reqs
        keys = np.fromiter(map(request_key, batch.req_ids[:count]), np.int32, count)
        self._put(memory, batch.num_prompt_tokens[:count], keys, lambda: batch.req_ids[:count])
        table = common.block_table_tensor
        # The one view of a batch that vLLM only ever slices: where it begins is where the micro-batch begins.
        return memory.columns.after(table.storage_offset() // table.stride(0))

    def _put(self, memory: RequestMemory, prompts: np.ndarray, keys: np.ndarray, names: Any) -> None:
        if self._facts is None:
            nothing = np.zeros(len(prompts), dtype=np.int32)
            memory.renew(prompts, nothing, nothing, keys)
            return
        requests = names()
        arms = np.array(self._facts.slots(requests), dtype=np.int32)
        prefixes = np.array(self._facts.stable_prefixes(requests), dtype=np.int32)
        memory.renew(prompts, arms, prefixes, keys)
