"""``python -m integration.quality.captured CAPTURE``: what each policy would change on one's own traffic.

A capture holds the scores of a real step, not the answers that would have come of another selection: this says how much
a policy changes and at what price in scores, never whether the answers are better. That takes an A/B.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from integration.quality.policies import Contestant, contestants
from kvplugin.errors import ArgumentError
from kvplugin.replay.capture.read import read_capture
from kvplugin.topology import apply_topology_policy, lower


class Change(NamedTuple):
    """One policy on one layer's rows, means over rows longer than K.

    Attributes:
        layer, contestant: which.
        rows: how many.
        overlap: IoU of the new selection with the indexer's.
        unchanged: share of the new selection that the indexer had selected.
        lost_score: mean score of the tokens that left, as a share of the indexer's best score in the row.
    """

    layer: int
    contestant: str
    rows: int
    overlap: float
    unchanged: float
    lost_score: float


def changes(folder: Path) -> Iterator[Change]:
    """Every policy on every captured layer that has an indexer's scores.

    Raises:
        CaptureFileError: the folder is no capture that can be used.
    """
    for record in read_capture(folder).records:
        scores, learned = record.indexer_scores, record.selection_before
        if scores is None or learned is None or record.index_group not in (None, record.layer):
            continue
        lengths = (record.inputs.cache_position[0] + 1).int()
        for contestant in contestants(learned.shape[1]):
            if contestant.config is not None:
                yield _change(record.layer, contestant, scores.float().contiguous(), learned.int(), lengths)


def _change(layer: int, contestant: Contestant, scores: Tensor, learned: Tensor, lengths: Tensor) -> Change:
    assert contestant.config is not None
    selection = learned.contiguous().clone()
    apply_topology_policy(selection, lengths, config=lower(contestant.config, learned.shape[1]), scores=scores)
    overlaps, shares, losses = [], [], []
    for row in (lengths > learned.shape[1]).nonzero()[:, 0].tolist():
        before, after = (set(each[row][each[row] >= 0].tolist()) for each in (learned, selection))
        left = sorted(before - after)
        overlaps.append(len(before & after) / len(before | after))
        shares.append(len(before & after) / len(after))
        best = float(scores[row][learned[row][learned[row] >= 0].long()].max())
        losses.append(float(scores[row][torch.tensor(left)].mean()) / best if left and best > 0 else 0.0)
    nothing = float("nan")
    return Change(
        layer, contestant.name, len(overlaps), *(mean(x) if x else nothing for x in (overlaps, shares, losses))
    )


def _table(found: Sequence[Change]) -> Table:
    table = Table(title="What policies would change (says nothing of answers)")
    for name in ("layer", "policy", "rows", "IoU with learned", "slots unchanged", "score of what leaves / best"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for each in found:
        figures = (f"{value:.3f}" for value in each[3:])
        table.add_row(str(each.layer), each.contestant, str(each.rows), *figures)
    return table


if __name__ == "__main__":
    try:
        Console(width=110).print(_table(list(changes(Path(sys.argv[1])))))
    except ArgumentError as error:
        sys.exit(f"{error}")
