"""Which cached tokens a query sees: by position, and by selection in sparse replay."""

from __future__ import annotations

import torch
from torch import Tensor

from kvplugin.replay.inputs import ReplayInputs
from kvplugin.replay.reconstruct import Request


def visible_tokens(inputs: ReplayInputs, request: Request) -> Tensor:
    """bool ``[Sq, length]``: tokens at or before the query's position and, where there is a selection, inside it."""
    query = inputs.query_position_ids[request.row].unsqueeze(1)
    visible = request.positions.unsqueeze(0) <= query
    if inputs.selection is not None:
        visible &= selected_tokens(inputs.selection[request.row], request.length)
    return visible


def selected_tokens(selection: Tensor, length: int) -> Tensor:
    """Membership bool ``[T, length]`` of a selection int ``[T, K]``; entries outside ``[0, length)`` are ignored."""
    valid = (selection >= 0) & (selection < length)
    members = torch.zeros(len(selection), length + 1, dtype=torch.bool, device=selection.device)
    members.scatter_(1, torch.where(valid, selection, length).long(), True)
    return members[:, :length]
