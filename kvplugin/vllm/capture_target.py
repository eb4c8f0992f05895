"""Which rows of a batch belong to the request and step that a capture waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kvplugin.vllm.capture_request import NEXT, CaptureRequest

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


class TargetRows(NamedTuple):
    """The captured rows of one step.

    Attributes:
        request: the engine's own id.
        place: index of the request in the batch.
        rows: its captured query tokens among the batch's rows; consecutive, the newest last.
        length: tokens that the newest one sees, itself included.
        prompt: tokens of the request's prompt.
        samples: the newest row's output gives the request's next token.
    """

    request: str
    place: int
    rows: slice
    length: int
    prompt: int
    samples: bool

    @property
    def step(self) -> int:
        """Generated tokens that the newest row sees; 0 in the prefill of the prompt."""
        return max(0, self.length - self.prompt)

    @property
    def positions(self) -> Tensor:
        """Logical position of each row: int64 ``[rows]``."""
        return torch.arange(self.length - (self.rows.stop - self.rows.start), self.length)


class NeverComes(Exception):
    """The step that was asked for lies behind, or its request is over."""


def running_request(wanted: CaptureRequest, runner: Any) -> str | None:
    """The engine's id of the request that is meant, or None while it is not in the batch."""
    running = runner.input_batch.req_ids
    if isinstance(wanted.request, int):
        return running[wanted.request] if wanted.request < len(running) else None
    return next((name for name in running if wanted.names(name)), None)


def target_rows(
    wanted: CaptureRequest, request: str, runner: Any, common: CommonAttentionMetadata
) -> TargetRows | None:
    """The rows to capture in this step, or None if the request or its step is not in it.

    A prefill that is cut into chunks, and one that follows a preemption, is captured in the chunk that holds the step's
    newest token.

    Raises:
        NeverComes: this step and all later ones are beyond the step that was asked for, or the request is over.
    """
    if request not in runner.requests:
        raise NeverComes(f"request {request} was over before it came to the step")
    running = runner.input_batch.req_ids[: common.num_reqs]
    if request not in running:
        return None
    place, state = running.index(request), runner.requests[request]
    first, stop = common.query_start_loc_cpu[place : place + 2].tolist()
    seen = int(common.seq_lens[place])
    length = seen if wanted.step == NEXT else state.num_prompt_tokens + wanted.step
    newest = first + (length - 1) - (seen - (stop - first))
    if newest < first:
        raise NeverComes(f"request {request} is at step {max(0, seen - state.num_prompt_tokens)} already")
    if newest >= stop:
        return None
    rows = slice(max(first, newest + 1 - wanted.rows), newest + 1)
    return TargetRows(request, place, rows, length, state.num_prompt_tokens, length == state.num_tokens)
