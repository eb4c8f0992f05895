"""The policy as flat numbers for one buffer width: what every implementation receives."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from kvplugin.config import Eviction, Fill, MismatchAction, Mode, Phase, PolicyConfig, Witness
from kvplugin.errors import ArgumentError

AUTO_LOCAL_TOKENS = 64
UNLIMITED = 2**62
LONGEST_ROW = 2**31 - 1
"""Longest row any implementation handles, in tokens: kernels hold logical indices in 32 bits."""


class PolicyParams(NamedTuple):
    """A :class:`PolicyConfig` lowered once for width ``K``; all counts are plain integers.

    ``sink`` and ``local`` are tokens, or blocks where ``sink_in_blocks`` / ``local_in_blocks`` say so; ``cap`` is the
    largest size of the structural set; ``max_structural`` the size of the largest one these settings can give.
    """

    mode: Mode
    width: int
    cap: int
    max_structural: int
    block_size: int
    sink: int
    sink_in_blocks: bool
    local: int
    local_in_blocks: bool
    witness: Witness
    witness_blocks: int
    segments: int
    eviction: Eviction
    fill: Fill
    mismatch: MismatchAction
    check_duplicates: bool
    acts_in_prefill: bool
    acts_in_decode: bool
    max_row_length: int
    max_rows: int
    max_elements: int
    max_width: int

    @property
    def needs_scores(self) -> bool:
        """True where a row's selection may depend on its learned tokens' scores."""
        return self.eviction is Eviction.LOWEST_SCORE and (self.mode.merges or self.mode is Mode.OBSERVE)

    @property
    def sink_tokens(self) -> int:
        """Sinks of a long row, in tokens."""
        return self.sink * (self.block_size if self.sink_in_blocks else 1)


@lru_cache(maxsize=256)
def lower(config: PolicyConfig, width: int) -> PolicyParams:
    """Resolve ``auto`` and the structural cap for a top-k buffer of ``width`` slots.

    Raises:
        ArgumentError: the largest possible structural set does not fit the cap; the message holds the numbers.
    """
    cap = max(1, min(width, int(width * config.max_structural_fraction)))
    if config.mode is Mode.ONLY:
        cap = width
    sink = config.sink_blocks if config.sink_tokens is None else config.sink_tokens
    assert sink is not None  # validated by PolicyConfig
    sink_in_blocks, local_in_blocks = config.sink_tokens is None, config.local_tokens is None
    block = config.block_size
    coverage = config.witness is Witness.COVERAGE
    sink_size = sink * block if sink_in_blocks else sink
    witness_size = config.coverage_segments if coverage else config.witness_blocks * block
    if config.local_tokens == "auto":
        local = max(0, min(AUTO_LOCAL_TOKENS, cap - sink_size - witness_size))
    else:
        chosen = config.local_blocks if config.local_tokens is None else config.local_tokens
        assert chosen is not None  # validated by PolicyConfig
        local = chosen
    local_size = local * block if local_in_blocks else local
    size = sink_size + local_size + witness_size
    if size > cap and config.mode is not Mode.DISABLED:
        raise ArgumentError(
            "kvplugin.policy",
            f"sinks ({sink_size} tokens) + local ({local_size}) + witnesses ({witness_size}) = {size} tokens of "
            f"structure exceed the cap of {cap} for a top-k width of {width}",
            "use fewer or smaller windows, a smaller block_size, or a larger max_structural_fraction "
            f"(now {config.max_structural_fraction})",
        )
    if config.mode is Mode.ONLY and size == 0:
        raise ArgumentError(
            "kvplugin.policy", f"topology_only has no structure left at a top-k width of {width}", "give sink_tokens"
        )
    limits = config.limits
    return PolicyParams(
        mode=config.mode,
        width=width,
        cap=cap,
        max_structural=size,
        block_size=block,
        sink=sink,
        sink_in_blocks=sink_in_blocks,
        local=local,
        local_in_blocks=local_in_blocks,
        witness=config.witness,
        witness_blocks=0 if coverage else config.witness_blocks,
        segments=config.coverage_segments,
        eviction=config.eviction,
        fill=config.fill,
        mismatch=config.coordinate_mismatch,
        check_duplicates=config.check_duplicates,
        acts_in_prefill=Phase.PREFILL in config.phases,
        acts_in_decode=Phase.DECODE in config.phases,
        max_row_length=min(limits.max_row_length or LONGEST_ROW, LONGEST_ROW),
        max_rows=limits.max_rows or UNLIMITED,
        max_elements=limits.max_elements or UNLIMITED,
        max_width=limits.max_width or UNLIMITED,
    )
