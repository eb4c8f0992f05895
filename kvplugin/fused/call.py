"""One checked call of the fused form: the calls of its two parts."""

from __future__ import annotations

from typing import NamedTuple

from kvplugin.remap.call import RemapCall
from kvplugin.topology.call import ArmsCall


class FusedCall(NamedTuple):
    """Arguments of one ``fused_into`` call.

    T, K and G are at least 1.

    Attributes:
        policy: rewrites its ``topk`` in place; no offsets.
        remap: translates the same ``topk`` for all members of an index group; the paged pool of one rank, in slot
            order.
    """

    policy: ArmsCall
    remap: RemapCall
