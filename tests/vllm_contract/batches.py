"""Batches as vLLM's model runners describe them to metadata builders."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from kernels import LONGEST
from torch import Tensor

BLOCK_SIZE = 64
COLUMNS = LONGEST // BLOCK_SIZE


@dataclass(frozen=True)
class Request:
    """One request in one step.

    Attributes:
        key: whose scores and pages it has; from 1.
        length: tokens once the step has run.
        queries: of these, the last ones are rows of the step.
        prompt: tokens of its prompt.
    """

    key: int
    length: int
    queries: int = 1
    prompt: int = 0

    @property
    def slot(self) -> int:
        """Where model runner V2 keeps it."""
        return self.key + 10

    @property
    def positions(self) -> range:
        return range(self.length - self.queries, self.length)

    @property
    def pages(self) -> Tensor:
        """int32 ``[COLUMNS]``: physical blocks, in no order; block 0 is nobody's."""
        return (1 + self.key * COLUMNS + torch.arange(COLUMNS) * 7 % COLUMNS).to(torch.int32)

    def physical(self, token: int) -> int:
        """Row of the flat KV pool."""
        return int(self.pages[token // BLOCK_SIZE]) * BLOCK_SIZE + token % BLOCK_SIZE


class Row(NamedTuple):
    """A row that lives. ``visible``: tokens that vLLM's top-k kernel sees of it."""

    request: Request
    position: int
    visible: int


@dataclass(frozen=True)
class Batch:
    """Requests in vLLM's order: those with few queries first.

    Attributes:
        slots: queries of each decode request in the padded layout, 0 where vLLM does not pad.
        decodes: requests that go through the decode rows, in the padded layout.
        graph_requests, graph_rows: of the graph that the batch is padded for.
    """

    requests: tuple[Request, ...]
    slots: int = 0
    decodes: int = 0
    graph_requests: int = 0
    graph_rows: int = 0

    @property
    def rows(self) -> list[Row]:
        """The rows that live, in the order of the batch."""
        return [
            Row(request, position, self._visible(number, request, query))
            for number, request in enumerate(self.requests)
            for query, position in enumerate(request.positions)
        ]

    def _visible(self, number: int, request: Request, query: int) -> int:
        if self.slots and number < self.decodes:
            return request.length - self.slots + query + 1
        return request.positions[query] + 1

    def common(self, **options: Any) -> Any:
        """vLLM's description of the batch. Padding requests have no query and no token."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        missing = max(0, self.graph_requests - len(self.requests))
        queries = [request.queries for request in self.requests] + [0] * missing
        lengths = torch.tensor([request.length for request in self.requests] + [0] * missing, dtype=torch.int32)
        starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32)
        rows = max(self.graph_rows, sum(queries))
        table = torch.zeros(len(queries), COLUMNS, dtype=torch.int32)
        for number, request in enumerate(self.requests):
            table[number] = request.pages
        given = {
            "query_start_loc": starts,
            "query_start_loc_cpu": starts.clone(),
            "seq_lens": lengths,
            "num_reqs": len(queries),
            "num_actual_tokens": rows,
            "max_query_len": max(queries),
            "max_seq_len": int(lengths.max()),
            "block_table_tensor": table,
            "slot_mapping": torch.zeros(rows, dtype=torch.int64),
            "is_prefilling": torch.tensor(
                [request.length - request.queries < request.prompt for request in self.requests] + [False] * missing
            ),
            "seq_lens_cpu_upper_bound": lengths.clone(),
            "req_idx": np.array([request.slot for request in self.requests], dtype=np.intp),
        }
        return CommonAttentionMetadata(**given | options)
