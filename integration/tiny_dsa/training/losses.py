"""What training minimises: answers (and a little filler), and the indexers' distance to attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from integration.tiny_dsa.training import vocabulary as words
from integration.tiny_dsa.training.model import Trace, groups
from integration.tiny_dsa.training.tasks import TaskBatch

SMALLEST = 1e-9


def answer_loss(logits: Tensor, batch: TaskBatch) -> Tensor:
    """Weighted mean cross-entropy of the next token; logits ``[B, T, vocabulary]``."""
    losses = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none")
    weights = batch.weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def indexer_loss(trace: Trace) -> Tensor:
    """KL from the attention of a leader's group (mean over heads and layers) to the softmax of its scores.

    Over the selected tokens, both renormalised: DeepSeek's own objective in its two stages.
    """
    total = torch.zeros(())
    for leader, layers in groups().items():
        scores, mask = trace.scores[leader], trace.selected[leader]
        target = torch.stack([trace.attention[layer] for layer in layers]).mean(0) * mask
        target = target / target.sum(-1, keepdim=True).clamp_min(SMALLEST)
        learned = functional.log_softmax(scores.masked_fill(~mask, -torch.inf), -1).masked_fill(~mask, 0)
        total = total + (target * (target.clamp_min(SMALLEST).log() - learned)).sum(-1).mean()
    return total


def parking_loss(matching: Tensor, batch: TaskBatch) -> Tensor:
    """Mean of ``-log`` of the matching head's attention on ``<bos>``, over the rows that have nothing to match.

    Args:
        matching: probabilities ``[B, T, T]``.
        batch: its sources say which rows match.
    """
    nothing = batch.sources[:, 1:] <= words.BOS
    return -matching[:, :-1, words.BOS][nothing].clamp_min(SMALLEST).log().mean()


def answer_accuracy(logits: Tensor, batch: TaskBatch) -> float:
    """Share of the answers that the most likely token gets right."""
    answers = batch.answers[:, 1:]
    right = (logits[:, :-1].argmax(-1) == batch.tokens[:, 1:]) & answers
    return float(right.sum() / answers.sum())
