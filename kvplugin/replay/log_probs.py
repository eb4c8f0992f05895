"""Log-probabilities of the targets, from attention output and a head."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvplugin.replay.inputs import LogProbHead


class SelectedLogProbs(NamedTuple):
    """float32 ``[B, Sq]``, and the logits ``[B, Sq, V]`` they come from."""

    log_probs: Tensor
    logits: Tensor


def selected_log_probs(out: Tensor, head: LogProbHead) -> SelectedLogProbs:
    """Log-probability of each target given ``out`` (``[B, Hq, Sq, Dv]``); targets that do not count give any value."""
    hidden = out.float().transpose(1, 2).flatten(2)
    logits = hidden @ head.weight.float().T
    targets = head.targets.clamp(0, len(head.weight) - 1).unsqueeze(-1)
    return SelectedLogProbs(logits.log_softmax(-1).gather(-1, targets).squeeze(-1), logits)
