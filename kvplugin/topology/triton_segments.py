"""Coverage segments of one row, for kernels: which of them hold a token, as one vector over all segments.

Segment ``s`` of ``count`` is ``[floor(s L / count), floor((s + 1) L / count))``. The vector has ``LISTED`` > ``count``
entries; the last one takes what does not count.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvplugin.topology.triton_structure import FAR


@triton.jit
def segment_of(token, length, count):
    """Segment of each token: the first s with t + 1 <= (s + 1) L / count."""
    return (((token + 1).to(tl.int64) * count - 1) // length).to(tl.int32)


@triton.jit
def tokens_per_segment(token, counted, length, count, LISTED: tl.constexpr):
    """How many of the counted tokens lie in each segment."""
    return tl.histogram(tl.where(counted, segment_of(token, length, count), LISTED - 1), LISTED)


@triton.jit
def empty_segments(found, sinks, window_start, length, count, LISTED: tl.constexpr):
    """Segments that hold a token of the row, but none that was found and none of either window."""
    segment = tl.arange(0, LISTED)
    start = segment.to(tl.int64) * length // count
    end = (segment + 1).to(tl.int64) * length // count
    exists = (segment < count) & (start < end)
    in_sinks = (sinks > 0) & (segment <= segment_of(sinks - 1, length, count))
    in_window = (window_start < length) & (segment >= segment_of(window_start, length, count))
    return exists & (found == 0) & (in_sinks == 0) & (in_window == 0)


@triton.jit
def last_tokens(wanted, length, count, LISTED: tl.constexpr):
    """Last token of each wanted segment, ascending, and then ``FAR``."""
    end = (tl.arange(0, LISTED) + 1).to(tl.int64) * length // count
    return tl.sort(tl.where(wanted, (end - 1).to(tl.int32), FAR))
