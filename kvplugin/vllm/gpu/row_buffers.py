"""What is known of a batch's rows, in device memory at fixed addresses: graphs read it, each step renews it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kvplugin.vllm.gpu.request_columns import RequestColumns
from kvplugin.vllm.gpu.triton_rows import ROWS_PER_PROGRAM, fill_rows_kernel
from kvplugin.vllm.rows import Rows


class BatchRows(NamedTuple):
    """Rows of one layout.

    Attributes:
        facts: live, phase, arm, prefix and request of each row; views of memory that the next step renews.
        lengths: int32 ``[T]``, KV tokens that vLLM lets each row see, on all context-parallel ranks together.
    """

    facts: Rows
    lengths: Tensor

    def at(self, rows: slice) -> BatchRows:
        """Some of the rows, as views."""
        return BatchRows(self.facts.at(rows), self.lengths[rows])


class RowBuffers:
    """Memory for the rows of the largest batch in one layout.

    Args:
        capacity: rows of the largest batch.
        device: of the rows.
        prefixes: the engine has arms, so that rows may have stable prefixes.
    """

    def __init__(self, capacity: int, device: torch.device, *, prefixes: bool) -> None:
        self._live = torch.zeros(capacity, dtype=torch.bool, device=device)
        self._phase = torch.ones(capacity, dtype=torch.int8, device=device)
        self._arm = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._prefix = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._request = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._length = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._prefixes = prefixes

    def fill(self, query_start: Tensor, lengths: Tensor, columns: RequestColumns, *, slots: int = 0) -> None:
        """Renew every row, padding included; one launch on the current stream.

        Args:
            query_start: int32 ``[R + 1]``, first row of each request; rows from ``query_start[R]`` on are padding.
            lengths: int32 ``[R]``, tokens of each request after this step; 0 = padding.
            columns: of the same requests.
            slots: rows of each request in a padded layout, 0 = side by side.
        """
        self._launch(query_start, lengths, columns, slots, one_each=False)

    def fill_one_each(self, lengths: Tensor, columns: RequestColumns) -> None:
        """Renew every row of a batch in which row ``b`` is request ``b``; arguments as in :meth:`fill`."""
        self._launch(lengths, lengths, columns, 1, one_each=True)

    def _launch(
        self, query_start: Tensor, lengths: Tensor, columns: RequestColumns, slots: int, *, one_each: bool
    ) -> None:
        capacity, requests = len(self._live), len(lengths)
        fill_rows_kernel[(triton.cdiv(capacity, ROWS_PER_PROGRAM),)](
            query_start,
            lengths,
            *columns,
            requests,
            slots,
            requests.bit_length(),
            capacity,
            self._live,
            self._phase,
            self._arm,
            self._prefix,
            self._request,
            self._length,
            ONE_EACH=one_each,
            BLOCK=ROWS_PER_PROGRAM,
        )

    def first(self, count: int) -> BatchRows:
        """The first rows, as views."""
        prefix = self._prefix[:count] if self._prefixes else None
        facts = Rows(self._phase[:count], self._arm[:count], prefix, self._live[:count], self._request[:count])
        return BatchRows(facts, self._length[:count])
