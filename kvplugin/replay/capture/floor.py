"""The A/A floor: how far two honest runs of one engine lie apart."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvplugin.replay.capture.records import Record
from kvplugin.replay.inputs import Floor
from kvplugin.replay.lse_base import to_base_e


def with_floor(record: Record, again: Record) -> Record:
    """``record`` with the largest difference of each quantity to a second honest run of it.

    Both runs must have been warm, or both cold: a prefix hit changes a prefill's shapes, and with them its rounding.
    """
    return replace(
        record,
        floor=Floor(
            out=_largest(record.observed.out, again.observed.out),
            lse=_largest(_lse(record), _lse(again)),
            log_prob=_largest(record.log_probs, again.log_probs),
            score=_largest(record.indexer_scores, again.indexer_scores),
        ),
    )


def _lse(record: Record) -> Tensor | None:
    observed = record.observed
    return None if observed.lse is None or observed.lse_base is None else to_base_e(observed.lse, observed.lse_base)


def _largest(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0
    off = (a.double() - b.double()).abs()
    finite = off[torch.isfinite(off)]
    return float(finite.max()) if finite.numel() else 0.0
