"""What rows see and select of their request's stable prefix."""

from kvplugin.topology.prefix.counters import PrefixCounter, new_prefix_counters
from kvplugin.topology.prefix.op import count_stable_prefix

__all__ = ["PrefixCounter", "count_stable_prefix", "new_prefix_counters"]
